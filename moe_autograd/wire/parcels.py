"""Many calls in one stream, small or large, without I/O: a writer makes messages, a reader takes them apart.

A *parcel* is a head (a `ForwardCall`, a `CallResult`, ...) with its tensors. Small parcels share a message, and those
alike an announcement (see `runs`); large tensors travel in parts of about 1 MiB, turn and turn about, so none holds up
another::

    writer.add(head A, [small])                 message 1            message 2           message 3
    writer.add(head B, [2.5 MiB])        ┌────────────────────┐ ┌────────────────┐ ┌────────────────┐
    writer.add(head C, [small])          │ A  C  B: part 0    │ │ B: part 1      │ │ B: part 2      │
                                         └─────────┬──────────┘ └───────┬────────┘ └───────┬────────┘
    reader.feed(message) returns               [A, C]                  []                [B]

Used alike by client and server, from threads and from asyncio; neither class does I/O, blocks, or takes a
lock: give each to one thread (or one event loop) at a time. Sending from asyncio::

    writer = ParcelWriter()
    writer.add(ResultHead(call=7), [output])
    while (message := writer.next_message()) is not None:
        await stream.write(message)                  # a `bytes`; gRPC with request_serializer=None

and receiving::

    reader = ParcelReader(limits)
    async for message in stream:
        for parcel in reader.feed(message):          # CorruptDataError: give up the stream
            if parcel.error is not None: ...         # this call is refused; the others are fine
            else: submit(parcel.head, parcel.tensors)
    reader.finish()                                  # CorruptDataError: it ended within a parcel
"""

from moe_autograd.wire.heads import Head, Parcel, Tensors
from moe_autograd.wire.reading import ParcelReader
from moe_autograd.wire.writing import ParcelWriter

__all__ = ["Head", "Parcel", "ParcelReader", "ParcelWriter", "Tensors"]
