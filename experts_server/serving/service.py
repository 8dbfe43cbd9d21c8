"""The RPCs of `experts.proto`: decode, submit, encode. No numerics and no policy of its own.

Streams are in `streams`, what every RPC passes through in `doorway`; here are the registration, and the calls that are
one message each or carry weights.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from importlib import metadata
from typing import Any, Literal

import grpc
from google.protobuf.message import Message

from experts_server.budget import Budget
from experts_server.configuration.config import ServingConfig
from experts_server.hosting.calls import Expected, UpdateCall
from experts_server.hosting.hosted import HostedExpert
from experts_server.hosting.state import ComingState, layout_of_expert, load_state, state_to_send
from experts_server.queues.registry import Registry, only_result
from experts_server.serving.doorway import EOF, Context, Doorway, Passing, only_message
from experts_server.serving.loads import Loads
from experts_server.serving.security import Permission
from experts_server.serving.streams import PassStream
from experts_server.serving.unanswered import Unanswered
from moe_autograd._contexts import contextmanager
from moe_autograd._metadata import versions_of
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
WEIGHTS_PATIENCE_S = 60.0  # with the client of one of these, which travel in parts of a megabyte

Save = Callable[[], Awaitable[str]]


class Service:
    """The handlers of one server.

    Args:
        registry: what is hosted.
        doorway: that RPCs pass through.
        save: writes a checkpoint and returns its name; raises `CheckpointError` where there is no folder for it.
        config: its limits of what clients send, and its latency.

    Raises:
        ConfigError: an expert cannot tell what its state holds.

    Threads: the event loop's.
    """

    def __init__(self, registry: Registry, doorway: Doorway, save: Save, config: ServingConfig) -> None:
        limits = config.limits
        self.registry = registry
        self.doorway = doorway
        self.limits = TensorLimits(limits.max_tensor_bytes, limits.max_pass_bytes)
        self.max_calls_per_pass = limits.max_calls_per_pass
        self.latency_s = config.latency_ms / 1000
        self.server_id = secrets.token_hex(8)
        self.mark = mark_of(self.server_id)
        self.received = Budget(limits.received_bytes, "bytes of unfinished calls")
        self.unanswered = Unanswered(limits.max_queued_bytes)
        self.weights_under_way = Budget(
            MAX_WEIGHTS_UNDER_WAY, "RPCs that fetch or set weights", retry_after_s=1.0, is_configured=False
        )
        self._save = save
        self.loads = Loads(registry)
        # Experts with hooks that came late, which may change what these take, and whether they draw.
        self._had_late_hooks: set[str] = set()
        # asked for once, before anybody waits: they never change, and a module may take its time to tell
        numbers: dict[bytes, int] = {}
        self._layout_of = {
            name: numbers.setdefault(layout_of_expert(queue.hosted).SerializeToString(), len(numbers))
            for name, queue in registry.items()
        }
        self._started_at = time.monotonic()
        # so is the rest, or each Info of thousands of experts would hold up everybody for a fifth of a second
        self._info_reply = pb.InfoReply(
            server_version=metadata.version("moe-autograd"),
            server_id=self.server_id,
            experts=[_expert_info(queue.hosted, self._layout_of[name]) for name, queue in registry.items()],
            layouts=map(pb.StateLayout.FromString, numbers),
            limits=pb.ServerLimits(
                max_tensor_bytes=limits.max_tensor_bytes, max_message_bytes=MAX_MESSAGE_BYTES
            ),
        )

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the handlers, all of them as of streams, which are the same on the wire; see `only_message`."""
        unary = grpc.stream_unary_rpc_method_handler
        handlers = {
            "Info": unary(self._unary(self._info, pb.InfoRequest, "read")),
            "Step": unary(self._unary(partial(self._update, "step"), pb.UpdateRequest, "train")),
            "ZeroGrad": unary(self._unary(partial(self._update, "zero_grad"), pb.UpdateRequest, "train")),
            "Expect": unary(self._unary(self._expect, pb.ExpectRequest, "read")),
            "Forget": unary(self._unary(self._forget, pb.ForgetRequest, "read")),
            "Save": unary(self._unary(self._save_now, pb.SaveRequest, "train")),
            "Forward": grpc.stream_stream_rpc_method_handler(self._pass(FORWARD, "read")),
            "Backward": grpc.stream_stream_rpc_method_handler(self._pass(BACKWARD, "train")),
            "GetState": grpc.stream_stream_rpc_method_handler(self._get_state),
            "SetState": grpc.stream_unary_rpc_method_handler(self._set_state),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(methods.SERVICE, handlers),))

    def _unary(
        self, answer: Callable[[Any], Awaitable[Message]], request_class: type[Any], permission: Permission
    ) -> Callable[[Any, Context], Awaitable[bytes]]:
        async def handle(_: AsyncIterator[bytes], context: Context) -> bytes:
            async with self.doorway.passing(context, permission) as rpc:
                sealed = await only_message(rpc)
                request = unseal(request_class, sealed, required=request_class is not pb.InfoRequest)
                return seal(await answer(request))

        return handle

    def _pass(
        self, kind: tuple[type[Any], ...], permission: Permission
    ) -> Callable[[Any, Context], Awaitable[None]]:
        async def handle(_: AsyncIterator[bytes], context: Context) -> None:
            async with self.doorway.passing(context, permission) as rpc:
                await PassStream(self, kind, rpc).run()

        return handle

    # ---- updates

    async def _update(self, kind: Literal["step", "zero_grad"], request: pb.UpdateRequest) -> pb.UpdateReply:
        _check_kind(request, kind.upper())
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

        results, most = [], self.registry.max_waiting
        for first in range(0, len(names), most):  # more at once would never find room
            results += await self.registry.ask(names[first : first + most], call)
        return _update_reply(names, results)

    # ---- information, weights, checkpoints

    async def _info(self, _: pb.InfoRequest) -> pb.InfoReply:
        for info, queue in zip(self._info_reply.experts, self.registry.values(), strict=True):
            hosted = queue.hosted
            info.num_updates, info.replica = hosted.num_updates, hosted.replica
            if hosted.caller.late_hooks or info.name in self._had_late_hooks:
                self._had_late_hooks.add(info.name)
                info.may_draw = not hosted.caller.random.is_silent
                info.ClearField("inputs")
                info.inputs.extend(_inputs_of(hosted))
        self._info_reply.up_for_s = time.monotonic() - self._started_at
        return self._info_reply

    def _layout(self, name: str) -> pb.StateLayout:
        return self._info_reply.layouts[self._layout_of[name]]

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

    async def _get_state(self, _: AsyncIterator[bytes], context: Context) -> None:
        async with self.doorway.passing(context, "read") as rpc:
            request = unseal(pb.GetStateRequest, await only_message(rpc))
            rpc.patience_s = WEIGHTS_PATIENCE_S
            await rpc.watch_writes()
            with self._weights_under_way():
                await self._send_state(rpc, list(request.experts) or list(self.registry))

    async def _send_state(self, rpc: Passing, names: Sequence[str]) -> None:
        def to_send(hosted: HostedExpert) -> Any:
            return state_to_send(hosted, self._layout(hosted.name))

        writer = ParcelWriter()
        for name in names:
            state = only_result(await self.registry.inspect([name], to_send))
            writer.add(pb.StateUpdate(num_entries=len(state)))
            versions = versions_of(state)
            for key, tensor in state.items():
                writer.add(pb.StateEntry(expert=name, key=key, versions=versions), [tensor])
                versions = {}
            while (message := writer.next_message()) is not None:
                await rpc.ask_again()
                await rpc.write(message)

    async def _set_state(self, _: AsyncIterator[bytes], context: Context) -> bytes:
        async with self.doorway.passing(context, "train") as rpc:
            rpc.patience_s = WEIGHTS_PATIENCE_S
            with contextlib.ExitStack() as place:
                place.enter_context(self._weights_under_way())
                # not held here: what ends in an error grpc keeps, with its traceback, until the collector comes by
                return seal(await self._apply_state(*await self._receive_state(rpc), place))

    @contextmanager
    def _weights_under_way(self) -> Iterator[None]:
        self.weights_under_way.take(1)
        try:
            yield
        finally:
            self.weights_under_way.give_back(1)

    async def _receive_state(self, rpc: Passing) -> tuple[pb.StateUpdate, dict[str, ComingState]]:
        reader = ParcelReader(self.limits)
        head: pb.StateUpdate | None = None
        states: dict[str, ComingState] = {}
        num_entries = 0
        while (message := await rpc.read()) is not EOF:
            for parcel in reader.feed(message):
                if parcel.error is not None:
                    # it would come in the same way again: no reason to try
                    raise InvalidCallError(str(parcel.error)) from parcel.error
                if head is None and isinstance(parcel.head, pb.StateUpdate):
                    head = parcel.head
                    continue
                if head is None or not isinstance(parcel.head, pb.StateEntry) or len(parcel.tensors) != 1:
                    raise InvalidCallError(
                        "state: expected one StateUpdate, and then StateEntry parcels of one tensor each, got "
                        f"{type(parcel.head).__name__} with {len(parcel.tensors)}. The client is broken."
                    )
                num_entries += 1
                name = self.registry[parcel.head.expert].hosted.name
                if name not in states:
                    states[name] = ComingState(name, self._layout(name))
                states[name].add(parcel.head, parcel.tensors[0])
        reader.finish()
        if head is None or head.num_entries != num_entries:
            expected = "a StateUpdate" if head is None else f"{head.num_entries} entries"
            raise CorruptDataError(f"state: expected {expected}, got {num_entries} entries. Send it again.")
        return head, states

    async def _apply_state(
        self, head: pb.StateUpdate, states: dict[str, ComingState], place: contextlib.ExitStack
    ) -> pb.UpdateReply:
        """Check all experts before the first is changed; then change all between the same calls, as a step does."""
        whole = {name: coming.whole() for name, coming in states.items()}
        names = list(whole)

        def load(hosted: HostedExpert) -> int:
            return load_state(hosted, whole[hosted.name], head)

        return _update_reply(names, await self.loads.load(names, load, place))


def _update_reply(names: Sequence[str], results: Sequence[Any]) -> pb.UpdateReply:
    """Return for each expert the number of its updates, or what went wrong."""
    return pb.UpdateReply(
        updates=[
            pb.ExpertUpdate(expert=name, status=status_of(result))
            if isinstance(result, BaseException)
            else pb.ExpertUpdate(expert=name, num_updates=result)
            for name, result in zip(names, results, strict=True)
        ]
    )


def _check_kind(request: pb.UpdateRequest, kind: str) -> None:
    """Refuse what was meant for the other RPC: grpc's own headers have no checksum, and a bit of them can flip."""
    if request.kind not in (pb.ANY_UPDATE, pb.UpdateKind.Value(kind)):
        raise CorruptDataError(
            f"update: expected kind {kind}, got {request.kind}. It was meant for another RPC; "
            "nothing was changed. Send it again."
        )


def _inputs_of(hosted: HostedExpert) -> list[pb.TensorSpec]:
    spec = hosted.spec
    return [spec.tensor.message()] if spec.is_certain else []


def _expert_info(hosted: HostedExpert, layout: int) -> pb.ExpertInfo:
    training = hosted.training
    return pb.ExpertInfo(
        name=hosted.name,
        kind=type(hosted.module).__name__,
        inputs=_inputs_of(hosted),
        may_draw=not hosted.caller.random.is_silent,
        num_parameters=sum(p.numel() for p in hosted.module.parameters()),
        is_trained=training is not None,
        update="ON_STEP" if training is None else training.update.upper(),
        optimizer=type(training.optimizer).__name__ if training is not None else "",
        wants_hints=hosted.wants_hints,
        layout=layout,
    )
