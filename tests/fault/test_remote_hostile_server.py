"""A server that lies: what it sends is checked as strictly as what a client sends, and is an error, never a number."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from collections.abc import Iterator

import grpc
import pytest
import torch

from moe_autograd import MixtureOfExperts, TopKRouter
from moe_autograd.errors import CorruptDataError, ExpertFailedError, InputsNeededError, RemoteError
from moe_autograd.remote import RemoteExpert, RemoteOptimizer, RetryPolicy, connect
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.framing import seal
from tests.support.gated import Waiting
from tests.support.liar import BIAS, WEIGHT, Liar, X, entry, parcels, results, state
from tests.support.servers import wait_until

ONCE = RetryPolicy(patience_s=0.0, max_retries=0)


def flipped(messages: list[bytes]) -> list[bytes]:
    return [bytes([*message[:-1], message[-1] ^ 1]) for message in (bytes(message) for message in messages)]


@pytest.fixture
def liar() -> Iterator[Liar]:
    with Liar() as liar:
        yield liar


@pytest.fixture
def expert(liar) -> Iterator[RemoteExpert]:
    with connect(liar.address, timeout_s=60.0, retry=ONCE, max_tensor_bytes=1024) as experts:
        yield experts["ffn.0"]


def test_it_is_believed_where_it_does_not_lie(expert):
    x = X.clone().requires_grad_()
    expert(x).sum().backward()
    assert torch.equal(x.grad, X)


def test_a_way_of_updating_that_no_client_knows_is_an_error_of_the_server(liar):
    liar.hosted.update = 7
    expected = rf"expert 'ffn\.0' at {liar.address}: expected it to be updated on_step, .*, got number 7\."
    with pytest.raises(RemoteError, match=expected):
        connect(liar.address, retry=ONCE)
    info = subprocess.run(
        [sys.executable, "-m", "experts_server", "info", liar.address],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (info.returncode, info.stderr) == (0, "")
    assert "number 7" in info.stdout


def test_nobody_waits_for_the_end_of_a_stream_that_has_brought_everything(liar, expert):
    liar.may_end.clear()
    x = X.clone().requires_grad_()
    expert(x).sum().backward()
    assert [stream.is_active() for stream in liar.streams] == [True, True]
    liar.may_end.set()
    for _ in range(20):
        expert(x)
    assert len(expert.call_group._delivery._channel(liar.address)._left) <= 2  # the other ends were taken


def test_streams_that_never_end_hold_up_nobody(liar):
    liar.may_end.clear()
    with connect(liar.address, timeout_s=1000.0, retry=ONCE) as experts:
        results = Waiting(lambda: [experts["ffn.0"](X) for _ in range(5)]).result()
    assert len(results) == 5


def num_tags() -> int:
    """Count what grpc waits for; it keeps 25 KB for ever of each call of which something is left."""
    gc.collect()
    return sum(type(thing).__name__ == "_BatchOperationTag" for thing in gc.get_objects())


def test_streams_leave_nothing_behind_also_while_an_exception_is_handled(expert):
    num_before = num_tags()
    try:
        raise LookupError("a training that goes on in an except block")
    except LookupError:
        for _ in range(100):
            expert(X)
    wait_until(lambda: num_tags() < num_before + 50)


def test_a_stream_that_is_given_up_leaves_nothing_behind(liar, expert):
    num_before = num_tags()
    liar.forward = lambda call: flipped(results((call, [X])))
    for _ in range(100):
        with pytest.raises(CorruptDataError):
            expert(X)
    wait_until(lambda: num_tags() < num_before + 50)


@pytest.mark.parametrize(
    "lie",
    [
        lambda call: [b"no message of ours"],
        lambda call: [b""],
        lambda call: flipped(results((call, [X]))),
        lambda call: results((call + 1, [X])),
        lambda call: results((call, [torch.ones(1 << 20)]))[:1],
        lambda call: results((call, [torch.ones(257)])),
    ],
    ids=[
        "no message",
        "nothing in it",
        "a bit is wrong",
        "another call",
        "cut off",
        "above the limit",
    ],
)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_what_is_wrong_with_its_messages_is_found(liar, expert, phase, lie):
    x = X.clone().requires_grad_()
    if phase == "forward":
        liar.forward = lie
        with pytest.raises(CorruptDataError, match=r"expert 'ffn\.0' at 127\.0\.0\.1:\d+, forward"):
            expert(x)
    else:
        y = expert(x)
        liar.backward = lie
        with pytest.raises(CorruptDataError, match=r"expert 'ffn\.0' at 127\.0\.0\.1:\d+, backward"):
            y.sum().backward()
        assert x.grad is None


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_an_answer_that_is_none_is_an_error(liar, expert, phase):
    x = X.clone().requires_grad_()
    if phase == "forward":
        liar.forward = lambda call: []
        with pytest.raises(RemoteError, match="expected a result, got none"):
            expert(x)
    else:
        y = expert(x)
        liar.backward = lambda call: []
        with pytest.raises(RemoteError, match="expected a result, got none"):
            y.sum().backward()


@pytest.mark.parametrize(
    ("outputs", "is_sequence"),
    [([], False), ([None], False), ([X, X], False), ([None], True), ([X, None], True)],
    ids=["nothing", "None", "two", "a sequence of None", "a sequence with None"],
)
@pytest.mark.parametrize("wants_grad", [True, False])
def test_outputs_that_no_expert_returns_are_refused(liar, expert, outputs, is_sequence, wants_grad):
    liar.forward = lambda call: results((call, outputs), is_sequence=is_sequence)
    with pytest.raises(
        CorruptDataError, match=r"expert 'ffn\.0' at 127\.0\.0\.1:\d+, forward: expected .*, got \["
    ):
        expert(X.clone().requires_grad_(wants_grad))


@pytest.mark.parametrize("uses", [[1], [0, 1, 1], [1, 2], [7, 0]])
def test_uses_of_outputs_that_are_not_there_are_refused(liar, expert, uses):
    liar.forward = lambda call: results((call, [X, X]), is_sequence=True, uses=uses)
    with pytest.raises(CorruptDataError, match=r"forward: expected pairs of 2 outputs, got \["):
        expert(X.clone().requires_grad_())


def test_uses_of_whole_numbers_or_of_an_output_by_itself_are_none(liar, expert):
    whole = torch.ones(2, dtype=torch.int64)
    liar.forward = lambda call: results((call, [X, whole, X]), is_sequence=True, uses=[1, 0, 0, 1, 2, 2])
    one, _, other = expert(X.clone().requires_grad_())
    other.retain_grad()
    liar.backward = lambda call: results((call, [X]))
    (one.sum() + other.sum()).backward()
    assert torch.equal(other.grad, torch.ones_like(X))


def test_outputs_that_no_expert_returns_are_a_failure_that_a_layer_may_drop(liar, expert):
    liar.forward = lambda call: results((call, [X, X]))
    layer = MixtureOfExperts(TopKRouter(4, 1, top_k=1), [expert], on_failure="drop", allow_zero_outputs=True)
    y, routing = layer(X, return_routing=True)
    assert torch.equal(y, torch.zeros_like(X))
    (failure,) = routing.failures
    assert "CorruptDataError" in failure.reason


@pytest.mark.parametrize(
    "grads",
    [[torch.ones(2, 5)], [X.double()], [X, X], [], [torch.ones(4, 2)]],
    ids=["shape", "dtype", "one more", "one less", "turned"],
)
def test_gradients_that_do_not_fit_their_inputs_are_refused(liar, expert, grads):
    x = X.clone().requires_grad_()
    y = expert(x)
    liar.backward = lambda call: results((call, grads))
    with pytest.raises(CorruptDataError, match="expected gradients"):
        y.sum().backward()
    assert x.grad is None


def test_an_input_for_which_it_has_no_gradient_gets_none(liar, expert):
    x = X.clone().requires_grad_()
    y = expert(x)
    liar.backward = lambda call: results((call, [None]))
    y.sum().backward()
    assert x.grad is None


def test_its_weights_are_believed_where_they_are_whole(expert):
    torch.testing.assert_close(expert.state_dict(), dict([WEIGHT, BIAS]))


@pytest.mark.parametrize(
    "lie",
    [
        [],
        state(WEIGHT),
        state(WEIGHT, num_entries=1),
        state(num_entries=0),
        state(WEIGHT, BIAS, ("more", torch.ones(1))),
        state(WEIGHT, WEIGHT),
        state(WEIGHT, BIAS, expert="ffn.1"),
        state(WEIGHT, BIAS) + state(WEIGHT, BIAS),
        state(("weight", torch.ones(4, 2)), BIAS),
        state(("weight", torch.ones(3, 4)), BIAS),
        state(("weight", torch.ones(12)), BIAS),
        state(("weight", torch.ones(4, 3).double()), BIAS),
        state(("weights", torch.ones(4, 3)), BIAS),
        state(("weight", None), BIAS),
        state(("weight", torch.ones(16, 17)), BIAS),
        state(("weight", torch.ones(1 << 20)), BIAS)[:1],
        flipped(state(WEIGHT, BIAS)),
        results((1, [X])),
        state(WEIGHT, BIAS, WEIGHT, num_entries=3),
        parcels((pb.StateUpdate(num_entries=0), []), (pb.StateUpdate(num_entries=0), [])),
        parcels((pb.StateUpdate(num_entries=2), []), (pb.StateEntry(expert="ffn.0", key="weight"), [X, X])),
        parcels(
            (pb.StateUpdate(num_entries=2), []), *[entry(*one, versions={"": 1}) for one in (WEIGHT, BIAS)]
        ),
        parcels((pb.StateUpdate(num_entries=2), []), entry(*WEIGHT, versions={"up": 1}), entry(*BIAS)),
        parcels((pb.StateUpdate(num_entries=2), []), entry(*WEIGHT, versions={"weight": 1}), entry(*BIAS)),
        [b"no message of ours"],
    ],
    ids=[
        "nothing",
        "an entry less than it says",
        "an entry less, and it says so",
        "none, and it says so",
        "an entry more",
        "an entry twice",
        "another expert",
        "all of it twice",
        "shape",
        "turned",
        "flat",
        "dtype",
        "another key",
        "no tensor",
        "above the limit",
        "cut off",
        "a bit is wrong",
        "another message",
        "an entry again",
        "another expert's beside it",
        "two tensors at once",
        "versions twice",
        "the version of a module that is not there",
        "the version of a tensor",
        "no message",
    ],
)
def test_weights_that_are_not_whole_are_refused(liar, expert, lie):
    liar.state = lie
    with pytest.raises(CorruptDataError, match=rf"server at {liar.address}, state_dict, after"):
        expert.state_dict()


def test_weights_above_the_clients_limit_are_not_asked_for_again(liar):
    liar.state = state(("weight", torch.ones(16, 17)), BIAS)
    with connect(liar.address, timeout_s=60.0, max_tensor_bytes=1024) as experts:
        with pytest.raises(CorruptDataError, match="expected at most 1024 bytes, got") as raised:
            experts.state_dict()
        assert not hasattr(raised.value, "__notes__"), "it was given up at once"


def test_that_the_retry_budget_is_used_up_is_said_though_nothing_was_tried_again(liar):
    liar.state = flipped(state(WEIGHT, BIAS))
    policy = RetryPolicy(budget=0.0)
    with connect(liar.address, retry=policy) as experts, pytest.raises(CorruptDataError) as raised:
        experts.state_dict()
    said = "Given up after 0 retries: the budget of connect's RetryPolicy, which all calls share, is used up."
    assert raised.value.__notes__ == [said]


def test_what_is_said_of_other_weights_is_in_one_line_and_says_what_was_expected(liar, expert):
    liar.state = parcels((pb.StateEntry(expert="ffn.0", key="weight"), [WEIGHT[1]]))
    said = r"expected the state of expert 'ffn\.0', got StateEntry 'weight' of expert 'ffn\.0' with 1 tensors"
    with pytest.raises(CorruptDataError, match=rf"^.*: {said}\. The server is broken\.\Z"):
        expert.state_dict()


def test_entries_that_no_layout_has_are_not_gathered_up_to_the_number_that_it_says(liar, expert):
    liar.state = state(("x.0", torch.ones(1)), ("x.1", torch.ones(1)), num_entries=1 << 40)
    with pytest.raises(
        CorruptDataError, match=r"expected \d+ more entries of expert .*got StateEntry 'x\.0'"
    ):
        expert.state_dict()


def test_a_result_of_another_call_is_named_by_its_number(liar, expert):
    liar.forward = lambda call: results((call + 7, [X]))
    with pytest.raises(CorruptDataError, match=r"expected that of a call we made, got that of call 7\. The"):
        expert(X)


@pytest.mark.parametrize("names", [[], ["ffn.1"], ["ffn.0", "ffn.0"]])
def test_weights_of_which_it_says_nothing_count_as_not_set(liar, expert, names):
    weights = dict([WEIGHT, BIAS])
    expert.load_state_dict(weights)
    liar.reply = seal(pb.UpdateReply(updates=[pb.ExpertUpdate(expert=name) for name in names]))
    with pytest.raises(
        CorruptDataError, match=rf"expected answers for \['ffn\.0'\], got {re.escape(str(names))}"
    ):
        expert.load_state_dict(weights)


def test_a_second_result_of_a_call_does_not_take_the_place_of_the_first(liar, expert):
    liar.forward = lambda call: results((call, [X]), (call, [2 * X]))
    assert torch.equal(expert(X), X)


def test_inputs_that_a_forward_has_brought_already_are_not_sent_again(liar, expert):
    status = pb.Status(code=pb.INPUTS_NEEDED, message="gone")
    liar.forward = lambda call: parcels((pb.CallResult(call=call, status=status), []))
    with pytest.raises(InputsNeededError, match=r"expert 'ffn\.0' at 127\.0\.0\.1:\d+, forward.*: gone"):
        expert(X)


def test_a_result_that_ends_in_the_middle_says_so(liar):
    liar.forward = lambda call: results((call, [torch.ones(1 << 20)]))[:-1]
    with (
        connect(liar.address, timeout_s=60.0, retry=ONCE) as experts,
        pytest.raises(CorruptDataError, match="expected the rest of 1 parcels, got its end"),
    ):
        experts["ffn.0"](X)


def test_an_answer_that_is_none_is_asked_for_again(liar):
    liar.forward = lambda call: results((call, [X])) if len(liar.streams) > 1 else []
    with connect(liar.address, timeout_s=60.0) as experts:
        assert torch.equal(experts["ffn.0"](X), X)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_fault_of_its_own_is_told_of_and_not_asked_for_again(liar, phase):
    status = pb.Status(code=pb.INTERNAL, message="a bug")
    setattr(liar, phase, lambda call: parcels((pb.CallResult(call=call, status=status), [])))
    with connect(liar.address, timeout_s=60.0) as experts:
        with pytest.raises(RemoteError, match=rf"expert 'ffn\.0' at {liar.address}, {phase}, .*: a bug"):
            experts["ffn.0"](X).sum().backward()
        assert len(liar.streams) == (1 if phase == "forward" else 2)


def test_what_grpc_breaks_off_is_asked_for_again(liar):
    """It says so itself, with a code that a server's own fault has too."""
    liar.breaks_off = ["Info", "GetState"]
    with connect(liar.address, timeout_s=60.0) as experts:
        assert torch.equal(experts.state_dict()["ffn.0.weight"], WEIGHT[1])
    assert liar.breaks_off == []


@pytest.mark.parametrize(
    ("code", "is_raised"), [("INVALID_CALL", True), ("PERMISSION_DENIED", True), ("EXPERT_FAILED", False)]
)
def test_an_update_that_it_refuses_is_raised_also_by_an_optimizer_that_drops(liar, expert, code, is_raised):
    optimizer = RemoteOptimizer([expert], on_failure="drop")
    expert(X.clone().requires_grad_()).sum().backward()
    status = pb.Status(code=pb.Code.Value(code), message="no")
    liar.reply = seal(pb.UpdateReply(updates=[pb.ExpertUpdate(expert="ffn.0", status=status)]))
    if is_raised:
        with pytest.raises(RemoteError, match=r"expert 'ffn\.0' at .*, step, .*: no"):
            optimizer.step()
    else:
        optimizer.step()
    assert [type(failure) for failure in optimizer.failures] == ([] if is_raised else [ExpertFailedError])


@pytest.mark.parametrize("code", ["INVALID_ARGUMENT", "UNAVAILABLE", "DATA_LOSS", "DEADLINE_EXCEEDED"])
def test_it_is_told_once_more_what_to_forget_where_that_may_not_have_arrived(liar, expert, code):
    liar.forgets = grpc.StatusCode[code]
    connection = expert._connection
    expert(X)  # its graph goes
    connection.left_forwards.tell()
    wait_until(lambda: not connection._delivery._channel(liar.address)._told)
    wait_until(lambda: len(connection.left_forwards) == (code != "INVALID_ARGUMENT"), patience_s=20.0)
