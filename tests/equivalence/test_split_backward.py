"""split_backward gives, in two parts, what one torch.autograd.grad gives, whatever the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from moe_autograd.autograd.split_backward import split_backward

Case = tuple[list[Tensor], list[Any], list[Any]]  # outputs, inputs, weights
CASES: dict[str, Callable[[], Case]] = {}


def case(build: Callable[[], Case]) -> Callable[[], Case]:
    CASES[build.__name__] = build
    return build


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def double(module: nn.Module) -> nn.Module:
    return module.to(torch.float64)


class Product(torch.autograd.Function):
    """Multiplies; in Python, so it computes both gradients whoever asks."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return grad * b, grad * a  # of the output's shape, also where b was expanded


class Straight(torch.autograd.Function):
    """Passes its gradient on to the first, and none to the second."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return a * b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class SumAndDifference(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a + b, a - b

    @staticmethod
    def backward(ctx: Any, s: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        return s + d, s - d


@case
def linear_layers() -> Case:
    net = double(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3)))
    x = leaf(5, 4)
    return [net(x)], [x], list(net.parameters())


@case
def gated_layers() -> Case:
    gate, up, down = (double(nn.Linear(*size)) for size in ((4, 8), (4, 8), (8, 4)))
    x = leaf(5, 4)
    return [x + down(F.silu(gate(x)) * up(x))], [x], [p for m in (gate, up, down) for p in m.parameters()]


@case
def attention() -> Case:
    layer = double(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True))
    x = leaf(2, 3, 8)
    return [layer(x)], [x], list(layer.parameters())


@case
def convolution_with_batch_norm() -> Case:
    net = double(
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2))
    )
    x = leaf(2, 2, 4, 4)
    return [net(x)], [x], list(net.parameters())


@case
def recurrent() -> Case:
    net = double(nn.LSTM(3, 4))
    x, h, c = leaf(5, 2, 3), leaf(1, 2, 4), leaf(1, 2, 4)
    y, (hn, cn) = net(x, (h, c))
    return [y, hn, cn], [x, h, c], list(net.parameters())


@case
def inputs_that_need_no_gradient() -> Case:
    net = double(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
    x = torch.randn(5, 4, dtype=torch.float64)
    return [net(x)], [x], list(net.parameters())


@case
def unused_inputs_and_unused_and_frozen_weights() -> Case:
    net, x = double(nn.Linear(4, 3)), leaf(5, 4)
    net.bias.requires_grad_(False)
    return [net(x)], [leaf(2), x], [leaf(3), net.weight, net.bias]


@case
def no_weights() -> Case:
    x = leaf(3)
    return [x.exp()], [x], []


@case
def no_inputs() -> Case:
    w = leaf(3)
    return [w.exp()], [], [w]


@case
def output_that_is_the_input() -> Case:
    x = leaf(3)
    return [x, x * 2], [x], []


@case
def output_that_is_a_weight() -> Case:
    x, w = leaf(3), leaf(3)
    return [w, x * w], [x], [w]


@case
def input_that_is_also_a_weight() -> Case:
    x = leaf(3)
    return [x * x], [x], [x]


@case
def weight_shared_by_layers() -> Case:
    shared, x = double(nn.Linear(4, 4)), leaf(5, 4)
    return [shared(torch.tanh(shared(torch.tanh(shared(x)))))], [x], [*shared.parameters(), shared.weight]


@case
def weight_on_the_path_to_the_input() -> Case:
    x, w = leaf(3), leaf(3)
    h = (x * w).exp()
    return [(h * h).sin()], [x], [h, w]


@case
def weights_behind_the_input() -> Case:
    w, v = leaf(3), leaf(3)
    x = (w * 2).exp()
    return [(x * v * w).sin()], [x], [w, v]


@case
def weights_behind_an_input_made_in_python() -> Case:
    w, v = leaf(2, 3), leaf(2, 3)
    x, x2 = SumAndDifference.apply(w, v)
    return [(x * v * w).sin() + x2], [x], [w, v]


@case
def weights_computed_from_other_weights() -> Case:
    g, v, x = leaf(4, 1), leaf(4, 3), leaf(5, 3)
    w = g * v / v.norm(dim=1, keepdim=True)
    return [F.linear(F.linear(x, w), w.T @ w @ w.T @ torch.ones(4, 4, dtype=torch.float64))], [x], [g, v, w]


@case
def weights_given_as_edges() -> Case:
    net, x = double(nn.Linear(4, 3)), leaf(5, 4)
    return [net(x)], [get_gradient_edge(x)], [get_gradient_edge(net.weight), net.bias]


@case
def several_outputs_some_without_gradient() -> Case:
    net, x = double(nn.Linear(4, 3)), leaf(5, 4)
    h = net(x)
    return [h, h.detach(), h.exp(), (h * 0).sum()], [x], list(net.parameters())


@case
def outputs_above_and_below_the_borders() -> Case:
    x, w = leaf(3, 3), leaf(3, 3)
    h = w @ w
    return [h.sin(), x @ h, h], [x], [w]


@case
def nodes_with_several_outputs() -> Case:
    x, w = leaf(4, 6), leaf(4, 6)
    a, b = (x * w).chunk(2, dim=1)
    top, _ = torch.topk(a, 2)
    values, vectors = torch.linalg.eigh(w @ w.T + x @ x.T)
    return [top, b.sin(), values.sum() + vectors.abs().sum(), torch.stack(w.unbind(1)).cumsum(0)], [x], [w]


@case
def broadcast_weights() -> Case:
    x, w, s = leaf(2, 3, 4), leaf(4), leaf()
    return [(x + w) * s + w * s - s], [x], [w, s]


@case
def functions_in_python() -> Case:
    x, w, v = leaf(3, 4), leaf(3, 4), leaf(1, 4)
    scaled = Product.apply(w, v)
    s, d = SumAndDifference.apply(Product.apply(x, scaled), w)
    return [Product.apply(s, d), d], [x], [w, v]


@case
def functions_in_python_that_leave_gradients_out() -> Case:
    x, w, v = leaf(3, 4), leaf(3, 4), leaf(3, 4)
    return [Straight.apply(x, w) + Straight.apply(x, v.sin()) * v], [x], [w, v]


@case
def mixed_python_and_native_into_one_weight() -> Case:
    x, w = leaf(3, 4), leaf(3, 4)
    h = w.exp()
    return [Product.apply(x, h) * h + SumAndDifference.apply(x * h, w)[1]], [x], [w]


@case
def weights_only_through_python() -> Case:
    x, w = leaf(3, 4), leaf(3, 4)
    h = Product.apply(Product.apply(w, w.sin()), w)
    return [x * h], [x], [w]


@case
def changes_in_place_and_views() -> Case:
    x, w = leaf(4, 4), leaf(4, 4)
    base = x * 1
    base[1:3] *= w[1:3]
    base[0] = w[0]
    view = base.view(16)
    view[3:9].add_(w.view(16)[3:9])
    return [base.sin(), view.cos()], [x], [w]


@case
def embeddings() -> Case:
    table, x = leaf(7, 4), leaf(3, 4)
    return [x * F.embedding(torch.tensor([1, 1, 5]), table)], [x], [table]


@case
def checkpoint_inside() -> Case:
    net = double(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 4)))
    last, x = double(nn.Linear(4, 4)), leaf(5, 4)
    h = checkpoint(net, x, use_reentrant=False)
    return [last(checkpoint(net, h, use_reentrant=False))], [x], [*net.parameters(), *last.parameters()]


@case
def complex_numbers() -> Case:
    x, w, r = leaf(3, dtype=torch.complex128), leaf(3, dtype=torch.complex128), leaf(3)
    return [(x * w * r).abs(), torch.view_as_real(x * w)], [x], [w, r]


@case
def mixed_precision() -> Case:
    net, x = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)), leaf(5, 4, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = net(x)
    return [y], [x], list(net.parameters())


@case
def saved_tensors_moved_by_hooks() -> Case:
    net, x = double(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))), leaf(5, 4)
    with torch.autograd.graph.save_on_cpu():
        y = net(x)
    return [y], [x], list(net.parameters())


@case
def experts_weighted_by_a_router() -> Case:
    router = double(nn.Linear(4, 3, bias=False))
    experts = [double(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))) for _ in range(3)]
    x = leaf(7, 4)
    p = router(x).softmax(-1)
    y = torch.zeros_like(x)
    for i, expert in enumerate(experts):
        rows = torch.where(p[:, i] > 0.3)[0]
        y = y.index_add(0, rows, expert(x[rows]) * p[rows, i : i + 1])
    weights = [*router.parameters(), *(w for e in experts for w in e.parameters())]
    return [y], [x], weights


def edge_or_none(one: Any) -> bool:
    return not isinstance(one, Tensor) or one.requires_grad


def native(outputs: list[Tensor], grads: list[Tensor], wanted: list[Any]) -> list[Tensor | None]:
    """What one torch.autograd.grad gives, with None for what it would refuse."""
    pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
    asked = [one for one in wanted if edge_or_none(one)]
    made = iter(
        torch.autograd.grad(
            [o for o, _ in pairs], asked, [g for _, g in pairs], retain_graph=True, allow_unused=True
        )
        if asked
        else ()
    )
    return [next(made) if edge_or_none(one) else None for one in wanted]


def assert_same(got: Any, want: Any) -> None:
    assert len(got) == len(want)
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert (g is None) == (w is None), i
        if g is not None:
            assert (g.shape, g.dtype, g.requires_grad) == (w.shape, w.dtype, w.requires_grad), i
            torch.testing.assert_close(g, w)


@pytest.mark.parametrize("name", CASES)
def test_both_parts_together_equal_one_autograd_grad(name: str) -> None:
    torch.manual_seed(0)
    outputs, inputs, weights = CASES[name]()
    grads = [torch.randn_like(o) for o in outputs]
    want = native(outputs, grads, [*inputs, *weights])
    input_grads, pending = split_backward(outputs, grads, inputs, weights)
    assert isinstance(input_grads, tuple)
    weight_grads = pending.run()
    assert isinstance(weight_grads, tuple)
    assert_same([*input_grads, *weight_grads], want)


@pytest.mark.parametrize("name", CASES)
def test_the_second_part_needs_nobody_to_hold_the_graph(name: str) -> None:
    torch.manual_seed(0)
    outputs, inputs, weights = CASES[name]()
    grads = [torch.randn_like(o) for o in outputs]
    want = native(outputs, grads, [*inputs, *weights])
    input_grads, pending = split_backward(outputs, grads, inputs, weights)
    del outputs, grads, inputs, weights
    assert_same([*input_grads, *pending.run()], want)


OPERATIONS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda a, b: a * b,
    lambda a, b: (a @ b).tanh(),
    lambda a, b: a + b,
    Product.apply,
    lambda a, b: SumAndDifference.apply(a.sin(), b)[1],
    lambda a, b: torch.stack([a, b]).unbind(0)[1].cos(),
]


@st.composite
def random_graphs(draw: st.DrawFn) -> tuple[list[tuple[int, int, int]], list[int], list[int], list[int]]:
    """Operations on earlier tensors (0 to 3 are leaves), and which tensors are outputs, inputs, weights."""
    num_operations = draw(st.integers(1, 12))
    operations = [
        (draw(st.integers(0, 5)), draw(st.integers(0, 3 + i)), draw(st.integers(0, 3 + i)))
        for i in range(num_operations)
    ]
    some = st.lists(st.integers(0, 3 + num_operations), max_size=3)
    outputs = draw(st.lists(st.integers(4, 3 + num_operations), min_size=1, max_size=3))
    return operations, outputs, draw(some), draw(some)


def build(operations: list[tuple[int, int, int]]) -> list[Tensor]:
    torch.manual_seed(1)
    tensors = [leaf(2, 2) for _ in range(4)]
    for kind, a, b in operations:
        tensors.append(OPERATIONS[kind](tensors[a], tensors[b]))
    return tensors


@settings(max_examples=300, deadline=None)
@given(random_graphs())
def test_any_graph_any_choice_of_inputs_and_weights(
    graph: tuple[list[tuple[int, int, int]], list[int], list[int], list[int]],
) -> None:
    operations, outputs, inputs, weights = graph
    tensors = build(operations)
    grads = [torch.randn(2, 2, dtype=torch.float64) for _ in outputs]
    chosen = [tensors[i] for i in outputs]
    want = native(chosen, grads, [tensors[i] for i in (*inputs, *weights)])
    input_grads, pending = split_backward(
        chosen, grads, [tensors[i] for i in inputs], [tensors[i] for i in weights]
    )
    assert_same([*input_grads, *pending.run()], want)
