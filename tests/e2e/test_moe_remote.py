"""One layer, experts anywhere: on a server, here, or some of each, it computes the same."""

from __future__ import annotations

import copy
import re
import urllib.request
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from experts_server.configuration.config import LimitsConfig, ServingConfig
from moe_autograd.moe.experts import FeedForwardExpert
from moe_autograd.moe.layer import MixtureOfExperts
from moe_autograd.moe.routers import TopKRouter
from moe_autograd.remote import RemoteExperts, RemoteOptimizer, connect
from moe_autograd.remote.channel import Channel
from moe_autograd.timeline import record_timeline

D_MODEL, NUM_EXPERTS = 8, 6


def make_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


@dataclass(frozen=True)
class Hosted:
    server: ExpertsServer
    experts: RemoteExperts
    local: MixtureOfExperts  # the same modules and router, copied before training
    router: TopKRouter


@pytest.fixture
def hosted() -> Iterator[Hosted]:
    torch.manual_seed(0)
    modules = {f"ffn.{index}": FeedForwardExpert(D_MODEL).double() for index in range(NUM_EXPERTS)}
    router = TopKRouter(D_MODEL, NUM_EXPERTS, top_k=2).double()
    local = copy.deepcopy(MixtureOfExperts(router, modules))
    with ExpertsServer(modules, optimizer=make_sgd) as server, connect(server.address) as experts:
        yield Hosted(server, experts, local, router)


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, D_MODEL, dtype=torch.float64, requires_grad=True)


def gradients(layer: MixtureOfExperts, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = layer(x)
    of_x, of_router = torch.autograd.grad(y.square().sum(), [x, layer.router.weight])
    return y, of_x, of_router


def test_values_and_gradients_do_not_depend_on_where_the_experts_are(hosted: Hosted) -> None:
    x = tokens(3, 7)
    expected = gradients(hosted.local, x)
    torch.testing.assert_close(gradients(MixtureOfExperts(hosted.router, hosted.experts), x), expected)


def test_some_experts_may_be_here_and_some_on_a_server(hosted: Hosted) -> None:
    mixed = [hosted.local.experts[0], hosted.experts["ffn.1"], hosted.local.experts[2]]
    mixed += [hosted.experts[f"ffn.{index}"] for index in range(3, NUM_EXPERTS)]
    x = tokens(20)
    expected = gradients(hosted.local, x)
    torch.testing.assert_close(gradients(MixtureOfExperts(hosted.router, mixed), x), expected)


def test_an_expert_without_tokens_is_not_called_and_not_updated(hosted: Hosted) -> None:
    layer, optimizer = MixtureOfExperts(hosted.router, hosted.experts), RemoteOptimizer(hosted.experts)
    with record_timeline() as timeline:
        y, routing = layer(tokens(1), return_routing=True)
        y.sum().backward()
    optimizer.step()
    chosen = {f"ffn.{index}" for index in routing.expert_index.flatten().tolist()}
    assert len(chosen) == 2
    assert {span.name for span in timeline.spans} == chosen
    assert hosted.server.num_updates == {name: int(name in chosen) for name in hosted.experts}


def test_a_batch_without_tokens_needs_no_server(hosted: Hosted) -> None:
    layer = MixtureOfExperts(hosted.router, hosted.experts)
    hosted.server.stop()
    x = tokens(0)
    layer(x).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (0, D_MODEL)


def test_each_pass_reports_one_span_for_every_expert_that_was_called(hosted: Hosted) -> None:
    layer = MixtureOfExperts(hosted.router, hosted.experts)
    with record_timeline() as timeline:
        layer(tokens(64)).sum().backward()
    calls = sorted((span.name, span.phase) for span in timeline.spans)
    assert calls == sorted((name, phase) for name in hosted.experts for phase in ("forward", "backward"))
    assert all(span.start_s < span.end_s for span in timeline.spans)


def test_a_layer_with_remote_experts_is_saved_and_restored_as_one(hosted: Hosted) -> None:
    layer = MixtureOfExperts(hosted.router, hosted.experts)
    assert [name for name, _ in layer.named_parameters()] == ["router.weight"], "the others are not here"
    torch.testing.assert_close(dict(layer.state_dict()), dict(hosted.local.state_dict()), rtol=0, atol=0)

    x, other = tokens(20), copy.deepcopy(hosted.local)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    layer.load_state_dict(other.state_dict())
    torch.testing.assert_close(layer(x), other(x))


def test_an_expert_that_cannot_compute_is_named_by_the_error(hosted: Hosted) -> None:
    layer = MixtureOfExperts(hosted.router.float(), hosted.experts)
    with pytest.raises(ValueError, match=r"expert 'ffn\.\d'.*expected") as caught:
        layer(torch.randn(5, D_MODEL))
    assert hosted.server.address in str(caught.value)
    assert re.fullmatch(
        r"parallel_apply, forward: raised by call 0 \((\d modules called together|RemoteExpert)\) of 1\.",
        caught.value.__notes__[0],
    )


def test_a_step_of_a_layer_is_one_request_a_pass_and_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many experts and tokens: updates made by the backward need no request of their own."""
    made: list[str] = []

    def counted(method: Any) -> Any:
        def call(channel: Channel, rpc: str, *args: Any, **kwargs: Any) -> Any:
            made.append(rpc)
            return method(channel, rpc, *args, **kwargs)

        return call

    for name in ("stream", "tell"):
        monkeypatch.setattr(Channel, name, counted(getattr(Channel, name)))
    modules = {f"ffn.{index}": FeedForwardExpert(D_MODEL).double() for index in range(NUM_EXPERTS)}
    with (
        ExpertsServer(modules, optimizer=make_sgd, update="on_backward") as server,
        connect(server.address) as experts,
    ):
        layer = MixtureOfExperts(TopKRouter(D_MODEL, NUM_EXPERTS, top_k=2).double(), experts)
        made.clear()
        layer(tokens(3, 7)).square().sum().backward()
    assert made == ["Forward", "Backward"]


def test_a_backward_sends_gradients_alone_while_the_server_has_the_forward() -> None:
    """Without it, the gradients come a second time, and the inputs with them."""
    num_tokens, wide = 64, 256
    num_bytes = num_tokens * wide * 4
    for kept_bytes, num_times in ((1 << 30, 1), (1, 3)):
        config = ServingConfig(
            metrics_listen="127.0.0.1:0", limits=LimitsConfig(kept_forward_bytes=kept_bytes)
        )
        modules = {"wide": nn.Linear(wide, wide)}
        with (
            ExpertsServer(modules, optimizer=make_sgd, config=config) as server,
            connect(server.address) as experts,
        ):
            y = experts["wide"](torch.randn(num_tokens, wide, requires_grad=True))
            y.sum().backward()
            with urllib.request.urlopen(f"http://{server.metrics_address}/metrics", timeout=30) as reply:
                shown = reply.read().decode()
        received = re.findall(
            r'^experts_received_bytes_total\{.*"backward".*\} (\S+)$', shown, flags=re.MULTILINE
        )
        assert [float(count) for count in received] == [num_times * num_bytes]


@pytest.mark.parametrize("needs_grad", [True, False])
def test_the_graph_keeps_the_inputs_that_its_backward_needs_and_no_outputs(
    no_gc: None, needs_grad: bool
) -> None:
    with ExpertsServer({"ffn.0": nn.Linear(4, 4)}) as server, connect(server.address) as experts:
        x = torch.ones(1, 4, requires_grad=needs_grad)
        y = experts["ffn.0"](x)
        input_of, output_of = weakref.ref(x), weakref.ref(y)
        loss = y.sum()
        del x, y
        assert output_of() is None
        assert (input_of() is not None) == needs_grad
        assert loss.requires_grad == needs_grad
