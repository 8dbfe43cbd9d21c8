"""An expert that returns its own memory: an answer has the values of its call, whatever changes before it leaves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from experts_server.configuration.config import MemoryConfig, ServingConfig
from experts_server.serving import streams
from tests.support.gated import D as WIDTH_OF_GATED
from tests.support.gated import Gated, Waiting
from tests.support.hosting import sgd
from tests.support.servers import START_S, WireClient, tokens


class Product(torch.autograd.Function):
    """x times the weight; the gradient of x is the weight's own memory."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x * weight).sum().reshape(1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return weight.detach(), x * grad


RESULTS: dict[str, Callable[[Returning, Tensor], Tensor]] = {
    "its weight": lambda module, x: module.weight,
    "a part of its weight": lambda module, x: module.weight[x.numel() :],
    "data of its weight": lambda module, x: module.weight.data[x.numel() :],
    "its buffer": lambda module, x: module.total,
    "a gradient": lambda module, x: Product.apply(x, module.weight[x.numel() :]),
    "a gradient, before those of the weights": lambda module, x: RESULTS["a gradient"](module, x),
}


class Returning(nn.Module):
    """Returns what is said of its own memory; each forward adds one to its buffer."""

    def __init__(self, what: str, size: int) -> None:
        super().__init__()
        self.what = what
        self.weight = nn.Parameter(torch.arange(2.0 * size))
        self.register_buffer("total", torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        self.total += 1
        return RESULTS[self.what](self, x)


def change(client: WireClient, x: Tensor) -> None:
    """Change all that the expert has: by a step, and by other weights."""
    answer = client.forward("e", x)
    client.backward("e", torch.ones_like(answer.tensors[0]))
    client.step("e")
    client.set_state({"e": {"weight": torch.zeros(2 * x.numel()), "total": torch.zeros(x.numel())}})


@pytest.mark.parametrize("size", [8, 1 << 16], ids=["small", "large"])  # small ones travel many in a message
@pytest.mark.parametrize("what", RESULTS)
def test_an_answer_has_the_values_of_its_call_whatever_others_change_before_it_leaves(
    monkeypatch: pytest.MonkeyPatch, what: str, size: int
) -> None:
    """It leaves together with another expert's answer, which is held back."""
    monkeypatch.setattr(streams, "GATHER_S", 2 * START_S)
    monkeypatch.setattr(streams, "LARGE_BYTES", 1 << 40)
    slow, x, row = Gated(), tokens(size), tokens(1, WIDTH_OF_GATED)
    before, is_gradient = Returning(what, size), what.startswith("a gradient")
    expected = before.weight[size:].detach() if is_gradient else before(x).detach()
    memory = MemoryConfig(split_backward=what.endswith("those of the weights"))
    with (
        ExpertsServer(
            {"e": Returning(what, size), "slow": slow}, optimizer=sgd, config=ServingConfig(memory=memory)
        ) as server,
        WireClient(server.address) as client,
        WireClient(server.address, client_id=b"other") as other,
    ):
        if is_gradient:
            client.forward("e", x)
            rpc = "Backward"
            held = client.backward_call("slow", row, call_id=2, inputs=[row])
            calls = [client.backward_call("e", torch.ones(1)), held]
        else:
            rpc = "Forward"
            calls = [client.forward_call("e", x), client.forward_call("slow", row)]
        answers = Waiting(lambda: client.stream(rpc, calls))
        assert slow.started.acquire(timeout=START_S)
        change(other, x)
        slow.let_go()
        answer, _ = answers.result()
    assert answer.code == "OK"
    assert torch.equal(answer.tensors[0], expected)


class OnAGraph(nn.Module):
    """Multiplies by a sparse matrix, which is a buffer or none."""

    def __init__(self, matrix: Tensor, *, is_buffer: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH_OF_GATED, WIDTH_OF_GATED)
        if is_buffer:
            self.register_buffer("matrix", matrix)
        else:
            self.matrix = matrix

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.sparse.mm(self.matrix, x.t()).t())


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("is_buffer", [True, False], ids=["buffer", "attribute"])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_an_expert_with_a_sparse_matrix_is_trained(layout: torch.layout, is_buffer: bool) -> None:
    module = OnAGraph((2 * torch.eye(WIDTH_OF_GATED)).to_sparse(layout=layout), is_buffer=is_buffer)
    x = tokens(3, WIDTH_OF_GATED)
    with ExpertsServer({"e": module}, optimizer=sgd) as server, WireClient(server.address) as client:
        (output,) = client.forward("e", x).tensors
        torch.testing.assert_close(output, module(x))
        (grad,) = client.backward("e", torch.ones(3, WIDTH_OF_GATED)).tensors
        torch.testing.assert_close(grad, (2 * module.linear.weight.sum(0)).expand(3, WIDTH_OF_GATED))
        client.step("e")
        assert client.num_updates() == {"e": 1}
