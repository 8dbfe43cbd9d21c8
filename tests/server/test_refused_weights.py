"""Weights that a module does not take, though they fit, change nothing: all of them are set or none."""

from __future__ import annotations

from pathlib import Path

import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import Tensor, nn

from experts_server import ExpertsServer
from experts_server.command.cli import main
from tests.support.checkpointing import D, adam
from tests.support.servers import WireClient, tokens


class Expanded(nn.Linear):
    """Has one entry that cannot be written, as several of its elements are one in memory."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__(D, D)
        self.register_buffer("scale", torch.ones(D).expand(4, D))
        self.squared = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x) * self.scale[0] * self.squared.square()
        return y


class Choosy(nn.Linear):
    """Looks at what it is given, when it has it."""

    def __init__(self) -> None:
        super().__init__(D, D)
        self.register_load_state_dict_post_hook(self._look)

    def _look(self, *_: object) -> None:
        if self.bias.max() > 1:
            raise ValueError("too large")


def moved(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value + 2 for key, value in state.items()}


def test_a_state_that_a_module_refuses_leaves_all_as_it_was() -> None:
    experts = {"expanded": Expanded(), "choosy": Choosy()}
    with ExpertsServer(experts, optimizer=adam) as server, WireClient(server.address) as client:
        for name, text in [("expanded", 'named "scale"'), ("choosy", "got ValueError: too large. It has")]:
            before = client.get_state(name)
            # It counts as nothing, so it is refused again and not answered from the ledger.
            for _ in range(2):
                (update,) = client.set_state({name: moved(before[name])}, sequence=7).updates
                assert update.status.message.startswith(
                    f"state of expert {name!r}: expected a module that takes"
                )
                assert text in update.status.message
                assert "\n" not in update.status.message
            torch.testing.assert_close(client.get_state(name), before, rtol=0, atol=0)


def test_backwards_of_forwards_before_a_refused_state_are_of_the_weights_that_are_there() -> None:
    expert, x = Expanded(), tokens(5, D).requires_grad_()
    expert(x).backward(tokens(5, D, seed=1))
    with ExpertsServer({"e": expert}, optimizer=adam) as server, WireClient(server.address) as client:
        client.forward("e", x.detach())
        assert client.set_state({"e": moved(client.get_state()["e"])}).updates[0].status.code != 0
        answer = client.backward("e", tokens(5, D, seed=1))
        assert answer.code == "OK", answer.text
        torch.testing.assert_close(answer.tensors[0], x.grad)


def test_an_import_that_is_refused_changes_nothing(tmp_path: Path) -> None:
    with ExpertsServer({"e": Expanded()}) as server, WireClient(server.address) as client:
        before = client.get_state()
        file = tmp_path / "e.safetensors"
        save_file(moved(before["e"]), file)
        result = CliRunner().invoke(main, ["import", server.address, "e", str(file)])
        assert result.exit_code == 1
        assert "It has those from before." in result.stderr
        torch.testing.assert_close(client.get_state(), before, rtol=0, atol=0)
