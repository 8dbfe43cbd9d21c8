"""What calls draw on a device is theirs alone, and the caller's streams go on as if the map had drawn once.

Random numbers are compared with those of any other number of workers, and with those of plain PyTorch where a generator
is given.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from moe_autograd import parallel_apply
from tests.support.comparison import one_after_another
from tests.support.devices import DEVICE, HAS_GPU, LONG_CYCLES, hold_up

pytestmark = pytest.mark.gpu

NUM_CALLS, PATIENCE_S = 8, 20.0


class DrawsBackward(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        hold_up(LONG_CYCLES // 10)
        return grad * torch.rand_like(grad)


def attention(x: Tensor) -> Tensor:
    heads = x.view(4, 2, 8, 16)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5)


def normal(x: Tensor) -> Tensor:
    return torch.normal(x, 2.0) + torch.empty_like(x).exponential_() + torch.poisson(x.exp())


def integers(x: Tensor) -> Tensor:
    drawn = torch.randperm(64, device=x.device), torch.randint(9, (64,), device=x.device)
    return x * (torch.multinomial(x.softmax(0).detach(), 1024) + torch.cat(drawn).repeat(8))


def both_devices(x: Tensor) -> Tensor:
    return x * torch.rand(1024, device=DEVICE) + torch.rand(1024).to(DEVICE)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout of half precision": lambda x: F.dropout(x.bfloat16(), 0.3).float(),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "dropout of features": lambda x: F.dropout1d(x.view(8, 16, 8), 0.5),
    "rand_like": lambda x: x * torch.rand_like(x),
    "both devices": both_devices,
    "integers": integers,
    "normal": normal,
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(0.5),
    "gamma": lambda x: x * torch.distributions.Gamma(x.detach().exp(), 2.0).rsample(),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "attention of float64": lambda x: attention(x.double()).float(),
    "attention of float32": attention,
    "attention of bfloat16": lambda x: attention(x.bfloat16()).float(),
    "in the backward": lambda x: DrawsBackward.apply(x),  # type: ignore[no-untyped-call]
}


def drawn_by(
    call: Callable[[Tensor], Tensor], max_concurrency: int | None, num_calls: int = 16
) -> list[Tensor]:
    """Return results, the gradient, and what the caller draws afterwards."""
    torch.manual_seed(5)
    x = torch.linspace(-1, 1, 1024).to(DEVICE).requires_grad_()

    def late(x: Tensor) -> Tensor:
        hold_up(LONG_CYCLES // 20)
        return call(x)

    results = parallel_apply([late] * num_calls, [(x,)] * num_calls, max_concurrency=max_concurrency)
    (grad,) = torch.autograd.grad(torch.stack(results).sum(), x)
    return [*[y.detach() for y in results], grad, torch.rand(3), torch.rand(3, device=DEVICE)]


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_are_the_same_with_any_number_of_workers_and_differ_between_calls(name: str) -> None:
    expected = drawn_by(DRAWS[name], 1)
    for bound in (2, 16, None, 1):
        got = drawn_by(DRAWS[name], bound)
        torch.testing.assert_close(got[:16], expected[:16], rtol=0, atol=0)
        # of fused attention sums are rounded as they come, in half precision
        torch.testing.assert_close(got[16], expected[16], rtol=2e-2, atol=1e-1)
        torch.testing.assert_close(got[17:], expected[17:], rtol=0, atol=0)
    assert len({tuple(y.flatten().tolist()) for y in expected[:-3]}) == 16


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # torch's own, for forward mode
def test_dropout_in_a_call_is_differentiated_twice_and_forward_as_elsewhere() -> None:
    def call(x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        y = F.dropout(x, 0.25)
        mask = y.detach() / x.detach()
        grad, weight = torch.ones_like(x, requires_grad=True), torch.linspace(0, 1, 64, device=DEVICE)
        (first,) = torch.autograd.grad(y, x, grad, create_graph=True)
        (second,) = torch.autograd.grad(first, grad, weight)
        with torch.autograd.forward_ad.dual_level():
            dual = F.dropout(torch.autograd.forward_ad.make_dual(x.detach(), weight), 0.25)
            value, tangent = torch.autograd.forward_ad.unpack_dual(dual)
        return [first.detach(), mask, second, mask * weight, tangent, value / x.detach() * weight]

    x = torch.linspace(1, 2, 64, device=DEVICE)
    for first, mask, second, expected, tangent, of_values in parallel_apply(
        [call] * NUM_CALLS, [(x,)] * NUM_CALLS
    ):
        torch.testing.assert_close([first, second, tangent], [mask, expected, of_values])
        assert set(mask.round(decimals=2).unique().tolist()) == {
            0.0,
            torch.tensor(4 / 3).round(decimals=2).item(),
        }


def test_hooks_of_what_fused_attention_saves_may_wait_for_other_calls() -> None:
    all_there = threading.Barrier(NUM_CALLS)

    def pack(tensor: Tensor) -> Tensor:
        with contextlib.suppress(threading.BrokenBarrierError):
            all_there.wait(PATIENCE_S)
        return tensor

    def call(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return attention(x)

    x = torch.linspace(-1, 1, 1024, device=DEVICE).requires_grad_()
    torch.stack(parallel_apply([call] * NUM_CALLS, [(x,)] * NUM_CALLS)).sum().backward()
    assert not all_there.broken


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_dropout_between_layers_of_an_rnn_is_the_same_with_any_number_of_workers(kind: type[Any]) -> None:
    net = kind(16, 8, num_layers=3, dropout=0.5).to(DEVICE)

    def call(x: Tensor) -> Tensor:
        y: Tensor = net(x.view(8, 8, 16))[0]
        return y

    expected = drawn_by(call, 1)
    for bound in (2, 16, None, 1):
        torch.testing.assert_close(drawn_by(call, bound), expected)
    assert len({tuple(y.flatten().tolist()) for y in expected[:-3]}) == 16


def state() -> Tensor:
    return torch.cuda.get_rng_state() if HAS_GPU else torch.get_rng_state()


def set_state(state: Tensor) -> None:
    (torch.cuda.set_rng_state if HAS_GPU else torch.set_rng_state)(state)


def draw() -> Tensor:
    return torch.rand(8, device=DEVICE)


def drawn_in_a_map(call: Callable[[int], Any]) -> list[Any]:
    return parallel_apply([call] * NUM_CALLS, [(i,) for i in range(NUM_CALLS)])


@pytest.mark.parametrize("name", ["dropout", "both devices", "attention of float32", "in the backward"])
def test_the_callers_streams_go_on_as_if_the_map_had_drawn_once(name: str) -> None:
    after_map = drawn_by(DRAWS[name], None)[-2:]
    torch.manual_seed(5)
    for _ in range(2 if name == "in the backward" else 1):  # that draws again
        torch.empty((), dtype=torch.int64).random_()
    torch.testing.assert_close(after_map, [torch.rand(3), torch.rand(3, device=DEVICE)], rtol=0, atol=0)


def test_a_state_that_a_call_reads_and_sets_again_gives_the_same_numbers_again() -> None:
    def call(index: int) -> tuple[Tensor, Tensor]:
        read = state()
        hold_up(LONG_CYCLES // 20)
        first = draw()
        set_state(read)
        return first, draw()

    drawn = drawn_in_a_map(call)
    for first, again in drawn:
        torch.testing.assert_close(again, first, rtol=0, atol=0)
    assert len({tuple(first.tolist()) for first, _ in drawn}) == NUM_CALLS


def test_a_fork_of_the_streams_within_a_call_is_the_calls_own() -> None:
    def call(index: int) -> tuple[Tensor, Tensor, Tensor]:
        with torch.random.fork_rng():
            first = draw()
        with torch.random.fork_rng():
            torch.manual_seed(index)
            seeded = draw()
        return first, draw(), seeded

    for index, (first, again, seeded) in enumerate(drawn_in_a_map(call)):
        torch.testing.assert_close(again, first, rtol=0, atol=0)
        generator = torch.Generator(DEVICE).manual_seed(index)
        alone = torch.rand(8, device=DEVICE, generator=generator)
        torch.testing.assert_close(seeded, alone, rtol=0, atol=0)


def test_a_fork_around_a_map_leaves_the_callers_streams_where_they_were() -> None:
    before = torch.get_rng_state(), state()
    with torch.random.fork_rng():
        drawn_in_a_map(lambda _: draw())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(state(), before[1])


def test_a_seed_that_a_call_sets_is_for_this_call_alone() -> None:
    """And what is drawn from it is not drawn from the caller's streams."""
    before = torch.get_rng_state(), state()

    def call(index: int) -> Tensor:
        (torch.cuda.manual_seed_all if HAS_GPU else torch.manual_seed)(index // 2)
        return draw()

    for index, drawn in enumerate(drawn_in_a_map(call)):
        generator = torch.Generator(DEVICE).manual_seed(index // 2)
        alone = torch.rand(8, device=DEVICE, generator=generator)
        torch.testing.assert_close(drawn, alone, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(state(), before[1])


def draws_from(generator: torch.Generator) -> Iterator[Tensor]:
    like = torch.empty(64, device=DEVICE)
    yield torch.rand(64, device=DEVICE, generator=generator)
    yield torch.randperm(64, device=DEVICE, generator=generator)
    yield torch.multinomial(torch.ones(64, device=DEVICE), 32, generator=generator)
    yield like.bernoulli_(0.5, generator=generator).clone()
    yield torch.bernoulli(torch.full_like(like, 0.3), generator=generator)
    yield like.normal_(generator=generator).clone()
    yield torch.randint(100, (64,), device=DEVICE, generator=generator)


def test_generators_of_the_device_that_calls_are_given_are_used_as_in_a_loop() -> None:
    before = torch.get_rng_state(), state()

    def call(generator: torch.Generator) -> list[Tensor]:
        return list(draws_from(generator))

    found = []
    for apply in (one_after_another, parallel_apply):
        generators = [torch.Generator(DEVICE).manual_seed(i) for i in range(NUM_CALLS)]
        found.append(
            (
                apply([call] * NUM_CALLS, [(one,) for one in generators]),
                [one.get_state() for one in generators],
            )
        )
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(state(), before[1])


def test_a_default_generator_that_is_passed_is_not_the_calls_own() -> None:
    """See docs/limits.md."""
    if HAS_GPU:
        with pytest.raises(TypeError, match="generator"):
            drawn_in_a_map(lambda _: torch.rand(8, device=DEVICE, generator=torch.cuda.default_generators[0]))
        return
    torch.manual_seed(5)
    expected = [torch.rand(8) for _ in range(NUM_CALLS)]
    torch.manual_seed(5)
    drawn = drawn_in_a_map(lambda _: torch.rand(8, generator=torch.default_generator))
    assert {tuple(one.tolist()) for one in drawn} == {tuple(one.tolist()) for one in expected}
