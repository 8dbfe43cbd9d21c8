"""What the server computes is what the module computes here: outputs, gradients, updates."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from moe_autograd.moe.experts import FeedForwardExpert, SwiGLUExpert
from tests.support.hosting import ShowsItsMask
from tests.support.servers import WireClient, tokens

D = 16
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


def module() -> nn.Module:
    torch.manual_seed(0)
    return FeedForwardExpert(D)


@pytest.fixture
def client() -> Iterator[WireClient]:
    with (
        ExpertsServer({"ffn.0": module()}, optimizer=OPTIMIZERS["sgd"]) as server,
        WireClient(server.address) as client,
    ):
        yield client


def local_pass(module: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    output = module(leaf)
    output.backward(grad)
    assert leaf.grad is not None
    return output.detach(), leaf.grad


def test_output_and_input_gradient_are_those_of_the_module(client: WireClient) -> None:
    x, grad = tokens(5, D), tokens(5, D, seed=1)
    expected_output, expected_grad = local_pass(module(), x, grad)
    forward = client.forward("ffn.0", x)
    backward = client.backward("ffn.0", grad)
    assert (forward.code, backward.code) == ("OK", "OK"), forward.text + backward.text
    torch.testing.assert_close(forward.tensors, (expected_output,))
    torch.testing.assert_close(backward.tensors, (expected_grad,))


def test_experts_of_a_module_dict_are_hosted_under_its_keys() -> None:
    experts = nn.ModuleDict({"wide": nn.Linear(D, 32), "narrow": nn.Linear(D, 4)})
    with ExpertsServer(experts) as server, WireClient(server.address) as client:
        for name, module in experts.items():
            forward = client.forward(name, tokens(3, D))
            torch.testing.assert_close(forward.tensors, (module(tokens(3, D)),))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_twenty_steps_end_in_the_weights_that_plain_training_ends_in(name: str) -> None:
    hosted = [module(), SwiGLUExpert(D, 32)]
    local = copy.deepcopy(hosted)
    optimizers = [OPTIMIZERS[name](m.parameters()) for m in local]
    experts = {f"e.{i}": m for i, m in enumerate(hosted)}
    with ExpertsServer(experts, optimizer=OPTIMIZERS[name]) as server, WireClient(server.address) as client:
        for step in range(20):
            for index, optimizer in enumerate(optimizers):
                optimizer.zero_grad()
                for part in range(2):  # two backwards gather before one step
                    x, grad = tokens(7, D, seed=step), 0.1 * tokens(7, D, seed=100 + part)
                    local_pass(local[index], x, grad)
                    assert client.forward(f"e.{index}", x, call_id=part).code == "OK"
                    assert client.backward(f"e.{index}", grad, call_id=part).text == ""
                optimizer.step()
            assert [u.num_updates for u in client.step().updates] == [step + 1] * 2
            client.zero_grad()
    for there, here in zip(hosted, local, strict=True):
        torch.testing.assert_close(there.state_dict(), here.state_dict(), rtol=1e-4, atol=1e-6)


def test_a_step_without_zero_grad_applies_the_gathered_gradients_again_as_torch_does() -> None:
    hosted = module()
    local = copy.deepcopy(hosted)
    optimizer = OPTIMIZERS["adam"](local.parameters())
    with (
        ExpertsServer({"e": hosted}, optimizer=OPTIMIZERS["adam"]) as server,
        WireClient(server.address) as client,
    ):
        for seed in range(3):
            x, grad = tokens(4, D, seed=seed), tokens(4, D, seed=9)
            local_pass(local, x, grad)
            optimizer.step()
            client.forward("e", x)
            client.backward("e", grad)
            client.step()
    torch.testing.assert_close(hosted.state_dict(), local.state_dict(), rtol=1e-4, atol=1e-6)


def test_a_step_of_a_client_that_gave_no_gradients_makes_no_update(client: WireClient) -> None:
    before = client.get_state()
    assert [u.num_updates for u in client.step().updates] == [0]
    torch.testing.assert_close(client.get_state(), before, rtol=0, atol=0)


def test_on_backward_applies_each_backward_at_once() -> None:
    hosted = module()
    local = copy.deepcopy(hosted)
    optimizer = OPTIMIZERS["sgd"](local.parameters())
    with (
        ExpertsServer({"e": hosted}, optimizer=OPTIMIZERS["sgd"], update="on_backward") as server,
        WireClient(server.address) as client,
    ):
        for seed in range(5):
            x, grad = tokens(4, D, seed=seed), tokens(4, D, seed=9)
            optimizer.zero_grad()
            local_pass(local, x, grad)
            optimizer.step()
            client.forward("e", x)
            client.backward("e", grad)
            assert client.num_updates() == {"e": seed + 1}
    torch.testing.assert_close(hosted.state_dict(), local.state_dict(), rtol=1e-4, atol=1e-6)


def test_without_an_optimizer_input_gradients_flow_and_no_weight_changes() -> None:
    hosted = module()
    before = copy.deepcopy(hosted.state_dict())
    x, grad = tokens(5, D), tokens(5, D, seed=1)
    _, expected = local_pass(module(), x, grad)
    with ExpertsServer({"e": hosted}) as server, WireClient(server.address) as client:
        client.forward("e", x)
        torch.testing.assert_close(client.backward("e", grad).tensors, (expected,))
        assert list(client.step().updates) == []
    torch.testing.assert_close(hosted.state_dict(), before, rtol=0, atol=0)


def test_two_clients_gather_apart_and_each_step_is_one_update(client: WireClient) -> None:
    other = WireClient(client.address, client_id=b"other")
    reference = module()
    optimizer = OPTIMIZERS["sgd"](reference.parameters())
    x, grads = tokens(5, D), [tokens(5, D, seed=seed) for seed in (1, 2)]
    for one, grad in zip((client, other), grads, strict=True):
        one.forward("ffn.0", x)
        one.backward("ffn.0", grad)
    initial = [local_gradients(reference, x, grad) for grad in grads]
    for number, (one, gradients) in enumerate(zip((client, other), initial, strict=True), start=1):
        assert [u.num_updates for u in one.step().updates] == [number]
        for parameter, gradient in zip(reference.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    torch.testing.assert_close(client.get_state()["ffn.0"], reference.state_dict())
    other.channel.close()


def local_gradients(module: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(module(x), list(module.parameters()), grad)


def test_a_backward_without_weight_gradients_gathers_nothing(client: WireClient) -> None:
    client.forward("ffn.0", tokens(5, D))
    assert client.backward("ffn.0", tokens(5, D), wants_weight_grads=False).code == "OK"
    assert [u.num_updates for u in client.step().updates] == [0]


def test_a_forward_that_keeps_no_graph_has_no_backward_without_inputs(client: WireClient) -> None:
    x = tokens(5, D)
    client.forward("ffn.0", x, keep_graph=False)
    assert client.backward("ffn.0", tokens(5, D)).code == "INPUTS_NEEDED"
    again = client.backward("ffn.0", tokens(5, D), inputs=[x])
    _, expected = local_pass(module(), x, tokens(5, D))
    torch.testing.assert_close(again.tensors, (expected,))


@pytest.mark.parametrize("way", ["step", "set"])
def test_a_backward_after_an_update_computes_with_the_weights_of_now(client: WireClient, way: str) -> None:
    x, grad = tokens(5, D), tokens(5, D, seed=1)
    client.forward("ffn.0", x, call_id=1)
    client.forward("ffn.0", x, call_id=2)
    client.backward("ffn.0", grad, call_id=1)
    if way == "step":
        client.step()
    else:
        client.set_state({"ffn.0": {key: 2 * value for key, value in module().state_dict().items()}})
    now = module()
    now.load_state_dict(client.get_state()["ffn.0"])
    _, expected = local_pass(now, x, grad)
    torch.testing.assert_close(client.backward("ffn.0", grad, call_id=2).tensors, (expected,))


def test_a_kept_graph_serves_a_second_backward_and_an_unkept_one_does_not(client: WireClient) -> None:
    client.forward("ffn.0", tokens(5, D))
    first = client.backward("ffn.0", tokens(5, D), keep_graph=True)
    second = client.backward("ffn.0", tokens(5, D))
    torch.testing.assert_close(first.tensors, second.tensors)
    assert client.backward("ffn.0", tokens(5, D)).code == "INPUTS_NEEDED"


def test_an_empty_batch_gives_an_empty_result_and_zero_gradients(client: WireClient) -> None:
    forward = client.forward("ffn.0", tokens(0, D))
    backward = client.backward("ffn.0", tokens(0, D))
    assert forward.tensors[0].shape == backward.tensors[0].shape == (0, D)
    before = client.get_state()
    assert [u.num_updates for u in client.step().updates] == [1]
    torch.testing.assert_close(client.get_state(), before, rtol=0, atol=0)


def test_an_evaluating_call_draws_no_dropout_and_a_training_one_repeats_its_mask_in_the_backward() -> None:
    with ExpertsServer({"e": ShowsItsMask(D)}) as server, WireClient(server.address) as client:
        x, ones = torch.ones(50, D), torch.ones(50, D)
        assert torch.equal(client.forward("e", x, evaluate=True).tensors[0], x)
        dropped = client.forward("e", x, call_id=2).tensors[0]
        assert 0 < int((dropped == 0).sum()) < dropped.numel()
        mask = client.backward("e", ones, call_id=2).tensors[0]
        torch.testing.assert_close(mask, dropped)


def test_a_module_that_returns_a_tuple_comes_back_as_a_tuple() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return x + y, x * y

    with ExpertsServer({"e": Two()}) as server, WireClient(server.address) as client:
        x, y = tokens(3, D), tokens(3, D, seed=1)
        forward = client.forward("e", x, y)
        assert forward.result.is_sequence
        torch.testing.assert_close(forward.tensors, (x + y, x * y))
        backward = client.backward("e", torch.ones(3, D), None, wants_input_grads=[False, True])
        assert backward.tensors[0] is None
        torch.testing.assert_close(backward.tensors[1], torch.ones(3, D))


def test_state_is_fetched_and_set_whole_and_a_wrong_one_changes_nothing(client: WireClient) -> None:
    state = client.get_state("ffn.0")
    torch.testing.assert_close(state["ffn.0"], module().state_dict())
    wanted = {key: value + 1 for key, value in state["ffn.0"].items()}
    client.set_state({"ffn.0": wanted})
    torch.testing.assert_close(client.get_state()["ffn.0"], wanted)
