"""Experts that would rather be called together are called one by one where something of a user's sees their calls."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from moe_autograd import MixtureOfExperts, TopKRouter, parallel_apply
from moe_autograd.autograd.offload import OffloadedExperts
from moe_autograd.remote import connect
from tests.support.hosting import make_modules, sgd

NUM_EXPERTS = 3


@contextlib.contextmanager
def offloaded() -> Iterator[list[nn.Module]]:
    with OffloadedExperts(
        make_modules(*range(NUM_EXPERTS)).values(), sgd, max_resident_bytes=10_000
    ) as experts:
        yield list(experts)


@contextlib.contextmanager
def remote() -> Iterator[list[nn.Module]]:
    hosted = make_modules(*range(NUM_EXPERTS))
    with ExpertsServer(hosted, optimizer=sgd) as server, connect(server.address) as experts:
        yield list(experts.values())


KINDS = pytest.mark.parametrize("kind", [offloaded, remote])
Kind = Callable[[], contextlib.AbstractContextManager[list[nn.Module]]]


def hooked(experts: list[nn.Module]) -> list[str]:
    """Hook the second expert, and return what the hooks say."""
    log: list[str] = []
    experts[1].register_forward_pre_hook(lambda m, args: (log.append("before"), (args[0] + 1,))[1])
    experts[1].register_forward_hook(lambda m, args, y: (log.append("after"), y * 100)[1])
    experts[1].register_full_backward_hook(lambda m, ins, outs: (log.append("backward"), (ins[0] * 5,))[1])
    return log


@KINDS
@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"defer_weight_grads": True}], ids=str)
def test_hooks_on_an_expert_run_in_a_map_as_in_a_plain_loop(kind: Kind, options: dict[str, Any]) -> None:
    def gradients(call: Callable[..., list[Tensor]]) -> list[Tensor]:
        x = torch.ones(2, 4, requires_grad=True)
        ys = call(experts, [(x,)] * NUM_EXPERTS)
        torch.stack(list(ys)).square().sum().backward()
        assert x.grad is not None
        return [*[y.detach() for y in ys], x.grad]

    with kind() as experts:
        log = hooked(experts)
        plain = gradients(lambda modules, inputs: [m(*x) for m, x in zip(modules, inputs, strict=True)])
        assert log == ["before", "after", "backward"]
        mapped = gradients(lambda modules, inputs: parallel_apply(modules, inputs, **options))
        assert set(log[3:]) == {"before", "after", "backward"}
    torch.testing.assert_close(mapped, plain)


@KINDS
@pytest.mark.parametrize("options", [{}, {"on_failure": "drop"}], ids=str)
def test_hooks_on_an_expert_run_in_a_layer(kind: Kind, options: dict[str, Any]) -> None:
    with kind() as experts:
        layer = MixtureOfExperts(TopKRouter(4, NUM_EXPERTS, top_k=NUM_EXPERTS), experts, **options)
        log = hooked(experts)
        layer(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert log == ["before", "after", "backward"]


@KINDS
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
def test_an_expert_whose_forward_was_replaced_and_one_that_was_compiled(kind: Kind) -> None:
    x = torch.ones(2, 4)
    with kind() as experts:
        plain = [expert(x).detach() for expert in experts]
        forward = experts[1].forward
        experts[1].forward = lambda x: 100 * forward(x)  # type: ignore[assignment]
        others = [experts[0], experts[1], torch.compile(experts[2], backend="eager")]
        ys = parallel_apply(others, [(x,)] * NUM_EXPERTS)
    torch.testing.assert_close([y.detach() for y in ys], [plain[0], 100 * plain[1], plain[2]])


@KINDS
@pytest.mark.parametrize("where", ["derived", "torch's", "_call_impl", "of one"])
def test_what_calls_modules_in_place_of_torchs_own_calls_experts_too(
    kind: Kind, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those alone and local modules were called by it, and not those of a map or layer."""
    call, implementation = nn.Module.__call__, nn.Module._call_impl

    def times_three(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(self, *args, **kwargs) * (3 if self is experts[1] else 1)

    def implemented(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return implementation(self, *args, **kwargs) * (3 if self is experts[1] else 1)

    x = torch.ones(2, 4)
    with kind() as experts:
        plain = [expert(x).detach() for expert in experts]
        if where == "derived":
            derived = type("Derived", (type(experts[1]),), {"__call__": times_three})
            experts[1].__class__ = derived
        elif where == "of one":
            monkeypatch.setattr(experts[1], "_call_impl", functools.partial(implemented, experts[1]))
        elif where == "_call_impl":
            monkeypatch.setattr(nn.Module, "_call_impl", implemented)
        else:
            monkeypatch.setattr(nn.Module, "__call__", times_three)
        alone = [expert(x).detach() for expert in experts]
        ys = parallel_apply(experts, [(x,)] * NUM_EXPERTS)
    torch.testing.assert_close(alone, [plain[0], 3 * plain[1], plain[2]])
    torch.testing.assert_close([y.detach() for y in ys], alone)
