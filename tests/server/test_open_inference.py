"""The Open Inference Protocol: what `tritonclient.grpc` sends is answered with the expert's forward.

tritonclient pins another protobuf than ours, so it cannot be installed beside us. These tests speak the protocol with
the messages of the server; with `TRITONCLIENT_PYTHON` set to an interpreter that has `tritonclient[grpc]`, the last one
runs that client, as it comes from PyPI.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from experts_server.configuration.config import BatchingConfig, LimitsConfig, SecurityConfig, ServingConfig
from experts_server.serving.open_inference import MESSAGES, RPCS, SERVICE
from moe_autograd.moe.experts import FeedForwardExpert
from moe_autograd.wire.tensors import raw_bytes
from tests.support.gated import Gated, serving, wait_until_queued
from tests.support.servers import START_S, WireClient, tokens

D = 8


def module() -> FeedForwardExpert:
    torch.manual_seed(0)
    return FeedForwardExpert(D)


@pytest.fixture
def server() -> Iterator[ExpertsServer]:
    with ExpertsServer({"ffn.0": module()}) as server:
        yield server


def ask(server: ExpertsServer, method: str, *, timeout_s: float | None = START_S, **fields: Any) -> Any:
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_unary(f"/{SERVICE}/{method}")
        reply = call(MESSAGES[f"{method}Request"](**fields).SerializeToString(), timeout=timeout_s)
    return MESSAGES[f"{method}Response"].FromString(reply)


def infer(server: ExpertsServer, name: str, x: Tensor, **overrides: Any) -> Any:
    tensor = {"name": "input.0", "datatype": "FP32", "shape": list(x.shape), **overrides}
    raw = bytes(raw_bytes(x.contiguous()))
    return ask(server, "ModelInfer", model_name=name, id="7", inputs=[tensor], raw_input_contents=[raw])


def test_the_server_is_live_and_ready_and_knows_its_models(server: ExpertsServer) -> None:
    assert ask(server, "ServerLive").live
    assert ask(server, "ServerReady").ready
    assert ask(server, "ModelReady", name="ffn.0").ready
    assert not ask(server, "ModelReady", name="ffn.9").ready
    assert ask(server, "ServerMetadata").name == "experts-server"
    shown = ask(server, "ModelMetadata", name="ffn.0")
    assert [(t.name, t.datatype, list(t.shape)) for t in shown.inputs] == [("input.0", "FP32", [-1, D])]


def test_an_inference_is_the_forward_of_the_expert(server: ExpertsServer) -> None:
    x = tokens(5, D)
    reply = infer(server, "ffn.0", x)
    assert (reply.model_name, reply.id, list(reply.outputs[0].shape)) == ("ffn.0", "7", [5, D])
    output = torch.frombuffer(bytearray(reply.raw_output_contents[0]), dtype=torch.float32).reshape(5, D)
    torch.testing.assert_close(output, module()(x).detach())
    assert list(infer(server, "ffn.0", tokens(0, D)).outputs[0].shape) == [0, D]


def test_an_inference_evaluates_and_may_come_without_a_deadline() -> None:
    expert, x = nn.Sequential(nn.Linear(D, D), nn.Dropout(0.9)), tokens(5, D)
    tensor, raw = {"name": "input.0", "datatype": "FP32", "shape": [5, D]}, bytes(raw_bytes(x))
    with ExpertsServer({"e": expert}) as server:
        given = {"model_name": "e", "inputs": [tensor], "raw_input_contents": [raw]}
        (raw,) = ask(server, "ModelInfer", timeout_s=None, **given).raw_output_contents
    output = torch.frombuffer(bytearray(raw), dtype=torch.float32).reshape(5, D)
    torch.testing.assert_close(output, expert[0](x).detach())


@pytest.mark.parametrize("rpc", ["ModelReady", "ModelMetadata"])
def test_there_is_one_version_of_a_model(server: ExpertsServer, rpc: str) -> None:
    assert ask(server, rpc, name="ffn.0", version="1") == ask(server, rpc, name="ffn.0")
    if rpc == "ModelReady":
        assert not ask(server, rpc, name="ffn.0", version="7").ready
    else:
        with pytest.raises(grpc.RpcError, match="expected version '1' or none, got '7'"):
            ask(server, rpc, name="ffn.0", version="7")


class Transposed(nn.Module):
    """Returns what lies in memory by columns."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, -1)


def test_inputs_of_all_sizes_that_are_allowed_and_bools_are_taken_and_any_layout_of_an_output_is_sent() -> (
    None
):
    config = ServingConfig(limits=LimitsConfig(max_tensor_bytes=64))
    with ExpertsServer({"e": Transposed()}, config=config) as server:
        for shape in ((2, 8), (2, *[1] * 14, 8)):
            x = tokens(16, 1).reshape(shape)
            reply = infer(server, "e", x)
            output = torch.frombuffer(bytearray(reply.raw_output_contents[0]), dtype=torch.float32)
            assert torch.equal(output.reshape(list(reply.outputs[0].shape)), x.transpose(0, -1))
        reply = infer(server, "e", torch.tensor([[True, False]]), datatype="BOOL")
        assert (reply.outputs[0].datatype, reply.raw_output_contents[0]) == ("BOOL", b"\1\0")
        with pytest.raises(grpc.RpcError, match="expected at most 64 bytes"):
            infer(server, "e", tokens(17, 1))


@pytest.mark.parametrize(
    ("name", "x", "overrides", "code", "text"),
    [
        ("ffn.9", tokens(2, D), {}, "NOT_FOUND", "got 'ffn.9'"),
        ("ffn.0", tokens(2, D + 1), {}, "INVALID_ARGUMENT", "expected shape (num_tokens, 8), got (2, 9)"),
        (
            "ffn.0",
            tokens(2, D),
            {"datatype": "FP64"},
            "INVALID_ARGUMENT",
            "expected 128 bytes for (2, 8) of FP64",
        ),
        ("ffn.0", tokens(2, D), {"datatype": "BYTES"}, "INVALID_ARGUMENT", "expected a datatype of BOOL"),
        (
            "ffn.0",
            tokens(2, D),
            {"shape": [-1, D]},
            "INVALID_ARGUMENT",
            "expected up to 16 sizes, got (-1, 8)",
        ),
        (
            "ffn.0",
            tokens(2, D),
            {"shape": [1 << 40, 1 << 22]},
            "INVALID_ARGUMENT",
            "bytes, got (1099511627776,",
        ),
        (
            "ffn.0",
            tokens(0, D),
            {"shape": [0, 1 << 20, 1 << 20, 1 << 30]},
            "INVALID_ARGUMENT",
            "bytes, got (0,",
        ),
        (
            "ffn.0",
            tokens(2, D),
            {"shape": [64], "datatype": "BOOL"},
            "INVALID_ARGUMENT",
            "expected bools of 0 and 1",
        ),
        ("ffn.0", tokens(2, D), {"shape": [1] * 15 + [2, D]}, "INVALID_ARGUMENT", "expected up to 16 sizes"),
        ("ffn.0", torch.tensor(1.0), {}, "INVALID_ARGUMENT", "expected shape (num_tokens, 8), got ()"),
        ("ffn.0", tokens(2, D) / 0, {}, "INVALID_ARGUMENT", "expected finite values"),
    ],
)
def test_a_wrong_inference_is_refused(
    server: ExpertsServer, name: str, x: Tensor, overrides: dict[str, Any], code: str, text: str
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        infer(server, name, x, **overrides)
    assert (refused.value.code().name, text in refused.value.details()) == (code, True), (
        refused.value.details()
    )
    assert infer(server, "ffn.0", tokens(2, D)).id == "7", "the server lives on"


class Two(torch.nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x - y, x * y


def test_inputs_and_outputs_go_by_their_names_and_not_by_their_order() -> None:
    x, y = tokens(2, D, seed=1), tokens(2, D, seed=2)

    def call(names: list[str], wanted: list[str], **fields: Any) -> dict[str, Tensor]:
        reply = ask(
            server,
            "ModelInfer",
            model_name="two",
            inputs=[{"name": name, "datatype": "FP32", "shape": [2, D]} for name in names],
            raw_input_contents=[
                bytes(raw_bytes(given)) for given in ((y, x) if names[0][-1] == "1" else (x, y))
            ],
            outputs=[{"name": name} for name in wanted],
            **fields,
        )
        values = [torch.frombuffer(bytearray(raw), dtype=torch.float32) for raw in reply.raw_output_contents]
        return {output.name: value.reshape(2, D) for output, value in zip(reply.outputs, values, strict=True)}

    with serving({"two": Two()}) as server:
        for names in (["input.0", "input.1"], ["input.1", "input.0"]):
            both = call(names, [])
            assert list(both) == ["output.0", "output.1"]
            torch.testing.assert_close(both["output.0"], x - y)
        one = call(["input.0", "input.1"], ["output.1"], model_version="1")
        assert list(one) == ["output.1"]
        torch.testing.assert_close(one["output.1"], x * y)
        with pytest.raises(grpc.RpcError, match=r"expected outputs among output.0, output.1, got 'output.2'"):
            call(["input.0", "input.1"], ["output.2"])
        for names in (["x", "y"], ["input.0", "input.0"], ["input.0", "input.2"]):
            with pytest.raises(grpc.RpcError, match=r"expected 2 inputs called input.0, input.1, got"):
                call(names, [])
        with pytest.raises(grpc.RpcError, match="expected version '1' or none, got '7'"):
            call(["input.0", "input.1"], [], model_version="7")


def test_an_output_that_is_asked_for_again_and_again_is_refused_before_it_is_copied(
    server: ExpertsServer,
) -> None:
    tensor, raw = {"name": "input.0", "datatype": "FP32", "shape": [2, D]}, bytes(raw_bytes(tokens(2, D)))
    given = {"model_name": "ffn.0", "inputs": [tensor], "raw_input_contents": [raw]}
    with pytest.raises(grpc.RpcError, match="expected each of 1 outputs once, got 3 wanted"):
        ask(server, "ModelInfer", **given, outputs=[{"name": "output.0"}] * 3)


def test_contents_that_are_not_raw_and_bytes_that_are_no_request_are_refused(server: ExpertsServer) -> None:
    tensor = {"name": "input.0", "datatype": "FP32", "shape": [2, D]}
    for inputs in ([tensor], []):
        with pytest.raises(grpc.RpcError, match=f"for each input, and an input, got 0 for {len(inputs)}"):
            ask(server, "ModelInfer", model_name="ffn.0", inputs=inputs)
    with WireClient(server.address) as client, pytest.raises(grpc.RpcError) as refused:
        client.channel.unary_unary(f"/{SERVICE}/ModelInfer")(b"\xff\xff", timeout=START_S)
    assert refused.value.code() == grpc.StatusCode.DATA_LOSS


class Complex(nn.Module):
    """Returns what the protocol has no name for."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(x, x)


def test_an_output_that_the_protocol_has_no_name_for_is_refused() -> None:
    with ExpertsServer({"e": Complex()}) as server, pytest.raises(grpc.RpcError) as refused:
        infer(server, "e", tokens(2, D))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "model 'e': expected outputs of BOOL, UINT8" in refused.value.details()
    assert "got torch.complex64." in refused.value.details()


@pytest.mark.parametrize("rpc", RPCS)
def test_each_rpc_is_accepted_exactly_with_a_token_that_the_server_knows(tmp_path: Any, rpc: str) -> None:
    tokens_file = tmp_path / "tokens"
    tokens_file.write_text("read read-token-of-length-32-and-more\ntrain train-token-of-length-32-and-more")
    fields: dict[str, Any] = {"ModelReady": {"name": "ffn.0"}, "ModelMetadata": {"name": "ffn.0"}}.get(
        rpc, {}
    )
    if rpc == "ModelInfer":
        tensor = {"name": "input.0", "datatype": "FP32", "shape": [0, D]}
        fields = {"model_name": "ffn.0", "inputs": [tensor], "raw_input_contents": [b""]}
    request = MESSAGES[f"{rpc}Request"](**fields).SerializeToString()
    config = ServingConfig(security=SecurityConfig(tokens_file=tokens_file))
    with ExpertsServer({"ffn.0": module()}, config=config) as server, WireClient(server.address) as client:
        call = client.channel.unary_unary(f"/{SERVICE}/{rpc}")
        for word in ("read", "train"):
            header = (("authorization", f"Bearer {word}-token-of-length-32-and-more"),)
            call(request, metadata=header, timeout=START_S)
        for header in ((), (("authorization", "Bearer wrong-token-of-length-32-and-more"),)):
            with pytest.raises(grpc.RpcError) as refused:
                call(request, metadata=header, timeout=START_S)
            assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED


class Counting(nn.Module):
    """Counts its calls, also those that evaluate."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return x * 0 + self.num_calls


def test_an_inference_changes_buffers_exactly_for_those_who_may_train(tmp_path: Any) -> None:
    tokens_file = tmp_path / "tokens"
    tokens_file.write_text("read read-token-of-length-32-and-more\ntrain train-token-of-length-32-and-more")
    tensor = {"name": "input.0", "datatype": "FP32", "shape": [1, 1]}
    request = MESSAGES["ModelInferRequest"](
        model_name="e", inputs=[tensor], raw_input_contents=[bytes(4)]
    ).SerializeToString()
    config = ServingConfig(security=SecurityConfig(tokens_file=tokens_file))
    with ExpertsServer({"e": Counting()}, config=config) as server, WireClient(server.address) as client:

        def num_calls_with(word: str) -> float:
            header = (("authorization", f"Bearer {word}-token-of-length-32-and-more"),)
            call = client.channel.unary_unary(f"/{SERVICE}/ModelInfer")
            reply = MESSAGES["ModelInferResponse"].FromString(call(request, metadata=header, timeout=START_S))
            return torch.frombuffer(bytearray(reply.raw_output_contents[0]), dtype=torch.float32).item()

        assert [num_calls_with(word) for word in ("read", "read", "train", "read")] == [1, 1, 1, 2]


def test_metadata_and_answers_name_what_they_are_of() -> None:
    with ExpertsServer({"e": module().bfloat16()}) as server:
        shown = ask(server, "ModelMetadata", name="e")
        answer = infer(server, "e", tokens(2, D).bfloat16(), datatype="BF16")
    assert (shown.name, list(shown.versions), shown.platform) == ("e", ["1"], "pytorch")
    assert [(t.name, t.datatype) for t in (*shown.inputs, *shown.outputs)] == [
        ("input.0", "BF16"),
        ("output.0", "BF16"),
    ]
    assert (answer.model_version, answer.outputs[0].name, answer.outputs[0].datatype) == (
        "1",
        "output.0",
        "BF16",
    )


def test_metadata_claim_no_shape_that_is_not_known() -> None:
    experts = {
        "ffn": module(),
        "linear": torch.nn.Linear(D, 3),
        "mixed": torch.nn.Sequential(torch.nn.Linear(D, 3), torch.nn.Linear(3, 5)).double(),
    }
    with ExpertsServer(experts) as server:
        told = {name: ask(server, "ModelMetadata", name=name).outputs[0] for name in experts}
    assert {name: list(output.shape) for name, output in told.items()} == {
        "ffn": [-1, D],
        "linear": [-1, 3],
        "mixed": [-1, -1],
    }
    assert [output.datatype for output in told.values()] == ["FP32", "FP32", "FP64"]


def test_the_turn_goes_round_between_connections() -> None:
    gated = Gated()
    with serving({"e": gated}, batching=BatchingConfig(max_batch_tokens=1)) as server:
        greedy, modest = (
            grpc.insecure_channel(server.address, [("grpc.use_local_subchannel_pool", 1)]) for _ in range(2)
        )

        def call(channel: grpc.Channel, num_rows: int) -> Any:
            tensor = {"name": "input.0", "datatype": "FP32", "shape": [num_rows, D]}
            x = tokens(num_rows, D)  # has a name: its memory is read
            raw = bytes(raw_bytes(x))
            request = MESSAGES["ModelInferRequest"](model_name="e", inputs=[tensor], raw_input_contents=[raw])
            return channel.unary_unary(f"/{SERVICE}/ModelInfer").future(
                request.SerializeToString(), timeout=START_S
            )

        many = [call(greedy, 1) for _ in range(20)]
        assert gated.started.acquire(timeout=START_S)
        wait_until_queued(server, 19, many)
        one = call(modest, 2)
        wait_until_queued(server, 20, [*many, one])
        gated.let_go()
        for each in (*many, one):
            each.result(START_S)
        assert gated.rows.index(2) <= 3, "the other's twenty calls did not come first"
        greedy.close()
        modest.close()


TRITON = """
import json, sys, numpy, tritonclient.grpc as triton
client = triton.InferenceServerClient(sys.argv[1])
assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("ffn.0")
assert client.get_server_metadata().name == "experts-server"
assert client.get_model_metadata("ffn.0").inputs[0].name == "input.0"
x = numpy.ones((3, 8), numpy.float32)
given = triton.InferInput("input.0", x.shape, "FP32")
given.set_data_from_numpy(x)
wanted = [triton.InferRequestedOutput("output.0")]
assert client.infer("ffn.0", [given], outputs=wanted, model_version="1").as_numpy("output.0").shape == (3, 8)
for refused in ({"outputs": [triton.InferRequestedOutput("y")]}, {"model_version": "2"}):
    try:
        client.infer("ffn.0", [given], **refused)
    except triton.InferenceServerException as error:
        assert "expected" in error.message(), error
    else:
        raise AssertionError(refused)
print(json.dumps(client.infer("ffn.0", [given]).as_numpy("output.0").tolist()))
"""


@pytest.mark.skipif(
    "TRITONCLIENT_PYTHON" not in os.environ, reason="needs an interpreter with tritonclient[grpc]"
)
def test_tritonclient_as_it_comes_from_pypi_calls_an_expert(server: ExpertsServer) -> None:
    command = [os.environ["TRITONCLIENT_PYTHON"], "-c", TRITON, server.address]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env={"PATH": ""})
    assert ended.returncode == 0, ended.stderr
    torch.testing.assert_close(torch.tensor(json.loads(ended.stdout)), module()(torch.ones(3, D)).detach())
