"""The contract between the client and `experts_server`: messages, tensors, errors and channel options.

=================  ===========================================================================
`experts.proto`    the RPCs and their messages; read it first
`methods`          the RPCs' names and kinds, for both sides
`parcels`          many calls in one stream (start here): `writing` and `reading` them, without I/O; `incoming`:
                   those that have not come whole
`heads`, `runs`    what a parcel is made of, and how small ones that are alike travel together
`tensors`          tensor <-> announcement and raw bytes; checks everything, never pickles
`framing`          messages with a checksum at their end, written without copying tensors
`compression`      what may travel in fewer bytes
`status`           errors <-> status, in calls and in RPCs
`specs`            what an expert takes; `layouts`: what its state holds
`gathered`         which backwards a server has gathered, told in eight bytes
`options`          channel and server options, message sizes, limits
`addresses`        what users give to reach a server, looked at before grpc sees it; so are `tokens`
`certificates`     and these; `x509`: what they say of themselves
`generate`         writes `experts_pb2` of `experts.proto`
=================  ===========================================================================

Imports nothing of ours but `moe_autograd.errors` and `_computed_once`, and grpc only in `status` and `certificates`.
"""
