"""A layer goes on without experts that fail on their servers: real servers, real signals, a plain reference."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from experts_server.configuration.config import SecurityConfig, ServingConfig
from moe_autograd.errors import InvalidCallError, PermissionDeniedError, TooFewExpertsError
from moe_autograd.moe import failures
from moe_autograd.moe.experts import FeedForwardExpert
from moe_autograd.moe.layer import MixtureOfExperts
from moe_autograd.moe.routers import TopKRouter
from moe_autograd.remote import RemoteExperts, RemoteOptimizer, RetryPolicy, connect
from tests.support.fragile import Fragile
from tests.support.proxy import Proxy
from tests.support.servers import ServerProcess
from tests.support.survivors import combine_survivors

NUM_EXPERTS, D_MODEL = 8, 4
LR, SMALL_LR = 0.1, 1e-3
SOON = RetryPolicy(patience_s=3.0)  # to give up; and a busy machine may take a moment to answer a ping
ALL = set(range(NUM_EXPERTS))
SUBSETS = [
    set(subset)
    for size in range(NUM_EXPERTS + 1)
    for subset in itertools.combinations(range(NUM_EXPERTS), size)
]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=SMALL_LR)


def tokens() -> Tensor:
    """Return the same tokens every time; each expert has some of them."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(24, D_MODEL, dtype=torch.float64, generator=generator).requires_grad_()


@pytest.fixture(scope="module")
def modules() -> list[Fragile]:
    torch.manual_seed(0)
    return [Fragile(D_MODEL) for _ in range(NUM_EXPERTS)]


@pytest.fixture(scope="module")
def router() -> TopKRouter:
    torch.manual_seed(0)
    router = TopKRouter(D_MODEL, NUM_EXPERTS, top_k=2).double()
    assert (router(tokens()).tokens_per_expert > 0).all()
    return router


@pytest.fixture(scope="module")
def experts(modules: list[Fragile]) -> Iterator[RemoteExperts]:
    named = {f"ffn.{index}": module for index, module in enumerate(modules)}
    with (
        ExpertsServer(named, optimizer=sgd, update="on_backward") as server,
        connect(server.address) as experts,
    ):
        yield experts


def close(actual: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6, msg=lambda text: f"{what}: {text}")


def some_of(others: set[int]) -> set[int]:
    """Return about half of them, the same every time."""
    chance = random.Random(str(sorted(others)))
    return {index for index in others if chance.random() < 0.5}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("phases", ["forward", "backward", "forward and backward"])
def test_whichever_experts_fail_the_layer_is_the_plain_loop_over_the_survivors(
    experts, modules, router, phases
):
    """Values, the gradients of tokens and router, and the updates of the experts on the server."""
    assert len(SUBSETS) == 2**NUM_EXPERTS
    for subset in SUBSETS if phases != "forward and backward" else SUBSETS[::2]:
        in_forward = subset if "forward" in phases else set()
        in_backward = subset if phases == "backward" else set()
        if phases == "forward and backward":
            in_backward = some_of(ALL - in_forward)
        lost = dict.fromkeys(in_forward, "forward") | dict.fromkeys(in_backward, "backward")
        for index, module in enumerate(modules):
            module.fails_in = lost.get(index, "")
        x, own_router = tokens(), copy.deepcopy(router)
        layer = MixtureOfExperts(own_router, experts, on_failure="drop", allow_zero_outputs=True)
        linears = [copy.deepcopy(module.linear) for module in modules]
        expected_y = combine_survivors(
            x, router(x), linears, lost_in_forward=in_forward, lost_in_backward=in_backward
        )
        weights = [linear.weight for linear in linears]
        of_x, of_router, *of_weights = torch.autograd.grad(
            expected_y.square().sum(),
            [x, router.weight, *weights],
            allow_unused=True,
            materialize_grads=True,
        )

        y, routing = layer(x, return_routing=True)
        y.square().sum().backward()
        close(y, expected_y, f"y without {lost}")
        close(x.grad, of_x, f"gradient of x without {lost}")
        close(own_router.weight.grad, of_router, f"gradient of the router without {lost}")
        for index, (module, weight, grad) in enumerate(zip(modules, weights, of_weights, strict=True)):
            update = (weight - module.linear.weight) / SMALL_LR
            close(update, grad, f"update of expert {index} without {lost}")
        assert sorted((failure.expert, failure.phase) for failure in routing.failures) == [
            (f"ffn.{index}", lost[index]) for index in sorted(lost)
        ]
        assert all("ArithmeticError: told to" in failure.reason for failure in routing.failures)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_experts_that_were_wrapped_are_dropped_by_the_same_rule_beside_others(
    experts, modules, router, phase
):
    """What is wrapped runs here, and the others are called together."""
    x, lost = tokens(), {0, 1, 4, 5}
    for index, module in enumerate(modules):
        module.fails_in = phase if index in lost else ""
    wrapped = [nn.Sequential(nn.Tanh(), expert) for expert in experts.values()]
    beside = [expert if index % 2 else wrapped[index] for index, expert in enumerate(experts.values())]
    plain = [
        module.linear if index % 2 else nn.Sequential(nn.Tanh(), module.linear)
        for index, module in enumerate(modules)
    ]
    expected_y = combine_survivors(x, router(x), plain, **{f"lost_in_{phase}": lost})
    expected = torch.autograd.grad(expected_y.square().sum(), [x, router.weight])

    layer = MixtureOfExperts(router, beside, on_failure="drop", allow_zero_outputs=True)
    y, routing = layer(x, return_routing=True)
    close(y, expected_y, "y")
    for actual, grad in zip(torch.autograd.grad(y.square().sum(), [x, router.weight]), expected, strict=True):
        close(actual, grad, "gradient")
    assert {(failure.expert_index, failure.phase) for failure in routing.failures} == {
        (i, phase) for i in lost
    }


def test_a_token_whose_experts_all_failed_raises(experts, modules, router):
    for module in modules:
        module.fails_in = "forward"
    with pytest.raises(TooFewExpertsError, match=r"'ffn\.0', forward: ExpertFailedError: .* at 127\.0\.0\.1"):
        MixtureOfExperts(router, experts, on_failure="drop")(tokens())


def test_a_call_that_the_servers_refuse_is_no_failure_to_go_on_without(experts, modules, router):
    for module in modules:
        module.fails_in = ""
    layer = MixtureOfExperts(router.float(), experts, on_failure="drop", allow_zero_outputs=True)
    try:
        with pytest.raises(InvalidCallError):
            layer(tokens().float())
    finally:
        router.double()


# ---- a server that stays, and one in a process of its own, which is killed


@pytest.fixture
def stays() -> Iterator[ExpertsServer]:
    named = {f"ffn.{index}": FeedForwardExpert(D_MODEL) for index in range(4)}
    with ExpertsServer(named, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=LR)) as server:
        yield server


@pytest.fixture
def start_server(tmp_path):
    """Start the other one; whatever runs at the end is killed."""
    file = tmp_path / "server.toml"
    file.write_text(f"""
        optimizer = {{ name = "sgd", lr = {LR} }}
        [experts."ffn.[4:8]"]
        class = "ffn"
        args = {{ d_model = {D_MODEL} }}
    """)
    started: list[ServerProcess] = []

    def start(address: str = "127.0.0.1:0") -> ServerProcess:
        started.append(ServerProcess("--config", str(file), "--listen", address).start())
        return started[-1]

    yield start
    for server in started:
        if server.process.returncode is None:
            server.kill()


def local_copies(experts: RemoteExperts) -> list[nn.Module]:
    """Return modules with the weights that are on the servers."""
    copies = []
    for expert in experts.values():
        module = FeedForwardExpert(D_MODEL)
        module.load_state_dict(expert.state_dict())
        copies.append(module)
    return copies


@pytest.mark.timeout(600)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_server_that_is_killed_is_gone_on_without(stays, start_server, phase):
    torch.manual_seed(0)
    goes = start_server()
    with connect([stays.address, goes.address], retry=SOON) as experts:
        router, x = TopKRouter(D_MODEL, NUM_EXPERTS, top_k=2), tokens().detach().float().requires_grad_()
        copies, own_router = local_copies(experts), copy.deepcopy(router)
        expected_y = combine_survivors(x, router(x), copies, **{f"lost_in_{phase}": range(4, 8)})
        weights = [module.up.weight for module in copies[:4]]
        expected = torch.autograd.grad(expected_y.square().sum(), [x, router.weight, *weights])

        layer = MixtureOfExperts(own_router, experts, on_failure="drop", allow_zero_outputs=True)
        optimizer = RemoteOptimizer(experts, on_failure="drop")
        if phase == "forward":
            goes.kill()
        y, routing = layer(x, return_routing=True)
        if phase == "backward":
            assert routing.failures == []
            goes.kill()
        y.square().sum().backward()
        lost = {index for index in range(4, 8) if routing.tokens_per_expert[index]}
        assert {(failure.expert_index, failure.phase) for failure in routing.failures} == {
            (index, phase) for index in lost
        }
        assert all("ServerUnavailableError: " in failure.reason for failure in routing.failures)
        close(y, expected_y, "y")
        close(x.grad, expected[0], "gradient of x")
        close(own_router.weight.grad, expected[1], "gradient of the router")
        optimizer.step()
        assert len(optimizer.failures) == (phase == "backward")
        for index, (weight, grad) in enumerate(zip(weights, expected[2:], strict=True)):
            close(weight - experts[f"ffn.{index}"].state_dict()["up.weight"], LR * grad, f"expert {index}")


class Clock:
    """Stands for the `time` of the module that decides how long an expert is left alone."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.mark.timeout(600)
def test_training_goes_on_while_one_of_two_servers_is_gone_and_with_it_when_it_is_back(
    stays, start_server, monkeypatch
):
    clock = Clock()
    monkeypatch.setattr(failures, "time", clock)
    torch.manual_seed(0)
    goes = start_server()
    with connect([stays.address, goes.address], retry=SOON) as experts:
        router = TopKRouter(D_MODEL, NUM_EXPERTS, top_k=2)
        layer = MixtureOfExperts(router, experts, on_failure="drop", allow_zero_outputs=True)
        local = torch.optim.SGD(layer.parameters(), lr=0.01)
        remote = RemoteOptimizer(experts, on_failure="drop")
        x, target = torch.randn(2, 64, D_MODEL)

        def step() -> set[int]:
            """Train once; return who was lost."""
            local.zero_grad(), remote.zero_grad()
            y, routing = layer(x, return_routing=True)
            nn.functional.mse_loss(y, target).backward()
            local.step(), remote.step()
            assert (routing.tokens_per_expert > 0).all()
            return {failure.expert_index for failure in routing.failures}

        def num_updates() -> list[int]:
            return [hosted.num_updates for hosted in experts.info().values()]

        assert [step() for _ in range(3)] == [set()] * 3
        assert num_updates() == [3] * 8
        goes.kill()
        assert [step() for _ in range(3)] == [{4, 5, 6, 7}] * 3
        start_server(goes.address)
        num_steps = 6
        while step():  # until the connection is tried again
            num_steps += 1
            clock.now_s += 30
        num_steps += 1
        assert step() == set()
        assert num_updates()[:4] == [num_steps + 1] * 4
        assert min(num_updates()[4:]) >= 1


# ---- updates


def test_gradients_that_a_server_could_not_be_told_to_forget_are_never_applied():
    torch.manual_seed(0)
    module = nn.Linear(D_MODEL, D_MODEL, bias=False)
    initial = module.weight.detach().clone()
    # Shorter than pings take to notice.
    retry = RetryPolicy(patience_s=60.0, max_retries=0, update_attempt_s=1.0)
    with (
        ExpertsServer({"linear": module}, optimizer=lambda p: torch.optim.SGD(p, lr=1.0)) as server,
        Proxy(server.address) as proxy,
        connect(proxy.address, retry=retry) as experts,
    ):
        optimizer = RemoteOptimizer(experts, on_failure="drop")

        def differentiate(value: float) -> None:
            experts["linear"](torch.full((1, D_MODEL), value)).sum().backward()

        differentiate(1.0)
        proxy.is_black_hole = True
        optimizer.zero_grad()
        assert len(optimizer.failures) == 1
        assert proxy.address in str(optimizer.failures[0])
        proxy.is_black_hole = False
        proxy.cut()
        differentiate(2.0)
        optimizer.step()
        assert torch.equal(module.weight, initial)
        optimizer.zero_grad()
        assert optimizer.failures == []
        differentiate(0.5)
        optimizer.step()
        torch.testing.assert_close(module.weight, initial - 0.5)


def test_another_on_failure_is_refused(experts):
    with pytest.raises(ValueError, match='expected on_failure "raise" or "drop", got \'ignore\''):
        RemoteOptimizer(experts, on_failure="ignore")


def test_what_a_server_does_not_permit_is_raised_by_those_who_drop(tmp_path, modules, router):
    for module in modules:
        module.fails_in = ""
    (tmp_path / "tokens").write_text("read read-token-0123456789\n")
    config = ServingConfig(security=SecurityConfig(tokens_file=tmp_path / "tokens"))
    named = {f"ffn.{index}": module for index, module in enumerate(modules)}
    with (
        ExpertsServer(named, optimizer=sgd, config=config) as server,
        connect(server.address, token="read-token-0123456789") as experts,
    ):
        layer = MixtureOfExperts(router, experts, on_failure="drop", allow_zero_outputs=True)
        y, routing = layer(tokens(), return_routing=True)
        assert routing.failures == []
        with pytest.raises(PermissionDeniedError):
            y.sum().backward()
