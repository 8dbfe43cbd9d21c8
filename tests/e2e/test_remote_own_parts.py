"""What is registered here on a remote expert: it is trained, saved and loaded here, beside what is hosted."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from moe_autograd.remote import connect

D = 4


def dressed(expert: nn.Module) -> nn.Sequential:
    """Return a model of an expert with a scale, a buffer and an adapter, which a hook of its forward uses."""
    expert.scale = nn.Parameter(torch.full((D,), 2.0))
    expert.register_buffer("num_seen", torch.zeros(D))
    expert.adapter = nn.Linear(D, D, bias=False)

    def adapt(module: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        module.num_seen += 1
        adapted: Tensor = output * module.scale + module.adapter(inputs[0])
        return adapted

    expert.register_forward_hook(adapt)
    return nn.Sequential(nn.Linear(D, D), expert)


@pytest.fixture
def hosted() -> Iterator[tuple[nn.Module, str]]:
    module = nn.Linear(D, D)
    with ExpertsServer({"e": copy.deepcopy(module)}) as server:
        yield module, server.address


def test_a_model_with_them_is_saved_and_restored_as_one(hosted):
    module, address = hosted
    with connect(address) as experts, connect(address) as others:
        model = dressed(experts["e"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(5, D)).square().mean().backward()
            optimizer.step()
        saved, twin, other = model.state_dict(), dressed(copy.deepcopy(module)), dressed(others["e"])
        assert saved.keys() == twin.state_dict().keys()
        twin.load_state_dict(saved)
        other.load_state_dict(saved)
        x = torch.randn(5, D)
        expected = model(x)
        torch.testing.assert_close(twin(x), expected)
        torch.testing.assert_close(other(x), expected, rtol=0, atol=0)
        with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "1.scale"'):
            other.load_state_dict({key: saved[key] for key in saved if key != "1.scale"})
        with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "1.other"'):
            other.load_state_dict({**saved, "1.other": x})


def test_hooks_of_loading_may_rename_what_is_hosted(hosted):
    _, address = hosted

    def rename(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for key in [key for key in state if key.startswith(f"{prefix}old_")]:
            state[key.replace("old_", "")] = state.pop(key)

    with connect(address) as experts:
        experts["e"].register_load_state_dict_pre_hook(rename)
        model, wanted = nn.Sequential(experts["e"]), nn.Linear(D, D)
        model.load_state_dict({f"0.old_{key}": tensor for key, tensor in wanted.state_dict().items()})
        x = torch.randn(5, D)
        torch.testing.assert_close(model(x), wanted(x))


@pytest.mark.parametrize("part", [nn.Parameter(torch.zeros(D)), nn.Linear(D, D)], ids=["parameter", "module"])
def test_a_name_that_is_hosted_is_refused_before_anything_is_set(hosted, part):
    _, address = hosted
    with connect(address) as experts:
        saved = experts["e"].state_dict()
        experts["e"].weight = part
        for use in (experts["e"].state_dict, lambda: experts["e"].load_state_dict(saved)):
            with pytest.raises(RuntimeError, match="names of its own, got weight, which is hosted, too"):
                use()


def test_freezing_an_expert_freezes_them_too(hosted):
    _, address = hosted
    with connect(address) as experts:
        model = dressed(experts["e"])
        experts["e"].requires_grad_(False)
        assert [name for name, one in model.named_parameters() if one.requires_grad] == ["0.weight", "0.bias"]
        experts["e"].requires_grad_()
        assert all(one.requires_grad for one in model.parameters())
