"""Training through a server is training here: the same losses and the same weights."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

from experts_server import ExpertsServer
from moe_autograd import parallel_apply
from moe_autograd.moe.layer import MixtureOfExperts
from moe_autograd.moe.routers import TopKRouter
from moe_autograd.remote import RemoteOptimizer, RetryPolicy, connect, updates
from moe_autograd.remote.asking import ask
from tests.support.held import Held
from tests.support.hosting import sgd
from tests.support.servers import START_S

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
}


def make_experts(num_experts: int = 8) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        f"ffn.{index}": nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        for index in range(num_experts)
    }


def make_model(experts) -> nn.Module:
    torch.manual_seed(1)
    layer = MixtureOfExperts(TopKRouter(16, num_experts=8, top_k=2), experts)
    return nn.Sequential(nn.Linear(10, 16), layer, nn.Linear(16, 3))


def train(model: nn.Module, optimizers) -> list[float]:
    torch.manual_seed(2)
    features = torch.randn(64, 10)
    labels = features[:, :3].argmax(dim=1)
    losses = []
    for _ in range(20):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(features), labels)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("num_servers", [1, 3])
def test_losses_and_weights_are_those_of_local_training(name, num_servers):
    make_optimizer = OPTIMIZERS[name]
    local = make_experts()
    model = make_model(local)
    expected = train(model, [make_optimizer(model.parameters())])

    hosted = list(copy.deepcopy(make_experts()).items())
    servers = [
        ExpertsServer(dict(hosted[index::num_servers]), optimizer=make_optimizer).start()
        for index in range(num_servers)
    ]
    try:
        with connect([server.address for server in servers]) as experts:
            assert list(experts) == list(local)
            model = make_model(experts)
            losses = train(model, [make_optimizer(model.parameters()), RemoteOptimizer(experts)])
            updates = {expert: info.num_updates for expert, info in experts.info().items()}
    finally:
        for server in servers:
            server.stop()

    assert losses == pytest.approx(expected, rel=1e-4)
    assert losses[-1] < 0.7 * losses[0]
    for expert, module in hosted:
        torch.testing.assert_close(module.state_dict(), local[expert].state_dict(), rtol=1e-4, atol=1e-5)
        assert 0 < updates[expert] <= 20


def test_a_hook_of_the_optimizer_here_steps_the_servers_where_a_trainer_calls_nothing_else():
    make_optimizer = OPTIMIZERS["adam"]
    local = make_experts()
    model = make_model(local)
    expected = train(model, [make_optimizer(model.parameters())])

    with (
        ExpertsServer(make_experts(), optimizer=make_optimizer) as server,
        connect(server.address) as experts,
    ):
        model = make_model(experts)
        here, there = make_optimizer(model.parameters()), RemoteOptimizer(experts)

        def step_there(*_: object) -> None:
            there.step(), there.zero_grad()

        here.register_step_post_hook(step_there)
        torch.testing.assert_close(train(model, [here]), expected)
        weights = experts.state_dict()
    for name, expert in local.items():
        for key, tensor in expert.state_dict().items():
            torch.testing.assert_close(weights[f"{name}.{key}"], tensor)


def test_the_optimizers_repr_names_what_it_trains_and_where():
    modules = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}
    with ExpertsServer(modules, optimizer=OPTIMIZERS["sgd"]) as server, connect(server.address) as experts:
        assert repr(RemoteOptimizer(experts)) == f"RemoteOptimizer(a, b at {server.address})"


def test_of_experts_called_together_one_that_is_frozen_is_not_trained_and_the_others_are():
    modules = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}
    with ExpertsServer(modules, optimizer=OPTIMIZERS["sgd"]) as server, connect(server.address) as experts:
        experts["a"].requires_grad_(False)
        frozen, trained = parallel_apply(list(experts.values()), [(torch.ones(1, 4),)] * 2)
        assert (frozen.requires_grad, trained.requires_grad) == (False, True)
        trained.sum().backward()
        RemoteOptimizer(experts).step()
        assert server.num_updates == {"a": 0, "b": 1}


def test_gradients_of_several_backwards_add_up_until_the_step():
    modules = {"ffn.0": nn.Linear(4, 4)}
    twin = copy.deepcopy(modules["ffn.0"])
    make_optimizer = OPTIMIZERS["sgd"]
    with ExpertsServer(modules, optimizer=make_optimizer) as server, connect(server.address) as experts:
        optimizer, local_optimizer = RemoteOptimizer(experts), make_optimizer(twin.parameters())
        for x in torch.randn(3, 5, 4):
            experts["ffn.0"](x).square().sum().backward()
            twin(x).square().sum().backward()
        optimizer.step()
        local_optimizer.step()
    torch.testing.assert_close(modules["ffn.0"].state_dict(), twin.state_dict())


def test_gradients_stay_until_zero_grad_as_in_torch():
    modules = {"ffn.0": nn.Linear(4, 4)}
    twin = copy.deepcopy(modules["ffn.0"])
    make_optimizer = OPTIMIZERS["sgd"]
    with ExpertsServer(modules, optimizer=make_optimizer) as server, connect(server.address) as experts:
        optimizer, local_optimizer = RemoteOptimizer(experts), make_optimizer(twin.parameters())
        x = torch.randn(5, 4)
        experts["ffn.0"](x).square().sum().backward()
        twin(x).square().sum().backward()
        for _ in range(2):
            optimizer.step()
            local_optimizer.step()
        optimizer.zero_grad()
        local_optimizer.zero_grad()
        optimizer.step()
        local_optimizer.step()
        assert experts.info()["ffn.0"].num_updates == 2
    torch.testing.assert_close(modules["ffn.0"].state_dict(), twin.state_dict())


def test_on_backward_applies_each_backward_at_once():
    modules = {"ffn.0": nn.Linear(4, 4)}
    twin = copy.deepcopy(modules["ffn.0"])
    make_optimizer = OPTIMIZERS["sgd"]
    with (
        ExpertsServer(modules, optimizer=make_optimizer, update="on_backward") as server,
        connect(server.address) as experts,
    ):
        assert experts["ffn.0"].hosted.update == "on_backward"
        local_optimizer = make_optimizer(twin.parameters())
        for x in torch.randn(3, 5, 4):
            experts["ffn.0"](x).square().sum().backward()
            local_optimizer.zero_grad()
            twin(x).square().sum().backward()
            local_optimizer.step()
        assert experts.info()["ffn.0"].num_updates == 3
    torch.testing.assert_close(modules["ffn.0"].state_dict(), twin.state_dict())


@pytest.mark.parametrize("update", ["on_step", "on_backward"])
def test_an_update_goes_only_to_servers_that_gather_gradients_for_it(update):
    with (
        ExpertsServer({"ffn.0": nn.Linear(4, 4)}, optimizer=sgd, update=update) as server,
        connect(server.address) as experts,
    ):
        experts["ffn.0"](torch.ones(2, 4)).sum().backward()
        assert repr(experts.connection._updates).startswith(f"Updates({int(update == 'on_step')} experts")
        RemoteOptimizer(experts).step()
        assert experts.info()["ffn.0"].num_updates == 1


def test_step_with_a_closure_returns_its_loss():
    with (
        ExpertsServer({"ffn.0": nn.Linear(4, 4)}, optimizer=OPTIMIZERS["sgd"]) as server,
        connect(server.address) as experts,
    ):
        optimizer = RemoteOptimizer(experts)

        def closure() -> float:
            optimizer.zero_grad()
            loss = experts["ffn.0"](torch.ones(1, 4)).square().sum()
            loss.backward()
            return loss.item()

        with torch.no_grad():
            first = optimizer.step(closure)
        assert optimizer.step(closure) < first
        assert experts.info()["ffn.0"].num_updates == 2


class TestOptimizer:
    @pytest.fixture
    def server(self):
        with ExpertsServer(
            {"ffn.0": nn.Linear(4, 4), "ffn.1": nn.Linear(4, 4)}, optimizer=OPTIMIZERS["sgd"]
        ) as s:
            yield s

    def test_it_can_train_some_of_the_experts(self, server):
        with connect(server.address) as experts:
            for expert in experts.values():
                expert(torch.ones(1, 4)).sum().backward()
            RemoteOptimizer([experts["ffn.1"]]).step()
            assert [info.num_updates for info in experts.info().values()] == [0, 1]

    def test_experts_that_are_not_trained_are_left_out(self, server):
        with ExpertsServer({"fixed": nn.Linear(4, 4)}) as other, connect(server.address) as experts:
            with connect(other.address) as others:
                optimizer = RemoteOptimizer([*experts.values(), *others.values()])
                experts["ffn.0"](others["fixed"](torch.ones(1, 4))).sum().backward()
            optimizer.step()
            assert server.num_updates == {"ffn.0": 1, "ffn.1": 0}
            assert repr(optimizer).startswith("RemoteOptimizer(ffn.0, ffn.1 at ")

    def test_local_modules_are_refused(self):
        with pytest.raises(TypeError, match="expected remote experts, got Linear"):
            RemoteOptimizer([nn.Linear(2, 2)])

    def test_names_are_refused_with_what_to_pass(self, server):
        words = r"the name 'ffn\.0'.* itself"
        with connect(server.address) as experts:
            with pytest.raises(TypeError, match=f"RemoteOptimizer: expected remote experts, got {words}"):
                RemoteOptimizer(list(experts))
            with pytest.raises(
                TypeError, match=f"MixtureOfExperts: expected every expert to be.* got {words}"
            ):
                MixtureOfExperts(TopKRouter(4, 2, top_k=1), list(experts))

    def test_a_list_of_connections_is_refused_with_what_to_pass(self, server):
        words = r"got RemoteExperts\. Of several connections pass the experts: \[\*a\.values\(\), "
        with connect(server.address) as experts, pytest.raises(TypeError, match=words):
            RemoteOptimizer([experts])

    def test_one_expert_alone_is_no_list(self, server):
        words = r"expected several remote experts, got one RemoteExpert\."
        with connect(server.address) as experts, pytest.raises(TypeError, match=words):
            RemoteOptimizer(experts["ffn.1"])

    def test_nothing_to_train_is_refused(self):
        with (
            ExpertsServer({"ffn.0": nn.Linear(4, 4)}) as server,
            connect(server.address) as experts,
            pytest.raises(ValueError, match="expected at least one trained expert, got none among 1"),
        ):
            RemoteOptimizer(experts)

    def test_zeros_are_not_kept(self, server):
        with connect(server.address) as experts, pytest.raises(ValueError, match="set_to_none=True"):
            RemoteOptimizer(experts).zero_grad(set_to_none=False)

    def test_who_wants_weights_or_gradients_of_it_is_told_where_they_are(self, server):
        """As a `GradScaler` does, to divide gradients by its scale."""
        scaler = torch.amp.GradScaler("cpu")
        with connect(server.address) as experts:
            scaler.scale(experts["ffn.0"](torch.ones(1, 4)).sum()).backward()
            with pytest.raises(AttributeError, match=r"Weights, gradients and the .* are on the servers"):
                scaler.step(RemoteOptimizer(experts))

    @pytest.mark.parametrize("name", ["state_dict", "load_state_dict", "state", "add_param_group"])
    def test_who_wants_more_of_an_optimizer_is_told_where_it_is(self, server, name):
        with connect(server.address) as experts:
            optimizer = RemoteOptimizer(experts)
            with pytest.raises(
                AttributeError, match=rf"got `{name}`.* on the servers, which save them in ch"
            ):
                getattr(optimizer, name)
            with pytest.raises(AttributeError, match="'RemoteOptimizer' object has no attribute 'stpe'"):
                optimizer.stpe()
            assert repr(copy.deepcopy(optimizer)) == repr(optimizer)


def test_a_step_is_asked_for_until_the_deadline_and_made_once(monkeypatch):
    held, asked = Held("forward"), threading.Semaphore(0)

    def counted(*args):
        asked.release()
        return ask(*args)

    monkeypatch.setattr(updates, "ask", counted)
    short = RetryPolicy(update_attempt_s=0.2, max_retries=1, budget=1)
    held.may_go.set()
    with (
        ExpertsServer({"held": held}, optimizer=sgd) as server,
        connect(server.address) as others,
        connect(server.address, timeout_s=START_S, retry=short) as experts,
    ):
        experts["held"](torch.ones(1, 4)).sum().backward()
        held.may_go.clear()
        held.begun.clear()
        busy = threading.Thread(target=others["held"], args=(torch.ones(1, 4),))
        busy.start()
        assert held.begun.wait(START_S)
        stepping = threading.Thread(target=RemoteOptimizer(experts).step)
        stepping.start()
        assert all(asked.acquire(timeout=START_S) for _ in range(5))
        held.may_go.set()
        stepping.join(START_S)
        busy.join(START_S)
        assert server.num_updates == {"held": 1}


@pytest.mark.parametrize(
    "update", [{"update": "on_backward"}, {"update": "on_samples", "samples_per_update": 5}]
)
def test_calls_of_one_expert_update_it_in_the_order_of_a_loops_backward(update):
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
    xs = [torch.randn(3, 8, dtype=torch.float64) for _ in range(4)]
    ended = []
    for call_all in (
        parallel_apply,
        lambda modules, inputs: [m(*x) for m, x in zip(modules, inputs, strict=True)],
    ):
        hosted = copy.deepcopy(start)
        with (
            ExpertsServer({"e": hosted}, optimizer=sgd, **update) as server,
            connect(server.address) as experts,
        ):
            for _ in range(3):
                ys = call_all([experts["e"]] * len(xs), [(x,) for x in xs])
                sum(place * y.square().mean() for place, y in enumerate(ys)).backward()
        ended.append(hosted.state_dict())
    # Calls that arrive together run as one batch, which may round otherwise; another order differs
    # by 2e-3.
    torch.testing.assert_close(*ended, rtol=0, atol=1e-12)
