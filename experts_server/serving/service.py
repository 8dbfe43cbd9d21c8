"""The RPCs of `experts.proto`: decode, submit, encode. No numerics and no policy of its own.

Streams are in `streams`; here are the registration, the checks that come before every RPC (state, credentials),
the translation of errors at the edge, and the calls that are one message each.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from importlib import metadata
from typing import Any

import grpc
import torch
from google.protobuf.message import Message

from experts_server.budget import Budget
from experts_server.hosting.calls import Expected, UpdateCall
from experts_server.hosting.hosted import HostedExpert
from experts_server.hosting.state import check_size, check_state, copy_state, layout_of_expert, load_state
from experts_server.queues.registry import Registry
from experts_server.serving.doorway import Context, Doorway
from experts_server.serving.security import Gate, Permission
from experts_server.serving.streams import PassStream
from moe_autograd.errors import CorruptDataError, InvalidCallError
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire import methods
from moe_autograd.wire.framing import mark_of, seal, unseal
from moe_autograd.wire.heads import BACKWARD, FORWARD
from moe_autograd.wire.options import MAX_MESSAGE_BYTES
from moe_autograd.wire.parcels import ParcelReader, ParcelWriter
from moe_autograd.wire.status import status_of
from moe_autograd.wire.tensors import TensorLimits

# RPCs that fetch or set weights; each holds a copy of an expert's, for as long as it takes.
MAX_WEIGHTS_UNDER_WAY = 16

Save = Callable[[], Awaitable[str]]


class Service:
    """The handlers of one server.

    Args:
        registry: what is hosted.
        gate: who may do what.
        save: writes a checkpoint and returns its name; raises `CheckpointError` where there is no folder for it.
        limits: of what a client sends.
        max_calls_per_pass: in one stream.
        max_received_bytes: of calls that have not come whole, over all streams.
        max_concurrent_rpcs: at once; more are turned away with a hint when to come back.
        latency_s: added to each message of calls, for demonstrations.

    Threads: the event loop's.
    """

    def __init__(
        self,
        registry: Registry,
        gate: Gate,
        save: Save,
        *,
        limits: TensorLimits,
        max_calls_per_pass: int,
        max_concurrent_rpcs: int,
        max_received_bytes: int,
        latency_s: float = 0.0,
    ) -> None:
        self.registry = registry
        self.limits = limits
        self.max_calls_per_pass = max_calls_per_pass
        self.latency_s = latency_s
        self.server_id = secrets.token_hex(8)
        self.mark = mark_of(self.server_id)
        self.received = Budget(max_received_bytes, "bytes of unfinished calls")
        self.weights_under_way = Budget(
            MAX_WEIGHTS_UNDER_WAY, "RPCs that fetch or set weights", retry_after_s=1.0
        )
        self.doorway = Doorway(max_concurrent_rpcs)
        self.gate = gate
        self._save = save
        # read once: it is that of what runs, and no file may be opened later
        self._version = metadata.version("moe-autograd")
        self._layouts: dict[str, bytes] = {}  # by expert; they never change, and take long to find out

    async def drain(self, timeout_s: float) -> bool:
        """Turn new RPCs away and wait for those in flight; return whether all of them came to their end."""
        return await self.doorway.close(timeout_s)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the handlers."""
        unary = grpc.unary_unary_rpc_method_handler
        handlers = {
            "Info": unary(self._unary(self._info, pb.InfoRequest, "read")),
            "Step": unary(self._unary(self._step, pb.UpdateRequest, "train")),
            "ZeroGrad": unary(self._unary(self._zero_grad, pb.UpdateRequest, "train")),
            "Expect": unary(self._unary(self._expect, pb.ExpectRequest, "read")),
            "Forget": unary(self._unary(self._forget, pb.ForgetRequest, "read")),
            "Save": unary(self._unary(self._save_now, pb.SaveRequest, "train")),
            "Forward": grpc.stream_stream_rpc_method_handler(self._guarded(self._forward, "read")),
            "Backward": grpc.stream_stream_rpc_method_handler(self._guarded(self._backward, "train")),
            "GetState": grpc.unary_stream_rpc_method_handler(self._get_state),
            "SetState": grpc.stream_unary_rpc_method_handler(self._set_state),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(methods.SERVICE, handlers),))

    # ---- what comes before and after every RPC

    def _unary(
        self, answer: Callable[[Any], Awaitable[Message]], request_class: type[Any], permission: Permission
    ) -> Callable[[bytes, Context], Awaitable[bytes]]:
        async def handle(sealed: bytes, context: Context) -> bytes:
            async with self.doorway.passing(context):
                self.gate.check(context.invocation_metadata(), permission)
                request = unseal(request_class, sealed, required=request_class is not pb.InfoRequest)
                return seal(await answer(request))
            raise AssertionError("abort raises")

        return handle

    def _guarded(
        self, serve: Callable[[AsyncIterator[bytes], Context], Awaitable[None]], permission: Permission
    ) -> Callable[[Any, Context], Awaitable[None]]:
        async def handle(requests: AsyncIterator[bytes], context: Context) -> None:
            async with self.doorway.passing(context):
                self.gate.check(context.invocation_metadata(), permission)
                await serve(requests, context)

        return handle

    # ---- passes

    async def _forward(self, requests: AsyncIterator[bytes], context: Context) -> None:
        await PassStream(self, FORWARD, requests, context).run()

    async def _backward(self, requests: AsyncIterator[bytes], context: Context) -> None:
        await PassStream(self, BACKWARD, requests, context).run()

    # ---- updates

    async def _step(self, request: pb.UpdateRequest) -> pb.UpdateReply:
        _check_kind(request, pb.STEP)
        return await self._update(request, "step")

    async def _zero_grad(self, request: pb.UpdateRequest) -> pb.UpdateReply:
        _check_kind(request, pb.ZERO_GRAD)
        return await self._update(request, "zero_grad")

    async def _update(self, request: pb.UpdateRequest, kind: Any) -> pb.UpdateReply:
        names = list(request.experts) or [n for n, queue in self.registry.items() if queue.hosted.training]
        if len(set(names)) != len(names):
            raise InvalidCallError(
                f"{kind}: expected each expert once, got {len(names) - len(set(names))} repeated."
            )

        if len(request.gathered) not in (0, len(request.experts)):
            raise InvalidCallError(
                f"{kind}: expected a count of backwards for each of {len(request.experts)} experts or for none, got "
                f"{len(request.gathered)}. The client is broken."
            )
        counts = iter([Expected(c.at_least, c.at_most, c.digest, tuple(c.unsure)) for c in request.gathered])

        def call(reply: Any) -> UpdateCall:
            return UpdateCall(
                request.client_id, reply, kind, request.sequence, request.settled_below, next(counts, None)
            )

        results = await self.registry.ask(names, call)
        updates = []
        for name, result in zip(names, results, strict=True):
            failed = isinstance(result, BaseException)
            updates.append(
                pb.ExpertUpdate(
                    expert=name,
                    status=status_of(result) if failed else None,
                    num_updates=0 if failed else result,
                )
            )
        return pb.UpdateReply(updates=updates)

    # ---- information, weights, checkpoints

    async def _info(self, _: pb.InfoRequest) -> pb.InfoReply:
        layouts: dict[bytes, int] = {}
        experts = []
        for name, queue in self.registry.items():
            if name not in self._layouts:
                self._layouts[name] = layout_of_expert(queue.hosted).SerializeToString()
            layout = layouts.setdefault(self._layouts[name], len(layouts))
            experts.append(_expert_info(queue.hosted, layout))
        return pb.InfoReply(
            server_version=self._version,
            server_id=self.server_id,
            experts=experts,
            layouts=map(pb.StateLayout.FromString, layouts),
            limits=pb.ServerLimits(
                max_tensor_bytes=self.limits.max_tensor_bytes, max_message_bytes=MAX_MESSAGE_BYTES
            ),
        )

    async def _expect(self, request: pb.ExpectRequest) -> pb.ExpectReply:
        for name in request.experts:
            self.registry[name].hosted.prefetch()
        return pb.ExpectReply()

    async def _forget(self, request: pb.ForgetRequest) -> pb.ForgetReply:
        if len(request.experts) != len(request.call_ids):
            raise InvalidCallError(
                f"forget: expected a call of each of {len(request.experts)} experts, got {len(request.call_ids)}."
            )
        for name, call_id in zip(request.experts, request.call_ids, strict=True):
            if name in self.registry:  # else it has moved away
                self.registry[name].hosted.kept.let_go(request.client_id, call_id)
        return pb.ForgetReply()

    async def _save_now(self, _: pb.SaveRequest) -> pb.SaveReply:
        return pb.SaveReply(generation=await self._save())

    async def _get_state(self, sealed: bytes, context: Context) -> None:
        async with self.doorway.passing(context):
            self.gate.check(context.invocation_metadata(), "read")
            request = unseal(pb.GetStateRequest, sealed)
            writer = ParcelWriter()
            with self._weights_under_way():
                for name in list(request.experts) or list(self.registry):
                    (state,) = await self.registry.inspect([name], copy_state)
                    _raise(state)
                    writer.add(pb.StateUpdate(num_entries=len(state)))
                    for key, tensor in state.items():
                        writer.add(pb.StateEntry(expert=name, key=key), [tensor])
                    while (message := writer.next_message()) is not None:
                        await context.write(message)

    async def _set_state(self, requests: AsyncIterator[bytes], context: Context) -> bytes:
        async with self.doorway.passing(context):
            self.gate.check(context.invocation_metadata(), "train")
            with self._weights_under_way():
                head, states = await self._receive_state(requests)
                return seal(await self._apply_state(head, states))
        raise AssertionError("abort raises")

    @contextlib.contextmanager
    def _weights_under_way(self) -> Iterator[None]:
        self.weights_under_way.take(1)
        try:
            yield
        finally:
            self.weights_under_way.give_back(1)

    async def _receive_state(
        self, requests: AsyncIterator[bytes]
    ) -> tuple[pb.StateUpdate, dict[str, dict[str, torch.Tensor]]]:
        reader = ParcelReader(self.limits)
        head: pb.StateUpdate | None = None
        states: dict[str, dict[str, torch.Tensor]] = {}
        num_entries = 0
        async for message in requests:
            for parcel in reader.feed(message):
                if parcel.error is not None:
                    raise parcel.error
                if isinstance(parcel.head, pb.StateUpdate) and head is None:
                    head = parcel.head
                elif isinstance(parcel.head, pb.StateEntry) and len(parcel.tensors) == 1 and head is not None:
                    num_entries += 1
                    self.registry[parcel.head.expert]
                    tensor = parcel.tensors[0]
                    if tensor is None:
                        raise InvalidCallError(
                            f"state of expert {parcel.head.expert!r}: expected a tensor, got None."
                        )
                    states.setdefault(parcel.head.expert, {})[parcel.head.key] = tensor
                    check_size(self.registry[parcel.head.expert].hosted, states[parcel.head.expert])
                else:
                    raise InvalidCallError("state: expected one StateUpdate and then StateEntry parcels.")
        reader.finish()
        if head is None or head.num_entries != num_entries:
            expected = "a StateUpdate" if head is None else f"{head.num_entries} entries"
            raise CorruptDataError(f"state: expected {expected}, got {num_entries} entries. Send it again.")
        return head, states

    async def _apply_state(
        self, head: pb.StateUpdate, states: dict[str, dict[str, torch.Tensor]]
    ) -> pb.UpdateReply:
        """Check all experts before the first is changed."""
        checks = [check_state(self.registry[name].hosted, state) for name, state in states.items()]
        _raise(next((error for error in checks if error is not None), None))
        names = list(states)
        results = []
        for name in names:
            results += await self.registry.inspect(
                [name], functools.partial(load_state, state=states[name], update=head)
            )
        return pb.UpdateReply(
            updates=[
                pb.ExpertUpdate(
                    expert=name,
                    status=status_of(result) if isinstance(result, BaseException) else None,
                    num_updates=self.registry[name].hosted.num_updates,
                )
                for name, result in zip(names, results, strict=True)
            ]
        )


def _check_kind(request: pb.UpdateRequest, kind: pb.UpdateKind) -> None:
    """Refuse what was meant for the other RPC: grpc's own headers have no checksum, and a bit of them can flip."""
    if request.kind not in (pb.ANY_UPDATE, kind):
        raise CorruptDataError(
            f"update: expected kind {pb.UpdateKind.Name(kind)}, got {request.kind}. It was meant for another RPC; "
            "nothing was changed. Send it again."
        )


def _raise(result: Any) -> None:
    if isinstance(result, BaseException):
        raise result


def _expert_info(hosted: HostedExpert, layout: int) -> pb.ExpertInfo:
    spec, training = hosted.spec, hosted.training
    return pb.ExpertInfo(
        name=hosted.name,
        kind=type(hosted.module).__name__,
        inputs=[spec.announcement()] if spec.is_certain else [],
        num_parameters=sum(p.numel() for p in hosted.module.parameters()),
        is_trained=training is not None,
        update="ON_STEP" if training is None else training.update.upper(),
        num_updates=hosted.num_updates,
        optimizer=type(training.optimizer).__name__ if training is not None else "",
        wants_hints=hosted.wants_hints,
        layout=layout,
        replica=hosted.replica,
        may_draw=not hosted.caller.random.is_silent,
    )
