"""An expert that does not load what it saves is known at the first start, or else when it is saved."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_autograd.errors import CheckpointError
from tests.support.checkpointing import D, adam, served
from tests.support.servers import WireClient, tokens


class Expanded(nn.Linear):
    """One row in memory, seen four times: it can be read, and not be written."""

    def __init__(self) -> None:
        super().__init__(D, D)
        self.register_buffer("scale", torch.ones(D).expand(4, D))


class OneWay(nn.Linear):
    """Saves an entry that it does not know when it loads, as layers of quantized weights do."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}quantized"] = torch.zeros(2)


class Closed(torch.optim.SGD):
    """Cannot be loaded."""

    def load_state_dict(self, state_dict: Any) -> None:
        raise NotImplementedError("not yet")


def closed(parameters: Any) -> torch.optim.Optimizer:
    return Closed(parameters, lr=0.1)


@pytest.mark.parametrize(
    ("module", "optimizer", "text"),
    [
        (Expanded(), adam, 'While copying the parameter named "scale"'),
        (OneWay(D, D), adam, 'Unexpected key(s) in state_dict: "quantized"'),
        (nn.Linear(D, D), closed, "got NotImplementedError: not yet. Host it without checkpoint_dir."),
    ],
    ids=["expanded", "another key", "optimizer"],
)
def test_an_expert_that_does_not_load_what_it_saves_is_refused_at_the_first_start(
    tmp_path: Path, module: nn.Module, optimizer: Any, text: str
) -> None:
    """The second start ended in a traceback, and what had been learned could not be had."""
    with pytest.raises(CheckpointError, match="checkpoint of expert 'e': expected a module") as refused:
        served(tmp_path, {"e": module}, optimizer).start()
    assert text in str(refused.value)
    assert "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


class WithStateOfItsOwn(torch.optim.SGD):
    """Keeps what it counts beside the state of the parameters."""

    def step(self, closure: Any = None) -> None:
        super().step()
        self.state["own"] = {"num_steps": 1}


def test_state_that_is_of_no_parameter_is_refused_by_name_when_it_is_saved(tmp_path: Path) -> None:
    """It was written, and the next start could not read it."""
    server = served(tmp_path, {"e": nn.Linear(D, D)}, lambda p: WithStateOfItsOwn(p, lr=0.1)).start()
    with WireClient(server.address) as client:
        client.forward("e", tokens(2, D))
        client.backward("e", torch.ones(2, D))
        client.step()
    with pytest.raises(CheckpointError, match="state 'own': expected state of parameters alone, got dict"):
        server.stop()


class Filled(nn.Linear):
    """Has one more entry after its first forward."""

    mean: Tensor | None

    def __init__(self) -> None:
        super().__init__(D, D)
        self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = x.detach().mean(0)
        return super().forward(x - self.mean)


def test_an_expert_that_comes_to_other_entries_is_told_of_at_each_save_and_at_the_next_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with served(tmp_path, {"e": Filled()}) as server, WireClient(server.address) as client:
        client.save()
        assert not caplog.records
        client.forward("e", tokens(5, D))
        with caplog.at_level(logging.ERROR):
            client.save()
        assert (
            "expert 'e': its state_dict is not the one that it was built with (differing: mean)"
            in caplog.text
        )
    with pytest.raises(
        CheckpointError, match=r"weights {'mean': None} .* have its class make all entries when"
    ):
        served(tmp_path, {"e": Filled()}).start()
