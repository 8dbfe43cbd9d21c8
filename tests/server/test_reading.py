"""What a client that may only read calls, stays as it was: its forwards change no buffers, whatever the module does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from experts_server.configuration.config import MemoryConfig, OffloadConfig, SecurityConfig, ServingConfig
from experts_server.hosting.calls import ForwardCall
from experts_server.hosting.hosted import HostedExpert
from experts_server.serving.open_inference import MESSAGES, SERVICE
from moe_autograd.errors import ExpertFailedError
from tests.server.test_joining import Counting, Scaled, backward_call, forward_call, hosted, rows
from tests.support.hosting import sgd
from tests.support.servers import WireClient, tokens

D = 4
TRAIN, READ = "train-token-of-length-32-and-more", "read-token-of-length-32-and-more"
CHANGES: dict[str, Callable[[Changing], None]] = {
    "in place": lambda module: module.total.add_(1),
    "by data": lambda module: module.total.data.add_(1),
    "by other data": lambda module: setattr(module.total, "data", torch.ones(D)),
    "another one": lambda module: setattr(module, "total", module.total + 1),
    "none": lambda module: setattr(module, "total", None),
    "one more": lambda module: module.register_buffer("more", torch.ones(1)),
    "one less": lambda module: module.__delattr__("total"),
    "tied": lambda module: module.tied.mul_(2),
    "part of one": lambda module: module.total[:1].zero_(),
}


class Changing(nn.Module):
    """Changes its buffers as said at its `first` call and later ones, also in evaluation."""

    def __init__(self, what: str, *, first: int = 1, error: BaseException | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D, dtype=torch.float64)
        self.register_buffer("total", torch.tensor([float("nan"), 1, 2, 3]))
        self.register_buffer("tied", self.total)
        self.register_buffer("absent", None)
        self.what, self.first, self.error, self.num_calls = what, first, error, 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls >= self.first:
            CHANGES[self.what](self)
        if self.error is not None:
            raise self.error
        y: Tensor = self.linear(x)
        return y


def bits(module: nn.Module) -> dict[str, list[int] | None]:
    """Return what is in all buffers."""
    return {
        f"{name}.{key}": None if b is None else b.reshape(-1).view(torch.uint8).tolist()
        for name, part in module.named_modules()
        for key, b in part._buffers.items()
    }


def read(expert: HostedExpert, *, evaluate: bool = False) -> None:
    expert.forward([reader_call(evaluate=evaluate)])


def reader_call(**settings: Any) -> ForwardCall:
    return forward_call(1, rows(2, seed=1), may_train=False, keep_graph=False, **settings)


@pytest.mark.parametrize("evaluate", [True, False])
@pytest.mark.parametrize("what", CHANGES)
def test_a_forward_of_a_reader_leaves_buffers_as_they_were(what: str, evaluate: bool) -> None:
    expert = hosted(Changing(what))
    before, own = bits(expert.module), dict(expert.module._buffers)
    read(expert, evaluate=evaluate)
    assert bits(expert.module) == before
    assert all(expert.module._buffers[key] is buffer for key, buffer in own.items())
    expert.forward([forward_call(1, rows(2, seed=1), evaluate=evaluate)])
    assert bits(expert.module) != before


def test_buffers_that_change_at_a_later_call_first_are_left_as_well() -> None:
    expert = hosted(Changing("in place", first=3))
    before = bits(expert.module)
    for _ in range(4):
        read(expert)
        assert bits(expert.module) == before


class Late(nn.Module):
    """Has a buffer, or a part with one, since its first call only, and changes it in each."""

    def __init__(self, *, in_part: bool) -> None:
        super().__init__()
        self.linear, self.in_part = nn.Linear(D, D, dtype=torch.float64), in_part

    def forward(self, x: Tensor) -> Tensor:
        if self.in_part and not hasattr(self, "part"):
            self.part = nn.Module()
        home = self.part if self.in_part else self
        if not hasattr(home, "total"):
            home.register_buffer("total", torch.zeros(D, dtype=torch.float64))
        home.total += x.detach().sum(0)
        y: Tensor = self.linear(x)
        return y


@pytest.mark.parametrize("in_part", [False, True])
def test_buffers_that_come_with_the_first_call_are_left_as_well(in_part: bool) -> None:
    expert = hosted(Late(in_part=in_part))
    expert.forward([forward_call(1, rows(2, seed=1))])
    before = bits(expert.module)
    assert before
    for evaluate in (False, True):
        read(expert, evaluate=evaluate)
        assert bits(expert.module) == before
    assert expert.join_key(reader_call()) is None  # as it changes them


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_reader_may_call_what_the_compiler_of_torch_has_made() -> None:
    expert, plain = hosted(torch.jit.script(Scaled())), Scaled()
    plain.load_state_dict(expert.module.state_dict())
    (answer,) = expert.forward([reader_call()])
    torch.testing.assert_close(answer.tensors[0], plain(rows(2, seed=1)).detach())


class Scripted(Scaled):
    """Changes its buffers as far as what the compiler makes of it can: in place, and by others."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(D))
        self.register_buffer("other", torch.zeros(D))
        self.register_buffer("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        self.total += 1
        self.other = self.other + 1
        return self.linear(x) * self.scale


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("in_part", [False, True])
def test_a_reader_leaves_the_buffers_of_what_the_compiler_has_made(in_part: bool) -> None:
    scripted = torch.jit.script(Scripted())
    expert = hosted(nn.Sequential(scripted) if in_part else scripted)
    before = {name: b.clone() for name, b in expert.module.named_buffers()}
    for evaluate in (False, True):
        read(expert, evaluate=evaluate)
        torch.testing.assert_close(dict(expert.module.named_buffers()), before)
    expert.forward([forward_call(1, rows(2, seed=1))])
    assert all((b == 1).all() for b in expert.module.buffers())


def test_a_reader_that_comes_first_leaves_no_buffers() -> None:
    expert = hosted(Late(in_part=False))
    read(expert)
    assert not bits(expert.module)


def test_a_forward_of_a_reader_that_fails_leaves_buffers_as_they_were() -> None:
    for error in (ValueError("no"), SystemExit()):
        expert = hosted(Changing("in place", error=error))
        before = bits(expert.module)
        with pytest.raises(ExpertFailedError):
            read(expert)
        assert bits(expert.module) == before


def test_a_backward_after_a_forward_of_a_reader_is_that_of_its_own_graph() -> None:
    """Which has saved the statistics: a change in place would be an error there."""
    expert = hosted(nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D)).double())
    expert.forward([forward_call(0, rows(3, seed=0), evaluate=True)])
    read(expert)
    (grad,) = expert.backward(backward_call(0, rows(3, seed=2)))
    assert grad is not None


def test_readers_are_joined_with_their_like_where_there_are_buffers() -> None:
    expert = hosted(Changing("in place", first=2))
    before = bits(expert.module)
    expert.forward([reader_call()])
    own, others = reader_call(), forward_call(2, rows(2, seed=1))
    assert None not in (expert.join_key(own), expert.join_key(others))
    assert expert.join_key(own) != expert.join_key(others)
    assert expert.join_key(own) == expert.join_key(reader_call())
    expert.forward([own, reader_call()])
    assert bits(expert.module) == before


def test_readers_are_joined_with_anybody_where_there_are_none() -> None:
    expert = hosted(nn.Linear(D, D, dtype=torch.float64))
    assert expert.join_key(reader_call()) == expert.join_key(forward_call(2, rows(2, seed=1)))


class Showing(nn.Module):
    """Notes which buffer its norm has in a call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(D, D).double(), nn.BatchNorm1d(D).double()
        self.seen: list[Tensor | None] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.norm.running_mean)
        y: Tensor = self.norm(self.linear(x))
        return y


def test_nothing_is_copied_that_torchs_own_modules_change_in_training_only() -> None:
    module = Showing()
    expert, own = hosted(module), module.norm.running_mean
    for evaluate in (True, False):
        read(expert, evaluate=evaluate)
    assert module.seen[0] is own
    assert module.seen[1] is not own


def _hook_that_counts(module: nn.Module) -> None:
    module.register_forward_hook(lambda part, _, y: y + part.total.add_(1))


def _hook_that_registers(module: nn.Module) -> None:
    module.register_forward_hook(lambda part, _, __: part.register_buffer("more", torch.ones(D)))


def _forward_that_counts(module: nn.Module) -> None:
    plain = module.forward
    module.forward = lambda x: plain(x) + module.total.add_(1).mean()


HOOKS = [_hook_that_counts, _hook_that_registers, _forward_that_counts]


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("evaluate", [True, False])
@pytest.mark.parametrize("put_on", HOOKS)
def test_what_hooks_change_of_torchs_own_modules_a_reader_leaves(
    put_on: Callable[[nn.Module], None], evaluate: bool, is_late: bool
) -> None:
    module = nn.Linear(D, D, dtype=torch.float64)
    if not is_late:
        module.register_buffer("total", torch.zeros(D))
        put_on(module)
    expert = hosted(module)
    read(expert, evaluate=evaluate)
    if is_late:
        module.register_buffer("total", torch.zeros(D))
        put_on(module)
    before = bits(module)
    for _ in range(2):
        read(expert, evaluate=evaluate)
        assert bits(module) == before
    expert.forward([forward_call(1, rows(2, seed=1), evaluate=evaluate)])
    assert bits(module) != before


@pytest.fixture
def secured(tmp_path: Path) -> ServingConfig:
    file = tmp_path / "tokens"
    file.write_text(f"train {TRAIN}\nread {READ}")
    return ServingConfig(security=SecurityConfig(tokens_file=file), checkpoint_dir=tmp_path / "saved")


def test_a_read_token_changes_no_statistics_and_a_train_token_does(secured: ServingConfig) -> None:
    experts = {"bn": nn.BatchNorm1d(D), "counting": Counting()}
    before = {name: bits(module) for name, module in experts.items()}
    with ExpertsServer(experts, optimizer=sgd, config=secured) as server:
        for token in (READ, TRAIN):
            with WireClient(server.address, token=token) as client:
                calls = [
                    client.forward_call(name, tokens(3, D), call_id=n) for n in (1, 2) for name in experts
                ]
                answers = client.stream("Forward", calls)
                assert [answer.code for answer in answers] == ["OK"] * len(calls)
            changed = [name for name, module in experts.items() if bits(module) != before[name]]
            assert changed == ([] if token == READ else list(experts))


def test_a_read_token_changes_nothing_by_the_open_inference_protocol(secured: ServingConfig) -> None:
    expert = Changing("by other data").float()
    before = bits(expert)
    x = tokens(3, D)
    request = MESSAGES["ModelInferRequest"](model_name="e", raw_input_contents=[x.numpy().tobytes()])
    request.inputs.add(name="input.0", datatype="FP32", shape=x.shape)
    with (
        ExpertsServer({"e": expert}, optimizer=sgd, config=secured) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        infer = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        for token in (READ, TRAIN):
            header = (("authorization", f"Bearer {token}"),)
            infer(request.SerializeToString(), metadata=header, timeout=30)
            assert (bits(expert) == before) == (token == READ)


def test_an_expert_that_comes_and_goes_keeps_its_buffers_too(secured: ServingConfig) -> None:
    memory = {"offload": OffloadConfig(max_resident_bytes=1 << 20)}
    memory["memory"] = MemoryConfig(recompute=True, offload=True)
    config = secured.model_copy(update=memory)
    expert = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D))
    with ExpertsServer({"e": expert}, optimizer=sgd, config=config) as server:
        with WireClient(server.address, token=READ) as client:
            before = client.get_state("e")["e"]
            for call_id in range(3):
                assert client.forward("e", tokens(3, D), call_id=call_id).code == "OK"
            torch.testing.assert_close(client.get_state("e")["e"], before, rtol=0, atol=0)
        with WireClient(server.address, token=TRAIN) as client:
            assert client.forward("e", tokens(3, D)).code == "OK"
            assert not torch.equal(client.get_state("e")["e"]["1.running_mean"], before["1.running_mean"])
