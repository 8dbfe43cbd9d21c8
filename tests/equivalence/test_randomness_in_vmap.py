"""In a call `torch.func.vmap(randomness=...)` means what it means elsewhere; numbers are the call's all the same.

Whether rows have the same numbers, other ones, or none as vmap refuses to draw, does not depend on who calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.nn import functional as F

from moe_autograd import parallel_apply
from tests.equivalence.test_randomness import BOUNDS

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),  # torch's own: no batching rule
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),  # which torch.func.jvp uses
]
ROWS, WIDTH = 3, 24
Draw = Callable[[Tensor], Tensor]

DRAWS: dict[str, Draw] = {
    "rand": lambda x: torch.rand(x.shape),
    "randn": lambda x: torch.randn(x.shape),
    "randint": lambda x: torch.randint(99, x.shape),
    "randint from": lambda x: torch.randint(9, 99, x.shape),
    "randperm": lambda x: torch.randperm(x.numel()),
    "rand_like": torch.rand_like,
    "rand_like, another dtype": lambda x: torch.rand_like(x, dtype=torch.float64),
    "rand_like, another format": lambda x: torch.rand_like(x, memory_format=torch.contiguous_format),
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 99),
    "randint_like from": lambda x: torch.randint_like(x, 9, 99),
    "normal": lambda x: torch.normal(x, 1.0),
    "normal of deviations": lambda x: torch.normal(0.0, x),
    "normal of both": lambda x: torch.normal(x, x),
    "bernoulli": torch.bernoulli,
    "bernoulli of a number": lambda x: torch.bernoulli(x, 0.5),
    "bernoulli_": lambda x: x.clone().bernoulli_(0.5),
    "bernoulli_ of a tensor": lambda x: x.clone().bernoulli_(torch.full((WIDTH,), 0.5)),
    "multinomial": lambda x: torch.multinomial(x, WIDTH),
    "poisson": lambda x: torch.poisson(99 * x),
    "binomial": lambda x: torch.binomial(99 * x, x),
    "uniform_": lambda x: x.clone().uniform_(),
    "normal_": lambda x: x.clone().normal_(),
    "log_normal_": lambda x: x.clone().log_normal_(),
    "exponential_": lambda x: x.clone().exponential_(),
    "geometric_": lambda x: x.clone().geometric_(0.1),
    "cauchy_": lambda x: x.clone().cauchy_(),
    "random_": lambda x: x.clone().random_(),
    "random_ to": lambda x: x.clone().random_(99),
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout, all": lambda x: F.dropout(x, 1.0),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.5, inplace=True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "feature_dropout": lambda x: torch.feature_dropout(x.view(1, WIDTH, 1), 0.5, True).view(WIDTH),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "native_dropout, idle": lambda x: torch.native_dropout(x, 0.5, False)[0],
    "rrelu": lambda x: F.rrelu(-x, training=True),
    "gumbel_softmax": F.gumbel_softmax,
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, WIDTH, 1)] * 3, dropout_p=0.5),
    "gamma": torch._standard_gamma,
    "dirichlet": torch._sample_dirichlet,
    "uniform": torch.ops.aten.uniform.default,
}
of_all = pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
XS = torch.full((ROWS, WIDTH), 0.5)


def of_rows(draw: Draw) -> Draw:
    return lambda row: draw(row)


def of_a_constant(draw: Draw) -> Draw:
    return lambda row: draw(torch.full((WIDTH,), 0.5)) + 0 * row.sum()


def by_one(draw: Draw, how: Any = of_rows, **options: Any) -> Draw:
    """What a call does."""
    return lambda xs: vmap(how(draw), **options)(xs)


def drawn(call: Draw, bound: int | None = None) -> list[Tensor]:
    torch.manual_seed(3)
    return [*parallel_apply([call] * 4, [(XS,)] * 4, max_concurrency=bound), torch.rand(2)]


def structure(run: Callable[[], Tensor]) -> str:
    try:
        rows = run()
    except RuntimeError:
        return "raises"
    return "same" if all(torch.equal(row, rows[0]) for row in rows) else "differ"


@pytest.mark.parametrize("how", [of_rows, of_a_constant])
@pytest.mark.parametrize("randomness", ["error", "same", "different"])
@of_all
def test_rows_draw_as_they_do_in_a_loop(draw: Draw, randomness: str, how: Any) -> None:
    call = by_one(draw, how, randomness=randomness)
    expected = structure(lambda: call(XS))
    assert structure(lambda: drawn(call)[0]) == expected
    if expected != "raises":
        one_by_one = drawn(call, 1)
        assert torch.equal(one_by_one[0], one_by_one[1]) == (torch.equal(call(XS), call(XS)))
        for bound in BOUNDS:
            assert all(map(torch.equal, drawn(call, bound), one_by_one))


@pytest.mark.parametrize("chunk_size", [1, 2])
@pytest.mark.parametrize("randomness", ["same", "different"])
@pytest.mark.parametrize("draw", [torch.randn_like, F.dropout], ids=["randn_like", "dropout"])
def test_rows_draw_as_they_do_in_a_loop_in_chunks(draw: Draw, randomness: str, chunk_size: int) -> None:
    call = by_one(draw, randomness=randomness, chunk_size=chunk_size)
    assert structure(lambda: drawn(call)[0]) == structure(lambda: call(XS))
    assert all(map(torch.equal, drawn(call), drawn(call, 1)))


@pytest.mark.parametrize("inner", ["same", "different"])
@pytest.mark.parametrize("outer", ["same", "different"])
@pytest.mark.parametrize("name", ["randn_like", "dropout", "randint_like", "alpha_dropout"])
def test_one_vmap_within_another(name: str, outer: str, inner: str) -> None:
    call = by_one(by_one(DRAWS[name], randomness=inner), randomness=outer)

    def both(run: Callable[[Tensor], Tensor]) -> tuple[str, str]:
        seen = run(torch.full((2, ROWS, WIDTH), 0.5))
        return structure(lambda: seen), structure(lambda: seen[0])

    assert both(lambda xs: parallel_apply([call] * 2, [(xs,)] * 2)[0]) == both(call)


@pytest.mark.parametrize("name", ["randn_like", "native_dropout", "dropout"])
def test_gradients_under_vmap_are_of_what_was_drawn(name: str) -> None:
    def squared(row: Tensor) -> tuple[Tensor, Tensor]:
        drawn = row * DRAWS[name](torch.ones_like(row)).detach()
        return drawn.square().sum(), drawn

    call = vmap(grad(squared, has_aux=True), randomness="different")
    for grads, results in parallel_apply([call] * 2, [(XS,)] * 2):
        torch.testing.assert_close(grads * XS, 2 * results.square())
        assert structure(lambda results=results: results) == "differ"


def under_jvp(draw: Draw, xs: Tensor) -> Tensor:
    return vmap(lambda row: torch.stack(jvp(draw, (row,), (row,))), randomness="different")(xs)


def test_tangents_under_vmap_are_of_what_was_drawn() -> None:
    call = functools.partial(under_jvp, DRAWS["native_dropout"])
    values, tangents = parallel_apply([call] * 2, [(XS,)] * 2)[0].unbind(1)
    assert torch.equal(values, tangents)
    assert structure(lambda: values) == "differ"


@pytest.mark.parametrize("how", [of_rows, of_a_constant])
@pytest.mark.parametrize(
    ("randomness", "expected"), [("error", "raises"), ("same", "same"), ("different", "differ")]
)
def test_the_word_counts_where_torch_passes_it_over(randomness: str, expected: str, how: Any) -> None:
    """In a loop each row, or all that are no rows, draw of themselves."""
    call = by_one(lambda x: torch.randint_like(x, torch.tensor(99)), how, randomness=randomness)
    assert structure(lambda: drawn(call)[0]) == expected
