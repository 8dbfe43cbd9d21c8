"""Hosted modules with versions (`_version` of torch): their weights, fetched and set from here, stay what they are."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from experts_server import ExpertsServer
from moe_autograd.errors import ExpertFailedError
from moe_autograd.remote import connect
from tests.support.versioned import Refusing, Second, expert_of


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("kind", [Second, Refusing])
def test_what_was_fetched_is_set_as_it_is(kind):
    """It was migrated, as if it were of before there were versions."""
    module = expert_of(kind)
    weights = copy.deepcopy(module.state_dict())
    with ExpertsServer({"e": module}) as server, connect(server.address) as experts:
        model = nn.Sequential(experts["e"])
        for holder in (experts, experts["e"], model):
            holder.load_state_dict(holder.state_dict())
            assert same(module.state_dict(), weights)
            holder.load_state_dict(dict(holder.state_dict()))  # without versions: those of the server's class
            assert same(module.state_dict(), weights)


class Choosy(Second):
    """Takes no large bias, which it sees when it has taken the rest."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_load_state_dict_post_hook(self._look)

    def _look(self, *_):
        if self.bias.max() > 1:
            raise ValueError("too large")


def test_what_was_there_before_a_refused_state_is_there_as_it_was():
    module = expert_of(Choosy)
    weights = copy.deepcopy(module.state_dict())
    with ExpertsServer({"e": module}) as server, connect(server.address) as experts:
        with pytest.raises(ExpertFailedError, match="too large"):
            experts.load_state_dict({key: value + 2 for key, value in experts.state_dict().items()})
        assert same(module.state_dict(), weights)
