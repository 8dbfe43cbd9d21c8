"""Hosted modules with versions (`_version` of torch): their weights, fetched and set from here, stay what they are."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from experts_server import ExpertsServer
from moe_autograd.errors import ExpertFailedError
from moe_autograd.remote import connect
from tests.support.versioned import D, Refusing, Second, Third, expert_of


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


def saved_and_read(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("kind", [Second, Refusing])
def test_what_was_fetched_with_a_model_is_loaded_into_its_local_twin_as_it_is(kind):
    module = expert_of(kind)
    with ExpertsServer({"e": module}) as server, connect(server.address) as experts:
        state = saved_and_read(nn.Sequential(nn.Linear(D, D), nn.Sequential(experts["e"])).state_dict())
    twin = nn.Sequential(nn.Linear(D, D), nn.Sequential(expert_of(kind, 1)))
    with_tensors = {"", "0", "1", "1.0", "1.0.within", "1.0.within.1"}
    told = {path: values for path, values in twin.state_dict()._metadata.items() if path in with_tensors}
    assert state._metadata == told
    twin.load_state_dict(state)
    assert same(twin[1][0].state_dict(), module.state_dict())


def model_of(expert):
    return nn.Sequential(nn.Linear(D, D), nn.Sequential(expert))


@pytest.mark.parametrize("holder_of", [model_of, lambda expert: expert], ids=["model", "expert"])
@pytest.mark.parametrize("is_local", [True, False], ids=["from a twin", "from a server"])
def test_a_class_whose_version_has_grown_migrates_what_was_saved_before_as_in_torch(is_local, holder_of):
    before, now, natively = expert_of(Second), expert_of(Third, 1), expert_of(Third, 1)
    natively.load_state_dict(before.state_dict())
    with ExpertsServer({"e": before}) as server, connect(server.address) as experts:
        state = saved_and_read(holder_of(before if is_local else experts["e"]).state_dict())
    with ExpertsServer({"e": now}) as server, connect(server.address) as experts:
        holder_of(experts["e"]).load_state_dict(state)
        assert same(now.state_dict(), natively.state_dict())
        assert torch.equal(now.get_parameter("within.1.bias"), -before.get_parameter("within.1.bias"))


def test_the_states_of_all_experts_of_a_connection_have_the_versions_of_each():
    before = {"a": expert_of(Second), "a.b": expert_of(Second, 1), "c": nn.BatchNorm1d(D)}
    with ExpertsServer(before) as server, connect(server.address) as experts:
        state = saved_and_read(experts.state_dict())
    assert set(state._metadata) == {"a", "a.within", "a.within.1", "a.b", "a.b.within", "a.b.within.1", "c"}
    now = {"a": expert_of(Third), "a.b": expert_of(Second), "c": nn.BatchNorm1d(D)}
    with ExpertsServer(now) as server, connect(server.address) as experts:
        experts.load_state_dict(state)
    natively = expert_of(Third)
    natively.load_state_dict(before["a"].state_dict())
    assert same(now["a"].state_dict(), natively.state_dict())
    assert same(now["a.b"].state_dict(), before["a.b"].state_dict())


class Untold(nn.Linear):
    """Has no version that travels: it is no whole number."""

    _version = "two"

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        if (version := local_metadata.get("version")) not in ("two", None):
            raise ValueError(f"expected version two, got {version}")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def test_a_version_that_does_not_travel_is_the_servers_own_and_unknown_elsewhere():
    module = expert_of(Untold)
    with ExpertsServer({"e": module}) as server, connect(server.address) as experts:
        model = nn.Sequential(experts["e"])
        model.load_state_dict(model.state_dict())
        state = model.state_dict()
    assert state._metadata == {"": {"version": 1}, "0": {}, "0.within": {"version": 1}}
    nn.Sequential(expert_of(Untold, 1)).load_state_dict(state)


def test_a_destination_without_metadata_gets_the_tensors():
    module = expert_of(Second)
    with ExpertsServer({"e": module}) as server, connect(server.address) as experts:
        state = {}
        experts["e"].state_dict(destination=state)
        assert same(state, module.state_dict())
