"""Every numbered change counts once, however often it is sent, and in whatever order its copies arrive."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from torch import Tensor

from experts_server import ExpertsServer
from experts_server.budget import Budget
from experts_server.hosting import ledger as ledger_module
from experts_server.hosting.calls import BackwardCall, UpdateCall
from experts_server.hosting.hosted import HostedExpert, SharedMemory
from experts_server.hosting.kept import KeptForwards
from experts_server.hosting.ledger import Ledger
from experts_server.hosting.training import Training
from moe_autograd.errors import InvalidCallError
from moe_autograd.moe.experts import FeedForwardExpert
from tests.support.servers import START_S, WireClient, tokens

D = 8


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


@pytest.fixture(params=["on_step", "on_backward"])
def client(request: pytest.FixtureRequest) -> Iterator[WireClient]:
    torch.manual_seed(0)
    with (
        ExpertsServer({"e": FeedForwardExpert(D)}, optimizer=sgd, update=request.param) as server,
        WireClient(server.address) as client,
    ):
        yield client


def test_a_repeated_backward_is_answered_alike_and_counts_once(client: WireClient) -> None:
    client.forward("e", tokens(3, D))
    first = client.backward("e", tokens(3, D), sequence=5)
    again = [client.backward("e", tokens(3, D), sequence=5) for _ in range(3)]
    assert [a.code for a in again] == ["OK"] * 3
    assert {a.result.wants_no_step for a in again} == {first.result.wants_no_step}
    for answer in again:
        torch.testing.assert_close(answer.tensors, first.tensors, rtol=0, atol=0)
    client.step(sequence=6)
    state = client.get_state()["e"]
    local = _trained_once()
    torch.testing.assert_close(state, local.state_dict())
    assert client.num_updates() == {"e": 1}


def test_a_repeated_step_and_a_repeated_zero_grad_count_once(client: WireClient) -> None:
    client.forward("e", tokens(3, D))
    client.backward("e", tokens(3, D), sequence=1)
    replies = [client.step(sequence=2) for _ in range(3)]
    assert [reply.updates[0].num_updates for reply in replies] == [1, 1, 1]
    client.zero_grad(sequence=3)
    client.forward("e", tokens(3, D))
    client.backward("e", tokens(3, D), sequence=4)
    client.zero_grad(sequence=3)  # a late copy clears nothing
    before = client.num_updates()["e"]
    client.step(sequence=5)
    assert client.num_updates()["e"] == (2 if before == 1 else before)


def test_copies_sent_at_the_same_time_count_once(client: WireClient) -> None:
    for call_id in range(8):
        client.forward("e", tokens(3, D), call_id=call_id)
    calls = [client.backward_call("e", tokens(3, D), call_id=n, sequence=1) for n in range(8)]
    barrier = threading.Barrier(8)
    answers: list[Any] = []

    def send(call: Any) -> None:
        barrier.wait(START_S)
        answers.extend(client.stream("Backward", [call]))

    threads = [threading.Thread(target=send, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(START_S)
    assert [a.code for a in answers] == ["OK"] * 8
    client.step(sequence=2)
    torch.testing.assert_close(client.get_state()["e"], _trained_once().state_dict())


def test_a_copy_of_a_settled_update_is_refused_and_changes_nothing(client: WireClient) -> None:
    client.forward("e", tokens(3, D))
    client.backward("e", tokens(3, D), sequence=1)
    client.step(sequence=2)
    client.step(sequence=3, settled_below=3)
    state = client.get_state()
    late = client.backward("e", tokens(3, D), sequence=1, inputs=[tokens(3, D)])
    assert (late.code, "expected at least 3, got 1" in late.text) == ("INVALID_CALL", True)
    torch.testing.assert_close(client.get_state(), state, rtol=0, atol=0)


def test_the_same_number_of_another_client_is_another_update(client: WireClient) -> None:
    with WireClient(client.address, client_id=b"other") as other:
        for one in (client, other):
            one.forward("e", tokens(3, D))
            one.backward("e", tokens(3, D), sequence=1)
            one.step(sequence=2)
        assert client.num_updates() == {"e": 2}


def test_beyond_the_most_clients_the_one_that_was_not_heard_of_for_longest_is_forgotten_with_its_answers() -> (
    None
):
    replies = Budget(1 << 20, "replies")
    ledger = Ledger(2, replies)
    for client_id in (b"a", b"b"):
        ledger.record(client_id, 1, 7, (torch.ones(4),))
    in_use = replies.in_use
    assert ledger.find(b"a", 1, 0) is not None
    ledger.record(b"c", 1, 7, (torch.ones(4),))
    assert replies.in_use == in_use, "the answers of b have gone"
    assert ledger.find(b"a", 1, 0) is not None
    assert ledger.find(b"b", 1, 0) is None


def test_a_client_heard_of_lately_is_not_forgotten_for_a_new_one() -> None:
    def give(client: WireClient) -> None:
        client.forward("e", tokens(3, D))
        assert client.backward("e", tokens(3, D), sequence=1).code == "OK"

    with (
        ExpertsServer(
            {"e": FeedForwardExpert(D)},
            optimizer=sgd,
            update="on_backward",
            config={"limits": {"max_clients": 2}},
        ) as server,
        WireClient(server.address, client_id=b"first") as first,
        WireClient(server.address, client_id=b"second") as second,
        WireClient(server.address, client_id=b"third") as third,
    ):
        for client in (first, second, first, third, first):  # the third one takes the second's place
            give(client)
        assert server.num_updates == {"e": 3}


def test_a_copy_of_older_weights_changes_nothing(client: WireClient) -> None:
    older, newer = ({"e": {k: v + n for k, v in client.get_state()["e"].items()}} for n in (1, 2))
    client.set_state(older, sequence=5)
    client.set_state(newer, sequence=6)
    assert not client.set_state(older, sequence=5).updates[0].HasField("status")
    torch.testing.assert_close(client.get_state(), newer, rtol=0, atol=0)


def test_what_a_client_has_settled_stays_settled_over_a_restart() -> None:
    before, after = (Ledger(8, Budget(1 << 20, "replies")) for _ in range(2))
    before.record(b"client", 3, 1)
    before.find(b"client", 5, settled_below=4)
    after.load_plain(json.loads(json.dumps(before.to_plain())))
    with pytest.raises(InvalidCallError, match="expected at least 4, got 3"):
        after.find(b"client", 3, 0)


def test_a_server_that_is_to_remember_fewer_clients_than_before_does() -> None:
    before, after = (Ledger(number, Budget(1 << 20, "replies")) for number in (8, 2))
    for client_id in (b"a", b"b", b"c", b"d"):
        before.record(client_id, 1, 1)
    after.load_plain(before.to_plain())
    after.record(b"e", 1, 1)
    assert [bytes.fromhex(item["client"]) for item in after.to_plain()] == [b"d", b"e"]


def test_a_client_that_never_settles_fills_no_memory_and_still_counts_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ledger_module, "MAX_UNSETTLED", 10)
    replies = Budget(1 << 20, "replies")
    ledger = Ledger(8, replies)
    for sequence in range(1000):
        assert ledger.find(b"client", sequence, 0) is None
        ledger.record(b"client", sequence, sequence, (torch.ones(1),))
        assert len(ledger.to_plain()[0]["applied"]) <= 10
        assert replies.in_use <= 10 * (4 + ledger_module.REPLY_BYTES)
    known = ledger.find(b"client", 999, 0)
    assert known is not None
    assert known.num_updates == 999
    for forgotten in (0, 500, 989):
        with pytest.raises(InvalidCallError, match="late copy and changes nothing"):
            ledger.find(b"client", forgotten, 0)


def _trained_once() -> FeedForwardExpert:
    torch.manual_seed(0)
    local = FeedForwardExpert(D)
    local(tokens(3, D)).backward(tokens(3, D))
    sgd(local.parameters()).step()
    return local


# ---- a model of the ledger, driven at random


class LedgerMachine(RuleBasedStateMachine):
    """Clients send, lose answers, send again, settle; the model adds each (client, sequence) once."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.nn.Parameter(torch.zeros(1))
        module = torch.nn.Module()
        module.weight = weight
        module.forward = lambda x: x * weight  # type: ignore[method-assign]  # the smallest expert there is
        memory = SharedMemory(
            KeptForwards(1 << 20, 100), Budget(1 << 20, "gathered"), Budget(64, "replies"), max_clients=8
        )
        self.expert = HostedExpert("e", module, Training(torch.optim.SGD([weight], lr=1.0)), memory)
        self.weight = weight
        self.gathered = {b"a": 0.0, b"b": 0.0}
        self.expected = 0.0
        self.sent: dict[bytes, list[tuple[int, str, float]]] = {b"a": [], b"b": []}
        self.settled = {b"a": 0, b"b": 0}

    clients = st.sampled_from([b"a", b"b"])

    @rule(client=clients, grad=st.integers(1, 4).map(float))
    def backward(self, client: bytes, grad: float) -> None:
        self._send(client, "backward", grad)
        self.gathered[client] += grad

    @rule(client=clients)
    def step(self, client: bytes) -> None:
        self._send(client, "step", 0.0)
        self.expected -= self.gathered[client]

    @rule(client=clients)
    def zero_grad(self, client: bytes) -> None:
        self._send(client, "zero_grad", 0.0)
        self.gathered[client] = 0.0

    @rule(client=clients, which=st.integers(0, 30))
    def send_again(self, client: bytes, which: int) -> None:
        if not self.sent[client]:
            return
        sequence, kind, grad = self.sent[client][which % len(self.sent[client])]
        try:
            self._apply(client, sequence, kind, grad)
        except InvalidCallError:
            assert sequence < self.settled[client]

    @rule(client=clients, which=st.integers(0, 30))
    def settle(self, client: bytes, which: int) -> None:
        self.settled[client] = max(self.settled[client], min(which, len(self.sent[client])))

    @rule()
    def restart(self) -> None:
        plain = self.expert.ledger.to_plain()
        self.expert.ledger = Ledger(8, Budget(64, "replies"))
        self.expert.ledger.load_plain(plain)

    @invariant()
    def each_update_has_counted_once(self) -> None:
        assert self.weight.item() == self.expected

    def _send(self, client: bytes, kind: str, grad: float) -> None:
        sequence = len(self.sent[client]) + 1
        self.sent[client].append((sequence, kind, grad))
        self._apply(client, sequence, kind, grad)

    def _apply(self, client: bytes, sequence: int, kind: str, grad: float) -> None:
        settled = self.settled[client]
        if kind == "backward":
            ones: tuple[Tensor, ...] = (torch.ones(1),)
            self.expert.backward(
                BackwardCall(
                    client,
                    _ignore,
                    sequence,
                    sequence,
                    settled,
                    (torch.tensor([grad]),),
                    (False,),
                    inputs=ones,
                )
            )
        else:
            self.expert.update(UpdateCall(client, _ignore, kind, sequence, settled))  # type: ignore[arg-type]  # a Literal


def _ignore(*_: Any) -> None: ...


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
