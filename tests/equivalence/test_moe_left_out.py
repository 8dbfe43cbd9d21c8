"""Which experts a lenient layer leaves out, which it leaves alone and for how long, and what is raised all the same."""

from __future__ import annotations

import copy
import pickle
import signal
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import CheckpointError, checkpoint

from moe_autograd.autograd.grouping import Attendance
from moe_autograd.errors import (
    InvalidCallError,
    PermissionDeniedError,
    ServerUnavailableError,
    TooFewExpertsError,
)
from moe_autograd.moe import stragglers
from tests.support.unreliable import NUM_EXPERTS, Unreliable, expected_of, layer_of, tokens

pytestmark = pytest.mark.usefixtures("clock")


# ---- what is left out, and what is not


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize(
    "error",
    [
        ValueError("a bug"),
        RuntimeError("a bug"),
        InvalidCallError("refused"),
        PermissionDeniedError("no token"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_the_program_did_wrong_is_raised(phase, error):
    layer = layer_of(fails={0: phase})
    layer.experts[0].error = error
    x = tokens()
    with pytest.raises(type(error), match=str(error)) as raised:
        layer(x).sum().backward()
    assert raised.value is error
    assert any("expert 0 (Unreliable)" in note for note in error.__notes__)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("error", [ConnectionResetError("gone"), TimeoutError("late")], ids=repr)
@pytest.mark.parametrize("takes_turns", [False, True])
def test_a_module_that_talks_to_something_itself_may_be_left_out(phase, error, takes_turns):
    layer = layer_of(fails={0: phase})
    layer.experts[0].error = error
    if takes_turns:
        layer.experts[0].norm = layer.experts[1].norm = nn.BatchNorm1d(1)
    y, routing = layer(tokens(), return_routing=True)
    y.sum().backward()
    (failure,) = routing.failures
    assert (failure.phase, failure.reason) == (phase, f"{type(error).__name__}: {error}")


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_time_limit_by_a_signal_is_no_experts_failure(phase):
    def stop(signum, frame):
        raise TimeoutError("the step takes too long")

    def run_out_of_time(*_):
        signal.raise_signal(signal.SIGALRM)

    layer = layer_of(max_concurrency=1)  # on this thread
    if phase == "forward":
        layer.experts[0].register_forward_pre_hook(run_out_of_time)
    else:
        layer.experts[0].linear.weight.register_hook(run_out_of_time)
    before = signal.signal(signal.SIGALRM, stop)
    try:
        with pytest.raises(TimeoutError, match="the step takes too long"):
            layer(tokens()).sum().backward()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_an_expert_that_returns_nothing_is_no_failure():
    layer = layer_of()
    layer.experts[0].forward = lambda x: None
    with pytest.raises(TypeError, match=r"expected a tensor from an expert, got NoneType \(expert_index=0\)"):
        layer(tokens())


def test_a_module_here_is_called_by_its_place_whatever_its_name():
    layer = layer_of(fails={0: "forward"})
    layer.experts[0].name = "ffn.7"
    _, routing = layer(tokens(), return_routing=True)
    assert [failure.expert for failure in routing.failures] == ["expert 0"]


def test_a_strict_layer_raises_what_the_expert_raises():
    layer = layer_of(fails={0: "forward"}, on_failure="raise")
    with pytest.raises(ServerUnavailableError, match="the cable is out"):
        layer(tokens())


# ---- left alone


def test_an_expert_that_failed_is_left_alone_for_a_while_that_grows(clock):
    layer, x = layer_of(fails={0: "forward"}), tokens()
    began_s = clock.now_s
    for after_s, is_tried in [(0, True), (0.4, False), (0.6, True), (1.5, False), (1.7, True), (3.6, False)]:
        clock.now_s = began_s + after_s
        num_calls = layer.experts[0].num_calls
        _, routing = layer(x, return_routing=True)
        (failure,) = routing.failures
        assert layer.experts[0].num_calls == num_calls + is_tried
        assert failure.reason.startswith("left alone for another") != is_tried
        assert failure.reason.endswith("ServerUnavailableError: the cable is out")


def test_an_expert_that_comes_back_is_used_again(clock):
    layer, x = layer_of(fails={0: "backward"}), tokens()
    layer(x).sum().backward()
    layer.experts[0].fails_in = ""
    clock.now_s += 0.4
    _, routing = layer(x, return_routing=True)
    assert [failure.phase for failure in routing.failures] == ["forward"]
    clock.now_s += 0.2
    y, routing = layer(x, return_routing=True)
    assert routing.failures == []
    assert torch.equal(y, layer_of(on_failure="raise")(x))


def test_an_expert_that_rests_is_no_failure_of_a_pass_that_has_no_token_for_it():
    layer, x = layer_of(fails={0: "forward"}), tokens()
    layer(x)
    others = x[(layer.router(x).expert_index != 0).all(dim=1)]
    y, routing = layer(others, return_routing=True)
    assert routing.failures == []
    assert torch.equal(y, layer_of(on_failure="raise")(others))


def test_who_failed_is_left_alone_whoever_was_called_beside_it():
    layer, x = layer_of(fails={1: "forward"}), tokens()
    others = x[(layer.router(x).expert_index != 0).all(dim=1)]
    for _ in range(2):
        _, routing = layer(others, return_routing=True)
    (failure,) = routing.failures
    assert (failure.expert_index, failure.reason.partition(" for ")[0]) == (1, "left alone")
    layer(x)
    assert [expert.num_calls for expert in layer.experts[:2]] == [1, 1]


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_checkpoint_around_a_layer_wants_the_same_experts_to_answer_again(clock, comes_back):
    layer = layer_of(fails={0: "forward"})
    y = checkpoint(layer, tokens(), use_reentrant=False)
    if comes_back:
        layer.experts[0].fails_in = ""
        clock.now_s += 60.0
    with pytest.raises(CheckpointError):
        y.sum().backward()


def test_an_expert_that_nobody_can_stand_in_for_is_tried_each_time():
    layer, x = layer_of(1, fails={0: "forward"}), tokens()
    for _ in range(3):
        with pytest.raises(TooFewExpertsError):
            layer(x)
    assert layer.experts[0].num_calls == 3
    layer.experts[0].fails_in = ""
    assert torch.equal(layer(x), layer_of(1, on_failure="raise")(x))


def test_where_zeros_will_do_nobody_has_to_stand_in():
    layer, x = layer_of(1, fails={0: "forward"}, allow_zero_outputs=True), tokens()
    for _ in range(3):
        layer(x)
    assert layer.experts[0].num_calls == 1


# ---- stragglers


class Timer:
    """Stands for `threading.Timer`; rings when the test says so."""

    made: list[Timer]

    def __init__(self, interval_s: float, ring: Callable[[], None]) -> None:
        self.ring = ring
        self.is_cancelled = False
        self.made.append(self)

    def start(self) -> None:
        pass

    def cancel(self) -> None:
        self.is_cancelled = True


@pytest.fixture
def timers(monkeypatch) -> list[Timer]:
    Timer.made = []
    monkeypatch.setattr(stragglers, "threading", SimpleNamespace(Timer=Timer, Lock=threading.Lock))
    return Timer.made


def test_an_expert_here_that_has_not_begun_when_the_time_is_over_is_left_out(timers):
    class Ringing(Unreliable):
        def forward(self, x: Tensor) -> Tensor:
            timers[0].ring()
            return super().forward(x)

    layer = layer_of(NUM_EXPERTS, timeout_after_min_s=0.1, max_concurrency=1)
    layer.experts[1] = Ringing().double()
    x = tokens()
    y, routing = layer(x, return_routing=True)
    assert [failure.expert_index for failure in routing.failures] == [2, 3, 4]
    assert all(failure.reason.startswith("StragglerError: ") for failure in routing.failures)
    assert [expert.num_calls for expert in layer.experts] == [1, 1, 0, 0, 0]
    torch.testing.assert_close(y, expected_of(layer, x, lost_in_forward={2, 3, 4}))


def test_no_token_has_what_it_needs_from_an_expert_here_that_failed(timers):
    class Looking(Unreliable):
        def forward(self, x: Tensor) -> Tensor:
            assert not timers
            return super().forward(x)

    layer = layer_of(NUM_EXPERTS, fails={0: "forward"}, timeout_after_min_s=60.0, max_concurrency=1)
    layer.experts[1] = Looking().double()
    layer(tokens())
    assert len(timers) == 1


def test_ctrl_c_in_a_forward_stops_the_clock(timers):
    layer = layer_of(NUM_EXPERTS, fails={1: "forward"}, timeout_after_min_s=60.0, max_concurrency=1)
    layer.experts[1].error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        layer(tokens())
    assert [timer.is_cancelled for timer in timers] == [True]


class InterruptedGroup:
    """Whose first call has answered in the backward when Ctrl-C comes."""

    can_leave_out = True

    def call_together(
        self,
        modules: Sequence[nn.Module],
        inputs: Sequence[tuple[Tensor]],
        kwargs: object,
        *,
        failures: Attendance,
    ) -> list[Tensor]:
        def interrupt(grad: Tensor) -> None:
            with failures.waiting("backward", lambda reason: None) as roll:
                roll.settle(0, is_answered=True)
                raise KeyboardInterrupt

        outputs = [x * 1 for (x,) in inputs]
        outputs[0].register_hook(interrupt)
        return outputs


def test_ctrl_c_in_a_backward_stops_the_clock(timers):
    layer = layer_of(NUM_EXPERTS, timeout_after_min_s=60.0)
    group = InterruptedGroup()
    for expert in layer.experts:
        expert.call_group = group
    y = layer(tokens())
    assert timers == []
    with pytest.raises(KeyboardInterrupt):
        y.sum().backward()
    assert [timer.is_cancelled for timer in timers] == [True]


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
def test_a_compiled_backward_is_waited_for_as_others_are():
    layer, x = layer_of(timeout_after_min_s=60.0), tokens()
    (expected,) = torch.autograd.grad(layer(x).square().sum(), x)
    with compiled_autograd._enable(torch.compile(backend="eager")):
        layer(x).square().sum().backward()
    torch.testing.assert_close(x.grad, expected)


def test_a_layer_that_has_seen_failures_can_be_copied_and_saved():
    layer, x = layer_of(3, fails={0: "forward"}), tokens()
    layer(x)
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x), layer(x))
    assert twin.experts[0].num_calls == 1, "the copy leaves it alone as well"
    twin.experts[1].fails_in = "forward"
    twin(x), layer(x), layer(x)
    assert [expert.num_calls for expert in layer.experts][:2] == [1, 4], (
        "what fails there is not left alone here"
    )
    assert layer.state_dict().keys() == layer_of(on_failure="raise").state_dict().keys()


def test_a_layer_that_is_loaded_on_another_machine_leaves_nobody_alone(clock):
    layer, x = layer_of(fails={0: "forward"}), tokens()
    layer(x)
    saved = pickle.dumps(layer)
    clock.now_s = 0.0  # it was just started
    loaded = pickle.loads(saved)
    loaded.experts[0].fails_in = ""
    assert torch.equal(loaded(x), layer_of(on_failure="raise")(x))
