"""Channel and server options, message sizes: in one place, for both sides.

grpc's defaults are made for something else: unlimited patience with a peer that is gone, and messages that are
either too small or without a limit. What each value is for stands beside it.
"""

from __future__ import annotations

PART_BYTES = 1 << 20  # 64 MiB as one message moves at a fifth of the speed, and holds up all small calls
PARCEL_BYTES = 1024  # that one weighs in Python, beside its tensors
MAX_PARCELS = 1 << 16  # in a message: on the wire each weighs as little as six bytes
_WINDOW_BYTES = 16 << 20  # of answers under way: fills 1 Gbit/s over 100 ms
LONGEST_S = 1e8  # grpc takes a deadline in the year 2262 for one that has passed
MAX_MESSAGE_BYTES = 4 << 20  # never -1: one hostile message would take all memory

ChannelOption = tuple[str, int | str]

_BOTH: tuple[ChannelOption, ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.max_pings_without_data", 0),
)

CHANNEL_OPTIONS: tuple[ChannelOption, ...] = (
    *_BOTH,
    # A server that is stopped or unplugged says nothing. With a call under way we ask every second (grpc makes that of
    # 0.8 s) and wait 0.9 s for the answer, which grpc gives without Python: within 2 s we know. The ping timeout has
    # to be set too, else the answer is awaited for a minute.
    ("grpc.keepalive_time_ms", 800),
    ("grpc.keepalive_timeout_ms", 900),
    ("grpc.http2.ping_timeout_ms", 900),
    # grpc's own probes, which find out how much to let be under way, have the same limit, and the answers to them wait
    # behind what comes in: a slow link that brings an answer would seem dead. Ours are sent only where nothing comes.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
    # A server that comes back is found within 0.3 s: between two attempts calls fail as the last one did. The default
    # waits up to two minutes. The shortest backoff is also the limit of one attempt to connect, also to a server that
    # is frozen or unplugged; grpc's is 20 s.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.enable_retries", 0),  # ours know what is safe to repeat
    # grpc would go through the environment's proxy for web pages, to a server on this very machine as well.
    ("grpc.enable_http_proxy", 0),
)

SERVER_OPTIONS: tuple[ChannelOption, ...] = (
    *_BOTH,
    # A client that is gone keeps its calls' memory until this is noticed, after half a minute; where others wait for
    # it, calls that have not come whole go sooner (`experts_server/serving/streams`). grpc's own probes have the same
    # limit, from the first message on, and a client's answers to them wait behind all that it uploads: over a slow link
    # for many seconds.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.so_reuseport", 0),  # else a second server on the port starts, and takes every other connection
    # Keepalive pings of waiting clients are no attack.
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
)
