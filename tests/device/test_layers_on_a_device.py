"""Layers of experts and calls of modules on a device: the numbers of the plain loop, for every kind of expert.

Where there is a GPU, kernels are held up on their streams: a missing order between streams shows in the numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function, gradcheck, gradgradcheck
from torch.nn import functional as F

from moe_autograd import FeedForwardExpert, MixtureOfExperts, TopKRouter, parallel_apply
from moe_autograd.moe.experts import SwiGLUExpert
from moe_autograd.moe.routing import Routing
from tests.support.comparison import one_after_another
from tests.support.devices import DEVICE, hold_up
from tests.support.plain_layer import plain_loop

pytestmark = pytest.mark.gpu

Apply = Callable[..., Any]  # called like `parallel_apply`

WIDTH, NUM_EXPERTS, NUM_TOKENS, NUM_CALLS = 16, 4, 48, 4
SHORT = 5_000_000  # cycles of a GPU's clock: some 3 ms


class Delay(Function):
    """A copy that comes late, in the backward too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        hold_up(SHORT)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        hold_up(SHORT)
        return grad * 1


def delayed(x: Tensor) -> Tensor:
    late: Tensor = Delay.apply(x)  # type: ignore[no-untyped-call]  # torch's own gap
    return late


class Late(nn.Module):
    """A module whose input and output come late."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return delayed(self.inner(delayed(x)))


class Recurrent(nn.Module):
    """Each token is a sequence of its own."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.rnn = kind(4, 4, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.rnn(x.reshape(len(x), WIDTH // 4, 4))[0]
        return y.reshape(x.shape)


class Convolution(nn.Module):
    """Each token is a line of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x.unsqueeze(1)).squeeze(1)
        return y


class Attention(nn.Module):
    """Each token is two rows that attend to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).reshape(len(x), 1, 6, WIDTH // 2).chunk(3, dim=2)
        return F.scaled_dot_product_attention(q, k, v).reshape(x.shape)


EXPERTS: dict[str, Callable[[], nn.Module]] = {
    "feed-forward": lambda: FeedForwardExpert(WIDTH, 32),
    "swiglu": lambda: SwiGLUExpert(WIDTH, 32),
    "convolution": Convolution,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "attention": Attention,
}


class ByPosition(nn.Module):
    """A router of a user's own, without logits that mean anything: tokens take turns, with weights that are learnt."""

    num_experts = NUM_EXPERTS

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS)

    def forward(self, x: Tensor) -> Routing:
        logits = self.gate(x.reshape(-1, WIDTH))
        index = torch.arange(len(logits), device=x.device).unsqueeze(1) % NUM_EXPERTS
        return Routing(logits, logits.softmax(-1), index, logits.sigmoid().gather(1, index))


ROUTERS: dict[str, Callable[[], nn.Module]] = {
    "top 1, not normalized": lambda: TopKRouter(WIDTH, NUM_EXPERTS, top_k=1, normalize=False),
    "top 2": lambda: TopKRouter(WIDTH, NUM_EXPERTS, top_k=2),
    "all": lambda: TopKRouter(WIDTH, NUM_EXPERTS, top_k=NUM_EXPERTS),
    "top 2, some dropped": lambda: TopKRouter(WIDTH, NUM_EXPERTS, top_k=2, capacity_factor=0.75),
    "a user's own": ByPosition,
}


def layer_of(
    make_expert: Callable[[], nn.Module],
    make_router: Callable[[], nn.Module] = ROUTERS["top 2"],
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> MixtureOfExperts:
    torch.manual_seed(1)
    experts = [Late(make_expert()) for _ in range(NUM_EXPERTS)]
    return MixtureOfExperts(make_router(), experts, **options).to(DEVICE, dtype)


def tokens(num_tokens: int = NUM_TOKENS, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(num_tokens, WIDTH, generator=generator, dtype=dtype).to(DEVICE)


def step(function: Callable[[Tensor], Tensor], layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Values, gradients and buffers; the caller's own kernels come late as well."""
    layer.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    y = delayed(function(delayed(x)))
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).reshape(y.shape))
    grads = {
        name: tensor.grad * 1
        for name, tensor in [("x", x), *layer.named_parameters()]
        if tensor.grad is not None
    }
    buffers = {f"{name} itself": buffer.clone() for name, buffer in layer.named_buffers()}
    return {"y": y.detach(), **grads, **buffers}


def assert_equals_plain_loop(
    make: Callable[[], MixtureOfExperts], x: Tensor, tolerance: float | None = None
) -> None:
    ours, theirs = make(), make()
    got, expected = step(ours, ours, x), step(lambda x: plain_loop(theirs, x), theirs, x)
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", EXPERTS)
def test_every_kind_of_expert_has_the_numbers_of_the_plain_loop(kind: str) -> None:
    assert_equals_plain_loop(lambda: layer_of(EXPERTS[kind]), tokens())


@pytest.mark.parametrize("kind", ROUTERS)
def test_every_router_has_the_numbers_of_the_plain_loop(kind: str) -> None:
    make_router = ROUTERS[kind]
    assert_equals_plain_loop(lambda: layer_of(EXPERTS["feed-forward"], make_router), tokens())


@pytest.mark.parametrize("num_tokens", [1, 300])
@pytest.mark.parametrize(
    "options",
    [
        {"max_concurrency": 2},
        {"recompute": True},
        {"defer_weight_grads": True},
        {"on_failure": "drop"},
        {"on_failure": "drop", "timeout_after_min_s": 60.0},
        {"zero_grads_for_idle_experts": True},
    ],
    ids=str,
)
def test_no_option_changes_a_number(options: dict[str, Any], num_tokens: int) -> None:
    ours, theirs = (layer_of(EXPERTS["swiglu"], **own) for own in (options, {}))
    x = tokens(num_tokens)
    got, expected = step(ours, ours, x), step(lambda x: plain_loop(theirs, x), theirs, x)
    idle = {name: torch.zeros_like(p) for name, p in ours.named_parameters()} if num_tokens < 2 else {}
    torch.testing.assert_close({**idle, **got}, {**idle, **expected})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["feed-forward", "attention"])
def test_under_autocast_a_layer_has_the_numbers_of_a_plain_loop_there(kind: str, dtype: torch.dtype) -> None:
    x = tokens(dtype=torch.float32).to(dtype)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert layer_of(EXPERTS[kind], dtype=torch.float32)(x).dtype is dtype
        make = lambda: layer_of(EXPERTS[kind], dtype=torch.float32)  # noqa: E731
        assert_equals_plain_loop(make, x, tolerance=5e-2)


def test_losses_of_the_routing_lead_to_the_router() -> None:
    layer, x = layer_of(EXPERTS["feed-forward"]), tokens()
    _, routing = layer(x, return_routing=True)
    alone, weights = layer.router(x), list(layer.router.parameters())
    of_layer = torch.autograd.grad(routing.load_balancing_loss + routing.z_loss, weights)
    of_router = torch.autograd.grad(alone.load_balancing_loss + alone.z_loss, weights)
    torch.testing.assert_close(of_layer, of_router)


class AfterTheFirst(nn.Module):
    """What several calls share: the first call's kernels come late, and the other calls begin when they are queued."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, x: Tensor, *, is_first: bool, begun: threading.Event) -> Tensor:
        if is_first:
            hold_up()
        else:
            begun.wait()
        y: Tensor = self.shared(x)
        begun.set()
        return y


def apply_after_the_first(apply: Apply, shared: nn.Module, xs: Sequence[Tensor]) -> list[Tensor]:
    begun = threading.Event()
    kwargs = [{"is_first": i == 0, "begun": begun} for i in range(len(xs))]
    return list(apply([AfterTheFirst(shared)] * len(xs), [(x,) for x in xs], kwargs))


@pytest.mark.parametrize("seed", range(3))
def test_a_cast_weight_that_one_call_has_put_into_the_cache_is_there_for_the_others(seed: int) -> None:
    def run(apply: Apply) -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(seed)
        shared, xs = nn.Linear(256, 256).to(DEVICE), torch.randn(NUM_CALLS, 8, 256).to(DEVICE)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            outputs = apply_after_the_first(apply, shared, list(xs))
        torch.stack(outputs).float().square().sum().backward()
        return [y.detach() for y in outputs], [g / g.abs().max() for g in grads_of(shared.parameters())]

    (ours, our_grads), (theirs, their_grads) = run(parallel_apply), run(one_after_another)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(our_grads, their_grads, rtol=0, atol=2e-2)  # the loop adds in bfloat16


class KeepsStatistics(nn.Module):
    """A module of a user's own that says so."""

    keeps_statistics = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.mean.copy_(self.mean * 0.5 + x.detach().mean(0))
        return x - self.mean.clone()


def statistics_of(apply: Apply, shared: nn.Module) -> list[Tensor]:
    shared.to(DEVICE, torch.float64)
    xs = [(tokens() * (i + 1) + i).requires_grad_() for i in range(NUM_CALLS)]

    def call(x: Tensor, *, is_first: bool) -> Tensor:
        if is_first:
            hold_up()
        y: Tensor = shared(x)
        return y

    outputs = apply([call] * NUM_CALLS, [(x,) for x in xs], [{"is_first": i == 0} for i in range(NUM_CALLS)])
    kept = [buffer.clone() for buffer in shared.buffers()]
    torch.stack(list(outputs)).square().sum().backward()
    return [*kept, *[y.detach() for y in outputs], *grads_of([*xs, *shared.parameters()])]


@pytest.mark.parametrize("make", [lambda: nn.BatchNorm1d(WIDTH), KeepsStatistics], ids=["batch norm", "own"])
def test_calls_that_share_running_statistics_take_turns_on_the_device_as_well(
    make: Callable[[], nn.Module],
) -> None:
    torch.testing.assert_close(
        statistics_of(parallel_apply, make()), statistics_of(one_after_another, make())
    )


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_the_weights_that_a_first_call_of_a_lazy_module_makes_are_there_for_the_others() -> None:
    shared = nn.LazyLinear(256, device=DEVICE)

    def call(x: Tensor, *, is_first: bool) -> Tensor:
        if is_first:
            hold_up()
        y: Tensor = shared(x)
        return y

    xs = list(torch.randn(NUM_CALLS, 8, 256).to(DEVICE))
    kwargs = [{"is_first": i == 0} for i in range(NUM_CALLS)]
    outputs = parallel_apply([call] * NUM_CALLS, [(x,) for x in xs], kwargs)
    torch.testing.assert_close(outputs, [F.linear(x, shared.weight, shared.bias) for x in xs])


class Several(nn.Module):
    """Takes several tensors and other things, and returns tensors among other things."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: tuple[Tensor, Tensor], count: int, *, scale: Tensor) -> dict[str, Any]:
        x, y = pair
        x, y = delayed(self.linear(x)), delayed(y)
        return {"sum": x + y * scale, "pair": [x * y, None], "count": count, "mask": x > 0}


def test_shared_weights_several_inputs_keywords_and_other_results_are_as_in_a_loop() -> None:
    def run(apply: Apply) -> Any:
        torch.manual_seed(3)
        modules = [Several().to(DEVICE, torch.float64) for _ in range(2)] * 2
        x, y, scale = tokens().requires_grad_(), tokens().requires_grad_(), tokens(1).requires_grad_()
        inputs = [((delayed(x), y * i), i) for i in range(4)]
        outputs = apply(modules, inputs, [{"scale": scale}] * 4)
        sum((o["sum"] + o["pair"][0]).square().sum() for o in outputs).backward()
        said = [{**o, "sum": o["sum"].detach(), "pair": o["pair"][0].detach()} for o in outputs]
        assert [o["pair"][1] for o in outputs] == [None] * 4
        assert [o["count"] for o in outputs] == [0, 1, 2, 3]
        return said, grads_of([x, y, scale, *parameters(modules[:2])])

    torch.testing.assert_close(run(parallel_apply), run(one_after_another))


def parameters(modules: Iterable[nn.Module]) -> list[Tensor]:
    return [p for module in modules for p in module.parameters()]


def grads_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    grads = [tensor.grad for tensor in tensors]
    return [grad for grad in grads if grad is not None]


@pytest.mark.parametrize("recompute", [False, True])
def test_a_second_derivative_is_that_of_a_loop(recompute: bool) -> None:
    def run(apply: Apply) -> list[Tensor]:
        torch.manual_seed(4)
        modules = [Late(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())) for _ in range(NUM_CALLS)]
        for module in modules:
            module.to(DEVICE, torch.float64)
        xs = [(tokens() + i).requires_grad_() for i in range(NUM_CALLS)]
        outputs = apply(modules, [(x * 2,) for x in xs], recompute=recompute)
        first = torch.autograd.grad(delayed(torch.stack(list(outputs))).sin().sum(), xs, create_graph=True)
        delayed(torch.stack(first)).square().sum().backward()
        return [*[g.detach() for g in first], *grads_of([*xs, *parameters(modules)])]

    torch.testing.assert_close(run(parallel_apply), run(one_after_another))


@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
def test_derivatives_through_a_layer_are_exact(check: Callable[..., bool]) -> None:
    torch.manual_seed(5)
    experts = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(3)]
    layer = MixtureOfExperts(TopKRouter(3, 3, top_k=2), experts).to(DEVICE, torch.float64)
    names = ("router.weight", "experts.0.0.weight", "experts.2.0.bias")

    def call(x: Tensor, *values: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))
        return y

    leaves = [torch.randn(4, 3, dtype=torch.float64).to(DEVICE), *map(layer.get_parameter, names)]
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    assert check(call, leaves, fast_mode=True, nondet_tol=1e-12)


@pytest.mark.parametrize("is_shared", [False, True])
def test_sparse_gradients_of_embeddings_are_those_of_a_loop(is_shared: bool) -> None:
    def run(apply: Apply) -> list[Tensor]:
        torch.manual_seed(6)
        count = 1 if is_shared else NUM_CALLS
        tables = [nn.Embedding(20, WIDTH, sparse=True).to(DEVICE) for _ in range(count)]
        indices = torch.randint(20, (NUM_CALLS, 9)).to(DEVICE)
        called = [nn.Sequential(tables[i % count], Late(nn.Tanh())) for i in range(NUM_CALLS)]
        outputs = apply(called, [(index,) for index in indices])
        delayed(torch.stack(list(outputs))).square().sum().backward()
        grads = grads_of([table.weight for table in tables])
        assert [grad.is_sparse for grad in grads] == [True] * count
        return [grad.coalesce().to_dense() for grad in grads]

    torch.testing.assert_close(run(parallel_apply), run(one_after_another))


def test_a_scaler_that_meets_an_inf_leaves_out_the_same_step() -> None:
    def run(*, is_plain: bool) -> tuple[list[float], list[Tensor]]:
        layer = layer_of(EXPERTS["feed-forward"], dtype=torch.float32)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(DEVICE, init_scale=64.0, growth_interval=1)
        scales = []
        for factor in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                x = tokens(dtype=torch.float32)
                y = plain_loop(layer, x) if is_plain else layer(x)
            scaler.scale((y * factor).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, [p.detach() for p in layer.parameters()]

    expected = run(is_plain=True)
    assert expected[0] == [128.0, 64.0, 128.0]
    torch.testing.assert_close(run(is_plain=False), expected, rtol=2e-2, atol=2e-2)
