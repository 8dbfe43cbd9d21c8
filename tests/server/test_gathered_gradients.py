"""Gradients that wait for a step stay within their budget and time; a client whose own were let go is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from experts_server import ExpertsServer
from experts_server.budget import Budget
from experts_server.configuration.config import LimitsConfig, ServingConfig
from experts_server.hosting import gathered as gathered_module
from experts_server.hosting.calls import Expected
from experts_server.hosting.gathered import Gathered, GatheredGradients
from moe_autograd.moe.experts import FeedForwardExpert
from moe_autograd.remote import RemoteOptimizer, connect
from moe_autograd.wire import experts_pb2 as pb
from tests.support.gated import D
from tests.support.hosting import sgd
from tests.support.servers import (
    WireClient,
    tokens,
    wait_until,
)


def test_gathered_gradients_stay_within_their_budget() -> None:
    num_bytes = sum(p.nbytes for p in FeedForwardExpert(D).parameters())
    config = ServingConfig(limits=LimitsConfig(gathered_gradient_bytes=num_bytes))

    with ExpertsServer({"e": FeedForwardExpert(D)}, optimizer=sgd, config=config) as server:
        answers = []
        for number in range(2):
            with WireClient(server.address, client_id=bytes([number])) as client:
                client.forward("e", tokens(3, D))
                answers.append(client.backward("e", tokens(3, D)))
        assert [a.code for a in answers] == ["OK", "BUSY"]
        assert "bytes of gathered gradients" in answers[1].text


def test_gradients_of_a_client_that_went_away_are_let_go_and_one_that_comes_back_is_told() -> None:
    config = ServingConfig(limits=LimitsConfig(gathered_gradient_s=0.01))

    with (
        ExpertsServer({"e": FeedForwardExpert(D)}, optimizer=sgd, config=config) as server,
        WireClient(server.address) as client,
    ):
        client.forward("e", tokens(3, D))
        client.backward("e", tokens(3, D))
        assert server._server is not None
        gathered = server._server.memory.gathered
        wait_until(lambda: not gathered.in_use)
        assert client.zero_grad("e").updates[0].status.message == "", "to forget them is no mistake"
        client.forward("e", tokens(3, D))
        client.backward("e", tokens(3, D))
        wait_until(lambda: not gathered.in_use)
        late = client.step("e").updates[0]
        assert "its gradients had been let go" in late.status.message
        assert "Call zero_grad and repeat forward and backward." in late.status.message
        assert client.step("e").updates[0].num_updates == 0


def test_a_server_that_starts_with_less_room_lets_go_of_gradients_that_do_not_fit_and_says_so(
    tmp_path: Path,
) -> None:
    """It would not start, with "Try again later" for a reason."""
    num_bytes = sum(p.nbytes for p in nn.Linear(D, D).parameters())

    def serving_with(room: int) -> ExpertsServer:
        limits = LimitsConfig(gathered_gradient_bytes=room)
        experts = {name: nn.Linear(D, D) for name in "ab"}
        config = ServingConfig(checkpoint_dir=tmp_path, limits=limits)
        return ExpertsServer(experts, optimizer=sgd, config=config)

    with serving_with(2 * num_bytes) as server, WireClient(server.address) as client:
        for name in "ab":
            client.forward(name, tokens(3, D))
            assert client.backward(name, tokens(3, D)).code == "OK"
    with serving_with(num_bytes) as server, WireClient(server.address) as client:
        client.sequence = 10
        codes = [pb.Code.Name(update.status.code) for update in client.step("a", "b").updates]
        assert codes == ["OK", "GRADIENTS_LOST"]
        client.zero_grad("a", "b")
        client.forward("b", tokens(3, D))
        assert client.backward("b", tokens(3, D)).code == "OK"
        assert client.step("b").updates[0].num_updates == 1


@pytest.mark.parametrize(("at_most", "code"), [(1, "GRADIENTS_LOST"), (2, "OK")])
def test_a_step_with_more_backwards_than_its_client_knows_of_is_refused(at_most: int, code: str) -> None:
    with (
        ExpertsServer({"e": FeedForwardExpert(D)}, optimizer=sgd) as server,
        WireClient(server.address) as client,
    ):
        for _ in range(2):
            client.forward("e", tokens(3, D))
            client.backward("e", tokens(3, D))
        expected = pb.GatheredBackwards(at_least=1, at_most=at_most)
        assert pb.Code.Name(client.step("e", gathered=[expected]).updates[0].status.code) == code
        assert client.num_updates() == {"e": int(code == "OK")}


@pytest.mark.parametrize(("num_unsure", "may_be"), [(8, False), (9, True), (64, True)])
def test_of_more_than_eight_unsure_backwards_only_the_number_counts(num_unsure: int, may_be: bool) -> None:
    """All subsets would be looked at for ever, whoever sends them."""
    gathered = Gathered((), num_backwards=num_unsure // 2, num_samples=1, digest=1)
    assert gathered.may_be_of(Expected(0, num_unsure, 0, tuple(range(num_unsure)))) == may_be
    assert not gathered.may_be_of(Expected(0, 1, 0, tuple(range(num_unsure))))


def test_a_step_that_has_nothing_gathered_is_no_mistake_at_an_expert_that_is_not_trained() -> None:
    nothing = pb.GatheredBackwards(at_least=0, at_most=1, unsure=[1])
    with ExpertsServer({"e": nn.Linear(D, D)}) as server, WireClient(server.address) as client:
        (update,) = client.step("e", gathered=[nothing]).updates
        assert (update.HasField("status"), update.num_updates) == (False, 0)


def test_gradients_that_trainings_leave_behind_give_room_to_the_next() -> None:
    """Each ends after its step, as most do, and the server has room for one."""
    num_bytes = sum(p.nbytes for p in FeedForwardExpert(D).parameters())
    config = ServingConfig(limits=LimitsConfig(gathered_gradient_bytes=num_bytes))

    with ExpertsServer({"e": FeedForwardExpert(D)}, optimizer=sgd, config=config) as server:
        for _ in range(3):
            with connect(server.address) as experts:
                experts["e"](tokens(3, D)).sum().backward()
                RemoteOptimizer(experts).step()
        with WireClient(server.address) as client:
            assert client.num_updates() == {"e": 3}


def test_gradients_that_no_step_has_applied_stay_a_minute_where_others_have_no_room() -> None:
    def num_left(age_s: float, max_age_s: float = 3600.0) -> int:
        at = [0.0]
        gathered = GatheredGradients(Budget(100, "bytes"), max_age_s, lambda: at[0])
        gathered.put(b"one", Gathered((torch.ones(1),), 1, 1))
        at[0] = age_s
        gathered.put(b"two", Gathered((torch.ones(1),), 1, 1))
        gathered.forget_stale(is_crowded=True)
        return len(gathered)

    assert (num_left(59.0), num_left(61.0)) == (2, 1)
    assert num_left(11.0, max_age_s=10.0) == 1, "nor longer than anywhere"


def test_gradients_that_a_step_has_applied_go_at_once_where_others_have_no_room_and_only_there() -> None:
    def left(*, is_crowded: bool) -> set[bytes]:
        gathered = GatheredGradients(Budget(100, "bytes"), 3600.0, lambda: 0.0)
        for name in (b"applied", b"waits"):
            gathered.put(name, Gathered((torch.ones(1),), 1, 1))
        gathered.note_applied(b"applied")
        gathered.forget_stale(is_crowded=is_crowded)
        return {*gathered.by_client()}

    assert left(is_crowded=True) == {b"waits"}
    assert left(is_crowded=False) == {b"applied", b"waits"}, "a second step applies them again, as in torch"


def test_gradients_that_gather_on_after_a_step_are_not_taken_for_applied() -> None:
    """Without `zero_grad` in between: the next step is to apply them together with those before."""
    gathered = GatheredGradients(Budget(100, "bytes"), 3600.0, lambda: 0.0)
    gathered.put(b"one", Gathered((torch.ones(1),), 1, 1))
    gathered.note_applied(b"one")
    gathered.put(b"one", Gathered((torch.ones(1),), 2, 2))
    gathered.forget_stale(is_crowded=True)
    assert {*gathered.by_client()} == {b"one"}


def test_a_client_that_gives_more_after_its_gradients_were_let_go_is_told_at_its_step() -> None:
    at = [0.0]
    gathered = GatheredGradients(Budget(100, "bytes"), 3600.0, lambda: at[0])
    gathered.put(b"one", Gathered((torch.ones(1),), 1, 1))
    at[0] = 61.0
    gathered.forget_stale(is_crowded=True)
    gathered.put(b"one", Gathered((torch.ones(1),), 1, 1))
    assert gathered.pop_lost(b"one")
    assert not gathered.pop_lost(b"one"), "it is told once"


def test_a_client_that_begins_anew_after_its_gradients_were_let_go_has_all_that_it_gives_then() -> None:
    at = [0.0]
    gathered = GatheredGradients(Budget(100, "bytes"), 3600.0, lambda: at[0])
    gathered.put(b"one", Gathered((torch.ones(1),), 1, 1))
    at[0] = 3601.0
    gathered.forget_stale(is_crowded=False)
    gathered.forget(b"one")  # its `zero_grad`
    gathered.put(b"one", Gathered((torch.ones(1),), 1, 1))
    assert not gathered.pop_lost(b"one")


def test_only_so_many_clients_that_went_away_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered_module, "MAX_LOST", 3)
    now = 0.0
    waiting = GatheredGradients(Budget(1 << 20, "gathered"), max_age_s=1.0, clock=lambda: now)
    for number in range(5):
        waiting.put(bytes([number]), Gathered([torch.ones(1)], 1, 1))
        now += 2.0
        waiting.forget_stale(is_crowded=False)
    assert len(waiting) == 0
    assert [waiting.pop_lost(bytes([number])) for number in range(5)] == [False, False, True, True, True]
