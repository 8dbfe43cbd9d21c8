"""Real expert servers for tests: processes of their own, or in this one; and a client that speaks plain wire.

`ServerProcess` runs `experts-server serve` and knows its address from the line it prints. `WireClient` says exactly
what it is told to say, right or wrong: the tests of the server do not depend on `moe_autograd.remote`. For servers in
this process use `experts_server.ExpertsServer` itself.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import torch
from torch import Tensor

from experts_server import ExpertsServer
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire import methods
from moe_autograd.wire.framing import seal, unseal
from moe_autograd.wire.options import MAX_MESSAGE_BYTES
from moe_autograd.wire.parcels import ParcelReader, ParcelWriter
from tests.support.parcels import messages_of
from tests.support.warm import COMMAND, ROOT, WarmProcess

START_S = 120.0  # patience with a busy machine; nothing that works comes near it
_OPTIONS = (  # without pings: a machine too busy to answer one is no fault that these tests are about
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_retries", 0),
)


class ServerProcess:
    """`experts-server serve` in a process of its own; use it in a `with` statement. Once it has ended, it may be
    started again.

    Args:
        arguments: of `serve`; without `--listen`, a free port of loopback is taken.
        path: where Python looks for modules as well.
        is_warm: whether it is a warm process (see `warm`); otherwise it is `python -m experts_server`, started anew.
        environment: of one that is not: added to this process's own.
    """

    def __init__(
        self,
        *arguments: str,
        path: Path | None = None,
        is_warm: bool = True,
        environment: dict[str, str] | None = None,
    ) -> None:
        listen = () if "--listen" in arguments or "--config" in arguments else ("--listen", "127.0.0.1:0")
        self._arguments = ["serve", *listen, *arguments]
        self._path = [str(ROOT)] if path is None else [str(path), str(ROOT)]
        self._is_warm = is_warm and environment is None
        self._environment = environment or {}
        self.address = ""
        self.log: list[str] = []

    def start(self) -> ServerProcess:
        """Start it; return when it serves, or raise with its log if it does not come up."""
        (out, stdout), (err, stderr) = os.pipe(), os.pipe()
        self.process = self._started(stdout, stderr)
        os.close(stdout)
        os.close(stderr)
        self._stdout, self._stderr = os.fdopen(out), os.fdopen(err)
        self._log_reader = threading.Thread(target=self._read_log, daemon=True)
        self._log_reader.start()
        watchdog = threading.Timer(START_S, self.process.kill)
        watchdog.start()
        line = self._stdout.readline()
        watchdog.cancel()
        if not line.startswith("experts-server: serving"):
            self.wait()
            raise AssertionError(f"{self._arguments} did not come up:\n{''.join(self.log)}")
        self.address = line.split()[-1]
        return self

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def wait(self, timeout_s: float = START_S) -> int:
        """Wait for its end; return its exit status (negative: the signal that killed it)."""
        status = self.process.wait(timeout_s)
        self._log_reader.join(timeout_s)
        self._stdout.close()
        self._stderr.close()
        return status

    def stop(self) -> int:
        """Ask it to stop, as an operator would; return its exit status."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """Kill it as a power cut would."""
        self.process.kill()
        self.wait()

    def __enter__(self) -> ServerProcess:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.kill()

    def _started(self, stdout: int, stderr: int) -> subprocess.Popen[bytes] | WarmProcess:
        if self._is_warm:
            program = f"import sys; sys.path[:0] = {self._path}; {COMMAND}"
            return WarmProcess(program, *self._arguments, stdout=stdout, stderr=stderr)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(self._path), **self._environment}
        command = [sys.executable, "-m", "experts_server", *self._arguments]
        return subprocess.Popen(command, stdout=stdout, stderr=stderr, env=environment)

    def _read_log(self) -> None:
        for line in self._stderr:
            self.log.append(line)


@dataclass(frozen=True)
class Answer:
    """One call's result as it came."""

    result: pb.CallResult
    tensors: tuple[Tensor | None, ...]

    @property
    def code(self) -> str:
        """The status by name; "OK" for success."""
        return pb.Code.Name(self.result.status.code)

    @property
    def text(self) -> str:
        """The status's message."""
        return self.result.status.message


class WireClient:
    """Speaks `experts.proto` to one server, call by call; use it in a `with` statement.

    Args:
        address: the server's.
        client_id: what it calls itself.
        token: sent with every RPC.
        credentials: TLS.
    """

    def __init__(
        self,
        address: str,
        client_id: bytes = b"tester",
        token: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self.address = address
        self.client_id = client_id
        self.sequence = 0
        self.settled_below = 0
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        self.channel = (
            grpc.insecure_channel(address, _OPTIONS)
            if credentials is None
            else grpc.secure_channel(address, credentials, _OPTIONS)
        )

    def __enter__(self) -> WireClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    # ---- one call

    def forward(self, expert: str, *inputs: Tensor, call_id: int = 1, **fields: Any) -> Answer:
        """Call one expert."""
        return self.stream("Forward", [self.forward_call(expert, *inputs, call_id=call_id, **fields)])[0]

    def backward(
        self,
        expert: str,
        *grads: Tensor | None,
        call_id: int = 1,
        inputs: Sequence[Tensor] = (),
        **fields: Any,
    ) -> Answer:
        """Send gradients to one expert."""
        return self.stream(
            "Backward", [self.backward_call(expert, *grads, call_id=call_id, inputs=inputs, **fields)]
        )[0]

    def step(self, *experts: str, **fields: Any) -> pb.UpdateReply:
        """Let the optimizers step."""
        return self._update("Step", experts, fields)

    def zero_grad(self, *experts: str, **fields: Any) -> pb.UpdateReply:
        """Forget gathered gradients."""
        return self._update("ZeroGrad", experts, fields)

    def info(self) -> pb.InfoReply:
        """Ask what is hosted."""
        return unseal(pb.InfoReply, self.unary("Info", seal(pb.InfoRequest())))

    def save(self) -> str:
        """Ask for a checkpoint; return its name."""
        request = pb.SaveRequest(client_id=self.client_id, sequence=self._next_sequence())
        return unseal(pb.SaveReply, self.unary("Save", seal(request))).generation

    def expect(self, *experts: str) -> None:
        """Announce calls."""
        unseal(pb.ExpectReply, self.unary("Expect", seal(pb.ExpectRequest(experts=experts))))

    def forget(self, **calls: int) -> None:
        """Say that there will be no backward of a call of each of these experts."""
        request = pb.ForgetRequest(client_id=self.client_id, experts=calls, call_ids=calls.values())
        unseal(pb.ForgetReply, self.unary("Forget", seal(request)))

    def num_updates(self) -> dict[str, int]:
        """Ask how many updates each expert has had."""
        return {expert.name: expert.num_updates for expert in self.info().experts}

    def get_state(self, *experts: str) -> dict[str, dict[str, Tensor]]:
        """Fetch weights."""
        method = self.channel.unary_stream(methods.path("GetState"))
        reader, states = ParcelReader(), {}
        request = seal(pb.GetStateRequest(experts=experts))
        for message in method(request, timeout=START_S, metadata=self._metadata):
            for parcel in reader.feed(message):
                if isinstance(parcel.head, pb.StateEntry):  # and not the number of those to come
                    states.setdefault(parcel.head.expert, {})[parcel.head.key] = parcel.tensors[0]
        reader.finish()
        return states

    def set_state(self, states: dict[str, dict[str, Tensor]], **fields: Any) -> pb.UpdateReply:
        """Set weights."""
        writer = ParcelWriter()
        head = {"sequence": self._next_sequence(), "num_entries": sum(map(len, states.values())), **fields}
        writer.add(pb.StateUpdate(client_id=self.client_id, **head))
        for expert, state in states.items():
            for key, tensor in state.items():
                writer.add(pb.StateEntry(expert=expert, key=key), [tensor])
        method = self.channel.stream_unary(methods.path("SetState"))
        return unseal(pb.UpdateReply, method(messages_of(writer), timeout=START_S, metadata=self._metadata))

    # ---- what the above are made of

    def forward_call(
        self, expert: str, *inputs: Tensor, call_id: int = 1, **fields: Any
    ) -> tuple[Any, Sequence[Tensor | None]]:
        """Return the head and tensors of a forward."""
        given = {"keep_graph": True, "input_requires_grad": [x.is_floating_point() for x in inputs], **fields}
        return pb.ForwardCall(client_id=self.client_id, call_id=call_id, expert=expert, **given), inputs

    def backward_call(
        self,
        expert: str,
        *grads: Tensor | None,
        call_id: int = 1,
        inputs: Sequence[Tensor] = (),
        **fields: Any,
    ) -> tuple[Any, Sequence[Tensor | None]]:
        """Return the head and tensors of a backward."""
        given = {
            "sequence": fields.pop("sequence", None) or self._next_sequence(),
            "settled_below": self.settled_below,
            "wants_weight_grads": True,
            "wants_input_grads": [True],
            "num_grad_outputs": len(grads),
            "has_inputs": bool(inputs),
            **fields,
        }
        head = pb.BackwardCall(client_id=self.client_id, call_id=call_id, expert=expert, **given)
        return head, [*grads, *inputs]

    def stream(
        self, rpc: str, calls: Iterable[tuple[Any, Sequence[Tensor | None]]], timeout_s: float = START_S
    ) -> list[Answer]:
        """Send calls in one stream; return their answers in order."""
        writer = ParcelWriter()
        numbers = [writer.add(head, tensors) for head, tensors in calls]
        answers = dict(self.stream_messages(rpc, messages_of(writer), timeout_s))
        return [answers[number] for number in numbers]

    def stream_messages(
        self, rpc: str, messages: Iterable[bytes], timeout_s: float = START_S
    ) -> Iterator[tuple[int, Answer]]:
        """Send raw messages; yield the answers as they come, with the number of the call they are for."""
        method = self.channel.stream_stream(methods.path(rpc))
        reader = ParcelReader()
        for message in method(iter(messages), timeout=timeout_s, metadata=self._metadata):
            for parcel in reader.feed(message):
                assert parcel.error is None, parcel.error
                yield parcel.head.call, Answer(parcel.head, parcel.tensors)
        reader.finish()

    def unary(self, rpc: str, sealed: bytes) -> bytes:
        """Send one raw message; return the raw answer."""
        method = self.channel.unary_unary(methods.path(rpc))
        return method(sealed, timeout=START_S, metadata=self._metadata)

    def _update(self, rpc: str, experts: Sequence[str], fields: dict[str, Any]) -> pb.UpdateReply:
        given = {
            "sequence": fields.pop("sequence", None) or self._next_sequence(),
            "settled_below": self.settled_below,
            **fields,
        }
        request = pb.UpdateRequest(client_id=self.client_id, experts=experts, **given)
        return unseal(pb.UpdateReply, self.unary(rpc, seal(request)))

    def _next_sequence(self) -> int:
        self.sequence += 1
        return self.sequence


def wait_until(is_so: Callable[[], bool], patience_s: float = START_S) -> None:
    """Wait for what no event tells; raise if it does not come.

    Raises:
        TimeoutError: it is still not so after `patience_s`.
    """
    pause, until_s = threading.Event(), time.monotonic() + patience_s
    while not is_so():
        if time.monotonic() > until_s:
            faulthandler.dump_traceback(sys.__stderr__)  # what all threads do instead
            raise TimeoutError(f"not so after {patience_s} s")
        pause.wait(0.002)


def wait_until_inside(server: ExpertsServer, num_rpcs: int) -> None:
    """Wait until so many RPCs are with a server in this process: one that was cancelled leaves when that is noticed."""
    assert server._server is not None
    doorway = server._server.service.doorway
    wait_until(lambda: f" {num_rpcs} inside" in repr(doorway))


def threads_of_servers() -> set[threading.Thread]:
    """Return those in this process; an earlier test may have left some to end by themselves."""
    own = {"expert-watcher", "expert-worker", "experts-server-loop"}
    return {thread for thread in threading.enumerate() if thread.name.rstrip("0123456789-") in own}


def num_kept(server: ExpertsServer) -> int:
    """Return how many forwards a server in this process keeps for their backward."""
    assert server._server is not None
    return len(server._server.memory.kept)


def tokens(*shape: int, seed: int = 0) -> Tensor:
    """Return the same random tokens every time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
