"""A server that is restarted between a backward and the step: no update goes missing without a word."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest
import torch

from experts_server import ExpertsServer
from experts_server.configuration.config import ServingConfig
from moe_autograd.errors import GradientsLostError
from moe_autograd.remote import RemoteExperts, RemoteOptimizer, RetryPolicy, connect
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.gathered import digest_of
from tests.support.hosting import LR, sgd
from tests.support.servers import ServerProcess, WireClient

SERVE = ("--expert", "ffn", "--num-experts", "2", "--d-model", "8", "--optimizer", "sgd", "--lr", "0.1")
PATIENT = RetryPolicy(patience_s=60.0)
UPDATE_MODES = ["on_step", "on_backward", "on_samples"]


def server_at(folder: Path, address: str = "127.0.0.1:0") -> ServerProcess:
    return ServerProcess(*SERVE, "--checkpoint-dir", str(folder), "--listen", address)


def backward(experts: RemoteExperts) -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    (experts["ffn.0"](x) + experts["ffn.1"](x)).square().sum().backward()


def num_updates(experts: RemoteExperts) -> list[int]:
    return [hosted.num_updates for hosted in experts.info().values()]


def save(address: str) -> None:
    with WireClient(address) as client:
        client.save()


def test_a_step_whose_gradients_were_lost_says_so_and_can_be_repeated(tmp_path):
    with server_at(tmp_path) as first, connect(first.address, timeout_s=120.0, retry=PATIENT) as experts:
        optimizer = RemoteOptimizer(experts)
        save(first.address)
        backward(experts)
        first.kill()
        with server_at(tmp_path, first.address):
            before = experts.state_dict()
            with pytest.raises(
                GradientsLostError, match=r"of 1 backwards, got those of 0\. .* Call zero_grad"
            ):
                optimizer.step()
            torch.testing.assert_close(experts.state_dict(), before, rtol=0, atol=0)
            optimizer.zero_grad()
            backward(experts)
            optimizer.step()
            assert num_updates(experts) == [1, 1]


def test_gradients_that_the_checkpoint_holds_are_not_lost(tmp_path):
    with server_at(tmp_path) as first, connect(first.address, timeout_s=120.0, retry=PATIENT) as experts:
        backward(experts)
        save(first.address)
        first.kill()
        with server_at(tmp_path, first.address):
            RemoteOptimizer(experts).step()
            assert num_updates(experts) == [1, 1]


def test_of_two_backwards_one_that_was_lost_is_noticed(tmp_path):
    with server_at(tmp_path) as first, connect(first.address, timeout_s=120.0, retry=PATIENT) as experts:
        backward(experts)
        save(first.address)
        backward(experts)
        first.kill()
        with (
            server_at(tmp_path, first.address),
            pytest.raises(GradientsLostError, match=r"of 2 backwards, got those of 1"),
        ):
            RemoteOptimizer(experts).step()


def test_gradients_that_were_forgotten_after_the_checkpoint_do_not_count_again(tmp_path):
    with server_at(tmp_path) as first, connect(first.address, timeout_s=120.0, retry=PATIENT) as experts:
        optimizer = RemoteOptimizer(experts)
        backward(experts)
        save(first.address)
        optimizer.zero_grad()
        first.kill()
        with server_at(tmp_path, first.address):
            backward(experts)
            with pytest.raises(GradientsLostError, match=r"of 1 backwards, got those of 2"):
                optimizer.step()


def test_gradients_of_an_earlier_step_that_the_checkpoint_holds_are_not_applied_for_those_of_this_one(
    tmp_path,
):
    """They are as many, so their number does not tell; most checkpoints that a server writes by itself hold some."""
    with server_at(tmp_path) as first, connect(first.address, timeout_s=120.0, retry=PATIENT) as experts:
        optimizer = RemoteOptimizer(experts)
        backward(experts)
        optimizer.step()
        save(first.address)
        optimizer.zero_grad()
        backward(experts)
        first.kill()
        with server_at(tmp_path, first.address):
            before = experts.state_dict()
            with pytest.raises(GradientsLostError, match=r"of 1, others among them"):
                optimizer.step()
            torch.testing.assert_close(experts.state_dict(), before, rtol=0, atol=0)
            optimizer.zero_grad()
            backward(experts)
            optimizer.step()
            assert num_updates(experts) == [2, 2]


def test_gradients_that_an_answer_never_told_of_do_not_stand_for_others_that_were_lost(tmp_path):
    """The checkpoint has one backward, of which the client is not sure, and not the other one, of which it is."""
    sure = pb.GatheredBackwards(at_least=1, at_most=2, digest=digest_of([12]), unsure=[11])
    both = pb.GatheredBackwards(at_least=2, at_most=2, digest=digest_of([11, 12]))

    def serving(folder: str) -> ExpertsServer:
        config = ServingConfig(checkpoint_dir=tmp_path / folder)
        return ExpertsServer({"a": torch.nn.Linear(4, 4)}, optimizer=sgd, config=config)

    with serving("first") as first, WireClient(first.address) as client:
        client.forward("a", torch.ones(1, 4), call_id=1)
        client.forward("a", torch.ones(1, 4), call_id=2)
        client.backward("a", torch.ones(1, 4), call_id=1, sequence=11)
        client.save()
        shutil.copytree(tmp_path / "first", tmp_path / "second")  # as a kill leaves it
        client.backward("a", torch.ones(1, 4), call_id=2, sequence=12)
        assert client.step("a", sequence=13, gathered=[both]).updates[0].num_updates == 1
    with serving("second") as second, WireClient(second.address) as client:
        (update,) = client.step("a", sequence=13, gathered=[sure]).updates
        assert pb.Code.Name(update.status.code) == "GRADIENTS_LOST"
        assert "the gradients of 1 backwards, got those of 1, others among them" in update.status.message
        assert second.num_updates == {"a": 0}


@pytest.mark.parametrize("after", UPDATE_MODES)
@pytest.mark.parametrize("before", UPDATE_MODES)
def test_a_server_that_returns_with_another_way_of_updating_loses_no_update(before, after):
    """Whether a step is wanted is what the server says with each backward, and not what it said at `connect`."""
    module, samples = torch.nn.Linear(4, 4), {"on_samples": 1}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(contextlib.ExitStack())
        there = {"update": before, "samples_per_update": samples.get(before), "optimizer": sgd}
        address = server.enter_context(ExpertsServer({"a": module}, **there)).address
        experts = stack.enter_context(connect(address))
        optimizer = RemoteOptimizer(experts)
        for update in (before, after):
            if update != before:
                server.close()
                there = {"update": update, "samples_per_update": samples.get(update), "optimizer": sgd}
                server.enter_context(ExpertsServer({"a": module}, listen=address, **there))
            bias = module.bias.detach().clone()
            for _ in range(2):
                optimizer.zero_grad()
                experts["a"](torch.ones(1, 4)).sum().backward()
                optimizer.step()
            torch.testing.assert_close(module.bias, bias - 2 * LR)


@pytest.mark.parametrize("after", ["on_backward", "on_samples"])
@pytest.mark.parametrize("is_saved", [False, True])
def test_gradients_gathered_for_a_step_are_lost_with_a_word_where_the_server_returns_without_steps(
    after, is_saved, tmp_path
):
    module = torch.nn.Linear(4, 4)
    config = ServingConfig(checkpoint_dir=tmp_path) if is_saved else ServingConfig()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(contextlib.ExitStack())
        address = server.enter_context(ExpertsServer({"a": module}, optimizer=sgd, config=config)).address
        optimizer = RemoteOptimizer(experts := stack.enter_context(connect(address)))
        experts["a"](torch.ones(1, 4)).sum().backward()
        server.close()
        samples = 1 if after == "on_samples" else None
        there = {"update": after, "samples_per_update": samples, "optimizer": sgd, "config": config}
        server.enter_context(ExpertsServer({"a": module}, listen=address, **there))
        bias = module.bias.detach().clone()
        for _ in range(2):  # until `zero_grad`
            with pytest.raises(
                GradientsLostError, match=rf"of 1 backwards, got none.*{after}.* Call zero_grad"
            ):
                optimizer.step()
        torch.testing.assert_close(module.bias, bias, rtol=0, atol=0)
        optimizer.zero_grad()
        experts["a"](torch.ones(1, 4)).sum().backward()
        optimizer.step()
        torch.testing.assert_close(module.bias, bias - LR)
