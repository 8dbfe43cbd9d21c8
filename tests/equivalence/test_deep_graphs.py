"""Calls whose graphs are thousands of nodes deep end as those of a loop do: the process lives on, nothing is left."""

from __future__ import annotations

import pytest

from tests.support.subprocesses import assert_prints

# A stack of 8 MB has room for some 34,000 nodes of which each frees the next one.
PROGRAM = """
import threading, weakref
import torch
from torch import nn
from moe_autograd import MixtureOfExperts, TopKRouter, parallel_apply, split_backward

class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 0.999, dtype=torch.float64))

    def forward(self, x):
        threading.Event().wait(0.001)
        for step in range(40_000):
            x = -x if step % 10 else x * self.weight
        return x

experts = [Recurrent() for _ in range(2)]
xs = [torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in experts]
parameters = [expert.weight for expert in experts]

def calls(**options):
    return parallel_apply(experts, [(x,) for x in xs], **options)

def program():
{body}

program()
print("done")
"""

MAPPED = ["", "max_concurrency=1", "recompute=True", "defer_weight_grads=True"]


def assert_ends(body: str) -> None:
    indented = "\n".join("    " + line for line in body.strip("\n").splitlines())
    assert_prints(PROGRAM.replace("{body}", indented), "done")


@pytest.mark.parametrize("options", MAPPED)
def test_a_backward(options: str) -> None:
    """The gradients are those of a loop."""
    assert_ends(f"""
native = torch.autograd.grad([expert(x).sum() for expert, x in zip(experts, xs)], [*xs, *parameters])
sum(y.sum() for y in calls({options})).backward()
mapped = [tensor.grad for tensor in (*xs, *parameters)]
torch.testing.assert_close(mapped, list(native), rtol=1e-12, atol=0)
""")


@pytest.mark.parametrize("options", MAPPED)
def test_results_that_nobody_differentiates(options: str) -> None:
    assert_ends(f"del (ys := [calls({options})])[:]")


def test_second_order() -> None:
    assert_ends("""
(first,) = torch.autograd.grad(calls()[0].sum(), xs[0], create_graph=True)
torch.autograd.grad(first.sum(), parameters[0])
""")


def test_a_layer() -> None:
    assert_ends("""
layer = MixtureOfExperts(TopKRouter(2, 2, top_k=1).double(), experts)
layer(torch.randn(8, 2, dtype=torch.float64)).sum().backward()
""")


@pytest.mark.parametrize(
    "then", ["pending.run(); del y", "del y; pending.run()", "del y, pending", "del pending, y"]
)
def test_a_split_backward(then: str) -> None:
    """The caller's own graph, which somebody has walked; he holds a node in its midst."""
    assert_ends(f"""
y = experts[0](xs[0])
(grad_x,), pending = split_backward(y.sum(), None, xs[0], parameters[0])
{then}
""")


def test_an_expert_on_a_server_with_two_results() -> None:
    """The server walks its graph, as one was computed from the other."""
    assert_ends("""
from experts_server import ExpertsServer
from moe_autograd.remote import connect

class Two(Recurrent):
    def forward(self, x):
        first = x.sin()
        return first, super().forward(first)

with ExpertsServer({"e": Two()}, optimizer=None, listen="127.0.0.1:0") as server, connect(server.address) as remote:
    first, last = remote["e"](xs[0])
    last.sum().backward()
""")


def test_what_a_call_saved_goes_with_its_graph() -> None:
    """At once it cannot: a thread lets go of it."""
    assert_ends("""
class Told(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.held = held = Held()
        weakref.finalize(held, gone.set)
        return x * 2
    @staticmethod
    def backward(ctx, grad):
        return grad * 2
class Held:
    pass
gone = threading.Event()
ys = parallel_apply([lambda x: experts[0](Told.apply(x))] * 2, [(x,) for x in xs])
assert not gone.is_set()
del ys
assert gone.wait(60)
""")
