"""What an expert remembers of clients, shapes and failures is bounded; what it has forgotten it finds out again."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

from experts_server.hosting import calling, failing, later
from experts_server.hosting.calls import BackwardCall
from experts_server.hosting.failing import FailureLog
from experts_server.hosting.later import LaterGradients, Left
from moe_autograd.errors import GradientsLostError
from tests.server.test_joining import D, Features, backward_call, forward_call, hosted, rows

MOST = 3


def test_failures_of_many_kinds_are_all_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(failing, "MAX_KNOWN", MOST)
    log = FailureLog()
    for index in range(10):
        for _ in range(2):
            log.warn(f"e.{index}", "a call failed", GradientsLostError("lost"))
        assert len(log._told) <= MOST
    told = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert told == [f"expert 'e.{index}'" for index in range(10)]


def test_of_many_clients_whose_gradients_were_refused_after_the_answer_the_last_are_told_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(later, "MAX_REFUSED", MOST)
    expert = hosted(nn.Linear(D, D).double())
    assert expert.trainer is not None
    gradients = LaterGradients("e", expert.trainer, expert.ledger, expert.failures)

    def refused() -> Any:
        raise ArithmeticError("such numbers")

    for client in range(10):
        call = backward_call(client, rows(1, seed=0))
        gradients.leave(Left(call, 1, (None,), refused, ExitStack()))
    gradients.finish()
    for client in range(10 - MOST):
        gradients.check(bytes([client]))
    for client in range(10 - MOST, 10):
        with pytest.raises(GradientsLostError, match="such numbers"):
            gradients.check(bytes([client]))


def test_calls_of_many_shapes_are_answered_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calling, "MAX_KNOWN_SHAPES", MOST)
    expert, twin = hosted(Features()), Features()
    twin.load_state_dict(expert.module.state_dict())
    for length in [*range(1, 8)] * 2:
        x = rows(2 * length, seed=length).view(2, length, D)
        expected = twin(leaf := x.clone().requires_grad_())
        (outputs,) = expert.forward([forward_call(0, x)])
        assert outputs.uses == (0, 1), "the first was computed from the second"
        torch.testing.assert_close(outputs.tensors, tuple(y.detach() for y in expected))
        grads = tuple(torch.ones_like(y) for y in expected)
        call = BackwardCall(b"\0", lambda *_: None, 1, length, 0, grads, (True,), wants_weight_grads=False)
        (grad,) = expert.backward(call)
        torch.testing.assert_close(grad, *torch.autograd.grad(expected, leaf, grads))
        assert len(expert.caller._uses) <= MOST
        assert len(expert.caller._weights) <= MOST
