"""The server as the network sees it: ports, RPCs, streams, credentials, health and metrics.

Begin with `server`, its life. The first line of each file says what it is for::

    the server              server, configured, embedded, loop_thread, ports
    what it is asked        service, streams, loads, arriving, unanswered, doorway
    who may ask             certificates, key_kinds, security, followed
    by others than clients  health, metrics, open_inference
"""
