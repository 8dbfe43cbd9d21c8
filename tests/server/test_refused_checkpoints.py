"""A checkpoint that does not fit is refused, and so is an expert or an optimizer that none can hold."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from experts_server import ExpertsServer
from moe_autograd.errors import CheckpointError
from moe_autograd.moe.experts import FeedForwardExpert, SwiGLUExpert
from tests.support.checkpointing import D, adam, experts, served
from tests.support.servers import WireClient, tokens


@pytest.mark.parametrize(
    ("modules", "optimizer", "text"),
    [
        ({"ffn.0": FeedForwardExpert(D)}, adam, "expected the configured experts ffn.0, got ffn.0, glu.0"),
        (
            {**experts(), "new": nn.Linear(D, D)},
            adam,
            "expected the configured experts ffn.0, glu.0, new, got ffn.0",
        ),
        ({**experts(), "ffn.0": FeedForwardExpert(D, 4)}, adam, "'up.bias': '(4,) float32'"),
        ({**experts(), "glu.0": SwiGLUExpert(D, 8)}, adam, "'up.weight': '(8, 8) float32'"),
        (
            {**experts(), "ffn.0": SwiGLUExpert(D, 4)},
            adam,
            "got {'expert': 'ffn.0', 'class': 'FeedForwardExpert'",
        ),
        (experts(), lambda p: torch.optim.SGD(p, lr=1), "'optimizer': 'SGD'} as configured, got"),
    ],
    ids=[
        "other experts",
        "another expert",
        "other shapes",
        "other shapes of the last",
        "other class",
        "other optimizer",
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_with_both_sides_named(
    tmp_path: Path, modules: dict[str, nn.Module], optimizer: Any, text: str
) -> None:
    with served(tmp_path):
        pass
    given = copy.deepcopy(modules)
    for module in given.values():
        nn.init.zeros_(next(module.parameters()))
    before = copy.deepcopy([module.state_dict() for module in given.values()])
    with pytest.raises(CheckpointError) as refused:
        served(tmp_path, given, optimizer).start()
    assert text in str(refused.value)
    torch.testing.assert_close([module.state_dict() for module in given.values()], before, rtol=0, atol=0)
    with served(tmp_path):
        pass  # it is still there, and the folder is free again


def test_a_checkpoint_of_other_trained_parameters_is_refused(tmp_path: Path) -> None:
    """The optimizer's state goes by their places: it would be given to others."""
    with served(tmp_path):
        pass
    modules = experts()
    modules["ffn.0"].get_parameter("up.weight").requires_grad_(False)
    with pytest.raises(CheckpointError) as refused:
        served(tmp_path, modules).start()
    assert "expected 3 trained parameters as configured, got 4 (differing: 0 up.weight)" in str(refused.value)


def test_a_checkpoint_of_the_same_trained_parameters_in_another_order_is_refused(tmp_path: Path) -> None:
    """The error said that none of them differed."""
    with served(tmp_path):
        pass
    with pytest.raises(CheckpointError) as refused:
        served(tmp_path, optimizer=lambda parameters: adam([*parameters][::-1])).start()
    names = ", ".join(f"0 {name}" for name, _ in experts()["ffn.0"].named_parameters())
    said = f"expected 4 trained parameters as configured, got 4 (in another order: {names}). Configure"
    assert said in str(refused.value)


def net_of(python_module: str) -> nn.Module:
    """Return an expert of the class `Net` of a file of this name."""
    return type("Net", (nn.Linear,), {"__module__": python_module})(D, D)


@pytest.mark.parametrize(
    ("before", "now", "is_told"),
    [("old", "new", True), ("old", "old", False), ("__main__", "new", False), ("old", "__main__", False)],
)
def test_a_class_of_the_same_name_from_another_file_is_loaded_and_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, before: str, now: str, is_told: bool
) -> None:
    """It may compute something else; or the file was renamed."""
    with served(tmp_path, {name: net_of(before) for name in ("a", "b")}):
        pass
    for told in ([f"expected {now}.Net as configured, got {before}.Net (experts a, b)"] * is_told, []):
        caplog.clear()
        modules = {name: net_of(now) for name in ("a", "b")}
        with served(tmp_path, modules):
            pass
        warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(warnings) == len(told)
        assert all(text in warning for text, warning in zip(told, warnings, strict=True))


class WithSecrets(nn.Linear):
    """Has state that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}

    def set_extra_state(self, state: dict[str, int]) -> None: ...


def with_sparse_buffer() -> nn.Module:
    module = nn.Linear(D, D)
    module.register_buffer("kept", torch.eye(D).to_sparse())
    return module


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (WithSecrets(D, D), "expert 'e', '_extra_state' of its state_dict: expected a tensor, got dict"),
        (nn.Linear(D, D, dtype=torch.complex128), "expected tensors that safetensors can hold, got one that it cannot"),
        (with_sparse_buffer(), "'weights.kept': expected a tensor that can be copied to the CPU as it is, got"),
    ],
    ids=["extra state", "dtype", "sparse"],
)  # fmt: skip
def test_an_expert_that_no_checkpoint_can_hold_is_refused_at_the_start(
    tmp_path: Path, module: nn.Module, text: str
) -> None:
    with pytest.raises(CheckpointError) as refused:
        served(tmp_path, {"e": module}).start()
    assert text in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


class Quantizing(torch.optim.SGD):
    """Keeps state in tensors that are made of others, as optimizers with 8 bits do."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["kept"] = TwoTensor(parameter.grad.clone(), parameter.grad.clone())
        super().step()


class Slowing(torch.optim.SGD):
    """Changes its rates, a tensor for all weights, as it likes."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.param_groups[0]["rates"] = torch.ones(2)

    def step(self, closure: Any = None) -> None:
        super().step()
        self.param_groups[0]["rates"] = self.param_groups[0]["rates"] / 2


def test_a_setting_that_has_changed_and_is_no_plain_value_is_refused_by_name(tmp_path: Path) -> None:
    config = {"checkpoint_dir": str(tmp_path)}
    server = ExpertsServer({"e": nn.Linear(D, D)}, optimizer=Slowing, config=config).start()
    with WireClient(server.address) as client:
        client.forward("e", tokens(2, D))
        client.backward("e", torch.ones(2, D))
        client.step()
    said = r"expert 'e', optimizer, group 'rates': expected a value that JSON gives back, got Tensor\."
    with pytest.raises(CheckpointError, match=said):
        server.stop()


def test_optimizer_state_that_no_checkpoint_can_hold_is_refused_by_name(tmp_path: Path) -> None:
    config = {"checkpoint_dir": str(tmp_path)}
    server = ExpertsServer({"e": nn.Linear(D, D)}, optimizer=Quantizing, config=config).start()
    with WireClient(server.address) as client:
        client.forward("e", tokens(2, D))
        client.backward("e", torch.ones(2, D))
        client.step()
    with pytest.raises(CheckpointError, match=r"expert 'e', optimizer, state 'kept': .* got TwoTensor"):
        server.stop()
