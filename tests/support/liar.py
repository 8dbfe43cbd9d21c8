"""A server that lies: it hosts one expert, and answers what it is told to, right or wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc
import torch
from google.protobuf.message import Message

from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.framing import seal
from moe_autograd.wire.layouts import layout_of
from moe_autograd.wire.methods import SERVICE
from moe_autograd.wire.parcels import ParcelReader, ParcelWriter

Answer = Callable[[int], list[bytes]]  # given the number of the call, the messages of the answer
X = torch.ones(2, 4)
WEIGHT, BIAS = ("weight", torch.ones(4, 3)), ("bias", torch.ones(4))


def parcels(*told: tuple[Message, list[torch.Tensor | None]]) -> list[bytes]:
    """Return the messages that carry these heads, each with its tensors."""
    writer = ParcelWriter()
    for head, tensors in told:
        writer.add(head, tensors)
    return list(iter(writer.next_message, None))


def results(
    *told: tuple[int, list[torch.Tensor | None]], is_sequence: bool = False, uses: Sequence[int] = ()
) -> list[bytes]:
    heads = [
        (pb.CallResult(call=call, is_sequence=is_sequence, uses=uses), tensors) for call, tensors in told
    ]
    return parcels(*heads)


def state(
    *entries: tuple[str, torch.Tensor | None], num_entries: int = 2, expert: str = "ffn.0"
) -> list[bytes]:
    told = [(pb.StateEntry(expert=expert, key=key), [tensor]) for key, tensor in entries]
    return parcels((pb.StateUpdate(num_entries=num_entries), []), *told)


def entry(
    key: str, tensor: torch.Tensor, versions: dict[str, int] | None = None
) -> tuple[pb.StateEntry, list[torch.Tensor | None]]:
    return pb.StateEntry(expert="ffn.0", key=key, versions=versions), [tensor]


class Liar:
    """Hosts `ffn.0`, and answers as it is told to."""

    def __init__(self) -> None:
        self.forward: Answer = lambda call: results((call, [X]))
        self.backward: Answer = lambda call: results((call, [X]))
        self.hosted = pb.ExpertInfo(name="ffn.0", kind="Linear", is_trained=True, num_parameters=16)
        self.forgets = grpc.StatusCode.INVALID_ARGUMENT
        self.state = state(WEIGHT, BIAS)
        self.reply = seal(pb.UpdateReply(updates=[pb.ExpertUpdate(expert="ffn.0")]))
        self.breaks_off: list[str] = []  # RPCs, each once
        self.may_end = threading.Event()  # its streams, after what they say
        self.may_end.set()
        self.streams: list[grpc.ServicerContext] = []
        self._server = grpc.server(ThreadPoolExecutor(8))
        self._server.add_registered_method_handlers(
            SERVICE,
            {
                "Info": grpc.unary_unary_rpc_method_handler(self._info),
                "Forget": grpc.unary_unary_rpc_method_handler(lambda _, call: call.abort(self.forgets, "")),
                "Step": grpc.unary_unary_rpc_method_handler(lambda request, _: self.reply),
                "GetState": grpc.unary_stream_rpc_method_handler(self._get_state),
                "SetState": grpc.stream_unary_rpc_method_handler(lambda messages, _: self.reply),
                "Forward": grpc.stream_stream_rpc_method_handler(
                    lambda messages, context: self._answer(messages, context, self.forward)
                ),
                "Backward": grpc.stream_stream_rpc_method_handler(
                    lambda messages, context: self._answer(messages, context, self.backward)
                ),
            },
        )
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Liar:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.may_end.set()
        self._server.stop(0).wait()

    def _break_off(self, rpc: str, context: grpc.ServicerContext) -> None:
        if rpc in self.breaks_off:
            self.breaks_off.remove(rpc)
            context.abort(grpc.StatusCode.INTERNAL, "broken off")

    def _get_state(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        self._break_off("GetState", context)
        return map(bytes, self.state)

    def _info(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self._break_off("Info", context)
        return seal(pb.InfoReply(experts=[self.hosted], layouts=[layout_of(dict([WEIGHT, BIAS]))]))

    def _answer(
        self, messages: Iterator[bytes], context: grpc.ServicerContext, answer: Answer
    ) -> Iterator[bytes]:
        self.streams.append(context)
        reader = ParcelReader()
        (parcel,) = [parcel for message in messages for parcel in reader.feed(message)]
        yield from map(bytes, answer(parcel.number))
        self.may_end.wait()
