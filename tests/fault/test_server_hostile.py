"""Hostile and too many: malformed messages among good ones, a structure-aware fuzz run, and ten times the load."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.framing import frame_packet, seal
from tests.support.servers import ServerProcess, WireClient, tokens

D = 8
MIB = 1 << 20
FLAGS = ("--expert", "ffn", "--num-experts", "2", "--d-model", str(D), "--optimizer", "sgd", "--lr", "0.001")
ALLOWED = {
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(*FLAGS, "--log-level", "error") as server:
        with WireClient(server.address) as client:  # warm: allocator, first optimizer step
            for n in range(200):
                client.forward("ffn.0", tokens(3, D), call_id=n)
                client.backward("ffn.0", tokens(3, D), call_id=n)
            client.step()
        yield server
        assert server.stop() == 0
        assert server.log == [], "nothing of this is an error of the server's own"


def resident_bytes(server: ServerProcess) -> int:
    return psutil.Process(server.process.pid).memory_info().rss


# ---- what can be said wrongly, by its structure

numbers = st.sampled_from([0, 1, 2, 3, 15, 16, 1 << 20, 1 << 31, (1 << 63) - 1, (1 << 64) - 1])
names = st.sampled_from(["ffn.0", "ffn.1", "ffn.9", "", "../ffn.0", "x" * 5000, "ffn.0\x00"])
headers = st.builds(
    lambda dtype, shape, encoding, num_bytes: pb.TensorHeader(
        dtype=dtype, shape=shape, encoding=encoding, num_bytes=num_bytes
    ),
    st.integers(0, 14),
    st.lists(numbers, max_size=4) | st.just([3, D]) | st.just([1] * 70),
    st.integers(0, 5),
    numbers | st.just(3 * D * 4),
)
forwards = st.builds(
    lambda **fields: pb.ForwardCall(**fields),
    client_id=st.binary(max_size=20),
    call_id=numbers,
    expert=names,
    keep_graph=st.booleans(),
    input_requires_grad=st.lists(st.booleans(), max_size=3),
    evaluate=st.booleans(),
    reply_encoding=st.integers(0, 5),
)
backwards = st.builds(
    lambda **fields: pb.BackwardCall(**fields),
    client_id=st.binary(max_size=20),
    sequence=numbers,
    settled_below=numbers,
    call_id=numbers,
    expert=names,
    wants_weight_grads=st.booleans(),
    wants_input_grads=st.lists(st.booleans(), max_size=3),
    num_grad_outputs=st.integers(0, 4) | st.just((1 << 32) - 1),
    has_inputs=st.booleans(),
    reply_encoding=st.integers(0, 5),
)
runs = st.builds(
    lambda fields, head: pb.Run(**fields, **head),
    st.fixed_dictionaries(
        {
            "num_rows": st.lists(numbers, max_size=3) | st.just([1, 2]),
            "experts": st.lists(names, max_size=3) | st.just(["ffn.0", "ffn.1"]),
            "call_ids": st.lists(numbers, max_size=3) | st.just([1, 2]),
            "sequences": st.lists(numbers, max_size=3) | st.just([1, 2]),
        }
    ),
    st.builds(lambda head: {"forward_call": head}, forwards)
    | st.builds(lambda head: {"backward_call": head}, backwards)
    | st.just({}),
)
announcements = st.builds(
    lambda parcel, tensors, head: pb.Announcement(parcel=parcel, tensors=tensors, **head),
    numbers,
    st.lists(headers.map(lambda header: header.SerializeToString()) | st.binary(max_size=8), max_size=3),
    st.builds(lambda head: {"forward_call": head}, forwards)
    | st.builds(lambda head: {"backward_call": head}, backwards)
    | st.builds(lambda head: {"run": head}, runs)
    | st.just({}),
)
parts = st.builds(
    lambda parcel, tensor, offset, num_bytes: pb.Part(
        parcel=parcel, tensor=tensor, offset=offset, num_bytes=num_bytes
    ),
    numbers,
    st.integers(0, 3),
    numbers,
    numbers | st.just(3 * D * 4),
)
packets = st.builds(
    lambda announced, described, payload: frame_packet(
        pb.Contents(announcements=announced, parts=described).SerializeToString(), [payload], len(payload)
    ),
    st.lists(announcements, max_size=3),
    st.lists(parts, max_size=3),
    st.binary(max_size=200) | st.just(bytes(3 * D * 4)),
)
damaged = st.builds(
    lambda packet, cut, flip: bytes(packet[:cut]) + bytes([flip]) + bytes(packet[cut + 1 :]),
    packets,
    st.integers(0, 300),
    st.integers(0, 255),
)


def test_a_fuzz_run_over_the_structure_finds_no_crash_no_internal_error_and_no_growth(
    server: ServerProcess,
) -> None:
    codes: Counter[str] = Counter()

    with WireClient(server.address) as client:

        @settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(st.sampled_from(["Forward", "Backward"]), st.lists(packets | damaged, min_size=1, max_size=3))
        def send(rpc: str, messages: list[bytes]) -> None:
            ended = grpc.StatusCode.OK
            try:
                for _, answer in client.stream_messages(rpc, messages):
                    assert answer.code != "INTERNAL", answer.text
                    codes[answer.code] += 1
            except grpc.RpcError as error:
                ended = error.code()
            assert ended in {*ALLOWED, grpc.StatusCode.OK}
            codes[ended.name] += ended != grpc.StatusCode.OK

        send()
        before = resident_bytes(server)
        send()
        growth = resident_bytes(server) - before
        assert client.forward("ffn.0", tokens(3, D)).code == "OK"
    assert growth <= 16 * MIB, f"{growth} bytes"
    assert {"DATA_LOSS", "INVALID_CALL"} <= codes.keys(), f"the run reached little: {codes}"


@pytest.mark.parametrize("rpc", ["Info", "Step", "ZeroGrad", "Save"])
def test_random_bytes_as_a_request_are_data_loss_or_refused(server: ServerProcess, rpc: str) -> None:
    with WireClient(server.address) as client:
        for length in (1, 9, 10, 100, 10_000):
            generator = torch.Generator().manual_seed(length)
            noise = bytes(torch.randint(0, 256, (length,), generator=generator).tolist())
            with pytest.raises(grpc.RpcError) as refused:
                client.unary(rpc, noise)
            assert refused.value.code() == grpc.StatusCode.DATA_LOSS


def test_good_calls_beside_malformed_ones_are_all_served_right(server: ServerProcess) -> None:
    """Four clients say only wrong things while another computes; every result is compared."""
    done = threading.Event()
    header = pb.TensorHeader(dtype=pb.FLOAT32, shape=[25_000_000_000], num_bytes=100_000_000_000)
    head = pb.ForwardCall(client_id=b"x", call_id=1, expert="ffn.0")
    lying = seal(
        pb.Packet(
            contents=pb.Contents(
                announcements=[
                    pb.Announcement(parcel=0, tensors=[header.SerializeToString()], forward_call=head)
                ]
            )
        )
    )

    def misbehave(number: int) -> None:
        with WireClient(server.address, client_id=bytes([number])) as client:
            while not done.is_set():
                if number == 0:
                    _ignoring_refusal(
                        client.stream, "Forward", [client.forward_call("ffn.0", tokens(3, D + 1))]
                    )
                elif number == 1:
                    _ignoring_refusal(
                        client.stream, "Forward", [client.forward_call("ffn.0", tokens(3, D) / 0)]
                    )
                elif number == 2:
                    _ignoring_refusal(lambda: list(client.stream_messages("Forward", [lying, b"x"])))
                else:
                    _ignoring_refusal(lambda: list(client.stream_messages("Backward", [bytes(5 * MIB)])))

    villains = [threading.Thread(target=misbehave, args=(n,)) for n in range(4)]
    with WireClient(server.address, client_id=b"good") as client:
        expected = client.forward("ffn.1", tokens(3, D), keep_graph=False).tensors[0]
        for villain in villains:
            villain.start()
        try:
            answers = [client.forward("ffn.1", tokens(3, D), keep_graph=False) for _ in range(200)]
        finally:
            done.set()
            for villain in villains:
                villain.join()
    assert [a.code for a in answers] == ["OK"] * 200
    # rows may have been joined with another's: then the sums are taken in another order
    assert all(torch.allclose(a.tensors[0], expected, atol=1e-6) for a in answers)


def _ignoring_refusal(call: Any, *arguments: Any) -> None:
    ended = grpc.StatusCode.INVALID_ARGUMENT
    try:
        call(*arguments)
    except grpc.RpcError as error:
        ended = error.code()
    assert ended in ALLOWED


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_under_ten_times_the_load_memory_is_bounded_errors_are_the_right_ones_and_it_recovers(
    is_full_size: bool,
) -> None:
    """More callers than it can serve, each at once again, with limits that a small server would have."""
    environment = {
        "EXPERTS_SERVER_LIMITS__MAX_QUEUED_BYTES": str(8 * MIB),
        "EXPERTS_SERVER_LIMITS__MAX_QUEUED_CALLS": "40",
        "EXPERTS_SERVER_LIMITS__KEPT_FORWARD_BYTES": str(8 * MIB),
    }
    flags = ("--expert", "ffn", "--num-experts", "2", "--d-model", "256", "--optimizer", "none")
    codes: Counter[str] = Counter()
    with ServerProcess(*flags, environment=environment) as server:
        with WireClient(server.address) as client:
            for n in range(30):
                assert client.forward("ffn.0", tokens(512, 256), call_id=n).code == "OK"
            before = resident_bytes(server)
        until = time.monotonic() + (30.0 if is_full_size else 5.0)
        lock = threading.Lock()

        def press(number: int) -> None:
            x = tokens(512, 256)
            with WireClient(server.address, client_id=bytes([number])) as client:
                while time.monotonic() < until:
                    calls = [client.forward_call(f"ffn.{n % 2}", x, call_id=n) for n in range(8)]
                    try:
                        seen = [answer.code for answer in client.stream("Forward", calls, timeout_s=2.0)]
                    except grpc.RpcError as error:
                        seen = [error.code().name]
                    with lock:
                        codes.update(seen)

        clients = [threading.Thread(target=press, args=(n,)) for n in range(16)]
        for one in clients:
            one.start()
        peak = 0
        for one in clients:
            while one.is_alive():
                one.join(0.2)
                peak = max(peak, resident_bytes(server))
        with WireClient(server.address, client_id=b"after") as client:
            assert client.forward("ffn.0", tokens(512, 256)).code == "OK"
        assert server.stop() == 0
    assert codes["OK"] > 0
    assert codes["BUSY"] > 0, f"it was not too much: {codes}"
    assert codes.keys() <= {"OK", "BUSY", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}
    # 16 passes of 4 MiB there and back, two budgets of 8 MiB, two joined batches, and the allocator's share
    assert peak - before < 512 * MIB
