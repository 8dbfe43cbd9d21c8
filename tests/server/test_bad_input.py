"""A call that is wrong is refused by itself: a clear error, nothing changed, and the server lives on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import grpc
import pytest
import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from moe_autograd.errors import ServerUnavailableError
from moe_autograd.moe.experts import FeedForwardExpert
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire import methods
from moe_autograd.wire.framing import seal, unseal
from moe_autograd.wire.parcels import ParcelWriter
from tests.support.hosting import sgd
from tests.support.parcels import messages_of
from tests.support.servers import START_S, WireClient, tokens

D = 16
_UPDATE = pb.StateUpdate(client_id=b"x", sequence=1, num_entries=1)
_ENTRY = pb.StateEntry(expert="ffn.0", key="up.bias")


class Grumpy(nn.Module):
    """Raises on its first value being negative; returns no tensors where it is large."""

    def forward(self, x: Tensor) -> Any:
        if x[0, 0] < 0:
            raise ArithmeticError("I do not like this")
        if x[0, 0] > 10:
            return x, [x]
        return "text" if x[0, 0] > 5 else x * 2


@pytest.fixture(scope="module")
def server() -> Iterator[ExpertsServer]:
    torch.manual_seed(0)
    experts = {"ffn.0": FeedForwardExpert(D), "grumpy": Grumpy(), "custom": _first_layer_is_linear()}
    experts["words"] = nn.Embedding(9, D)
    with ExpertsServer(experts, optimizer=sgd) as server:
        yield server


@pytest.fixture
def client(server: ExpertsServer) -> Iterator[WireClient]:
    with WireClient(server.address) as client:
        client.sequence = server.num_updates["ffn.0"] * 1000
        yield client
        assert client.forward("ffn.0", tokens(3, D)).code == "OK", "the server lives on"


def _first_layer_is_linear() -> nn.Module:
    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    return Custom()


@pytest.mark.parametrize(
    ("expert", "x", "code", "text"),
    [
        ("ffn.7", tokens(3, D), "EXPERT_NOT_FOUND", "one of its 4 experts (custom, ffn.0, grumpy, words), got 'ffn.7'"),
        ("ffn.0", tokens(3, D + 1), "INVALID_CALL", "expected shape (num_tokens, 16), got (3, 17)"),
        ("ffn.0", tokens(3, D).double(), "INVALID_CALL", "expected dtype torch.float32, got torch.float64"),
        ("ffn.0", tokens(3, D).long(), "INVALID_CALL", "expected dtype torch.float32, got torch.int64"),
        ("ffn.0", tokens(D), "INVALID_CALL", "expected shape (num_tokens, 16), got (16,)"),
        ("ffn.0", tokens(2, 3, D), "INVALID_CALL", "expected shape (num_tokens, 16), got (2, 3, 16)"),
        ("ffn.0", torch.tensor(1.0), "INVALID_CALL", "expected shape (num_tokens, 16), got ()"),
        ("ffn.0", torch.full((3, D), float("nan")), "INVALID_CALL", "expected finite values, got 48 of 48"),
        ("ffn.0", torch.full((3, D), float("inf")), "INVALID_CALL", "expected finite values, got 48 of 48"),
        ("grumpy", torch.full((3, D), complex(1, torch.nan)), "INVALID_CALL", "expected finite values, got 48 of 48"),
        ("custom", tokens(3, D + 1), "INVALID_CALL", "got (3, 17)"),
        ("custom", tokens(3, D + 1), "INVALID_CALL", "mat1 and mat2 shapes"),
        ("words", torch.tensor([2, 9]), "EXPERT_FAILED", "its module raised IndexError: index out of range"),
        ("grumpy", -torch.ones(3, D), "EXPERT_FAILED", "its module raised ArithmeticError: I do not like this"),
        ("grumpy", 9 * torch.ones(3, D), "EXPERT_FAILED", "a sequence of tensors from its module, got str."),
        ("grumpy", 11 * torch.ones(3, D), "EXPERT_FAILED", "from its module, got a tuple of Tensor, list."),
    ],
    ids=[f"wrong {n}" for n in range(16)],
)  # fmt: skip
def test_a_wrong_forward_is_refused_and_its_neighbours_are_served(
    client: WireClient, expert: str, x: Tensor, code: str, text: str
) -> None:
    good = [client.forward_call("ffn.0", tokens(2, D), call_id=n) for n in (1, 2)]
    bad = client.forward_call(expert, x, call_id=3)
    answers = client.stream("Forward", [good[0], bad, good[1]])
    assert [a.code for a in answers] == ["OK", code, "OK"]
    assert text in answers[1].text


def test_a_finite_input_whose_sum_overflows_is_served(client: WireClient) -> None:
    assert client.forward("grumpy", torch.full((3, D), 1e38)[:, :1].sign() * 4).code == "OK"
    assert client.forward("ffn.0", torch.full((100, D), 3e38) * torch.tensor([[1.0]]) * 0.9).code == "OK"


def test_no_input_and_a_missing_input_are_refused(client: WireClient) -> None:
    assert "at least one tensor, got none" in client.forward("ffn.0").text
    head, _ = client.forward_call("ffn.0", tokens(3, D))
    assert "got None among them" in client.stream("Forward", [(head, [None])])[0].text


@pytest.mark.parametrize(
    ("grads", "text"),
    [
        ((tokens(3, D + 1),), "expected grad_outputs[0] of the output's shape (3, 16), got (3, 17)"),
        ((tokens(4, D),), "expected grad_outputs[0] of the output's shape (3, 16), got (4, 16)"),
        ((tokens(3, D), tokens(3, D)), "expected 1 grad_outputs"),
        ((), "expected 1 grad_outputs"),
        ((torch.full((3, D), float("nan")),), "grad_outputs 0: expected finite values"),
        ((torch.full((3, D), 3e38),), "expected finite values"),  # the weights' gradients overflow
    ],
    ids=["width", "rows", "too many", "none", "nan", "overflow"],
)
def test_a_wrong_gradient_is_refused_and_changes_nothing_bit_for_bit(
    client: WireClient, grads: tuple[Tensor, ...], text: str
) -> None:
    client.forward("ffn.0", tokens(3, D))
    before = client.get_state()
    answer = client.backward("ffn.0", *grads, keep_graph=False)
    assert (answer.code, text in answer.text) == ("INVALID_CALL", True), answer.text
    assert client.backward("ffn.0", tokens(3, D), wants_weight_grads=False).code == "OK", (
        "the forward is kept"
    )
    num_before = client.num_updates()
    client.step("ffn.0")
    assert client.num_updates() == num_before, "nothing was gathered"
    torch.testing.assert_close(client.get_state(), before, rtol=0, atol=0)


def test_after_a_refused_gradient_the_gathered_ones_are_what_they_were(client: WireClient) -> None:
    client.zero_grad()
    for call_id in (1, 2):
        client.forward("ffn.0", tokens(3, D), call_id=call_id)
    before = client.get_state()["ffn.0"]
    client.backward("ffn.0", tokens(3, D), call_id=1)
    assert client.backward("ffn.0", torch.full((3, D), float("inf")), call_id=2).code == "INVALID_CALL"
    client.step("ffn.0")
    client.zero_grad()
    local = FeedForwardExpert(D)
    local.load_state_dict(before)
    optimizer = sgd(local.parameters())
    local(tokens(3, D)).backward(tokens(3, D))
    optimizer.step()
    torch.testing.assert_close(client.get_state()["ffn.0"], local.state_dict())


def test_a_backward_of_a_forward_that_never_was_asks_for_inputs(client: WireClient) -> None:
    assert client.backward("ffn.0", tokens(3, D), call_id=404).code == "INPUTS_NEEDED"


def test_a_step_of_an_unknown_expert_fails_alone(client: WireClient) -> None:
    known, unknown = client.step("ffn.0", "ffn.9").updates
    assert known.status.code == pb.OK
    assert unknown.status.code == pb.EXPERT_NOT_FOUND


def test_a_client_whose_name_is_too_long_to_be_remembered_is_refused_and_changes_nothing(
    server: ExpertsServer,
) -> None:
    with WireClient(server.address, client_id=b"x" * 257) as client:
        before = client.num_updates()
        [step], [zero_grad] = client.step("ffn.0").updates, client.zero_grad("ffn.0").updates
        backward = client.backward("ffn.0", tokens(3, D), inputs=[tokens(3, D)])
        assert client.num_updates() == before
    for status in (step.status, zero_grad.status, backward.result.status):
        assert (status.code, status.message) == (
            pb.INVALID_CALL,
            "client_id: expected at most 256 bytes, got 257. Choose a shorter one.",
        )


def test_a_step_that_names_an_expert_twice_is_refused(client: WireClient) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        client.step("ffn.0", "ffn.0")
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda state: state.pop("up.bias"), "missing=['up.bias']"),
        (lambda state: state.update(extra=torch.zeros(1)), "unknown=['extra']"),
        (
            lambda state: state.update({"up.bias": torch.zeros(3)}),
            "expected (64,) of torch.float32, got (3,)",
        ),
        (lambda state: state.update({"up.bias": torch.zeros(64).double()}), "got (64,) of torch.float64"),
    ],
    ids=["missing", "unknown", "shape", "dtype"],
)
def test_a_state_that_does_not_fit_is_refused_with_both_sides_named(
    client: WireClient, change: Any, text: str
) -> None:
    before = client.get_state("ffn.0", "custom")
    states = {"custom": {k: v + 1 for k, v in before["custom"].items()}, "ffn.0": dict(before["ffn.0"])}
    change(states["ffn.0"])
    with pytest.raises(grpc.RpcError) as refused:
        client.set_state(states)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert text in refused.value.details()
    torch.testing.assert_close(client.get_state("ffn.0", "custom"), before, rtol=0, atol=0)


def test_a_state_of_which_entries_are_missing_is_refused(client: WireClient) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        client.set_state(client.get_state("ffn.0"), num_entries=99)
    assert "expected 99 entries, got 4" in refused.value.details()


@pytest.mark.parametrize(
    ("heads", "got"),
    [
        ([_ENTRY], "StateEntry with 1"),
        ([_UPDATE, _UPDATE], "StateUpdate with 1"),
        ([_UPDATE, pb.ForwardCall(expert="ffn.0")], "ForwardCall with 1"),
    ],
    ids=["no update", "two updates", "a call"],
)
def test_what_is_no_state_is_refused_and_named(client: WireClient, heads: list[Any], got: str) -> None:
    writer = ParcelWriter()
    for head in heads:
        writer.add(head, [tokens(64)])
    with pytest.raises(grpc.RpcError) as refused:
        client.channel.stream_unary(methods.path("SetState"))(messages_of(writer), timeout=START_S)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert f"StateEntry parcels of one tensor each, got {got}. The client" in refused.value.details()


class Freed(nn.Module):
    """Returns a tensor without its memory, as a sharded module may that has let go of it."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        y.untyped_storage().resize_(0)
        return y


class Asking(nn.Module):
    """Asks another server, which is not there."""

    def forward(self, x: Tensor) -> Tensor:
        raise ServerUnavailableError("expert 'elsewhere': expected a server, got none.")


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (
            Freed(),
            "an output of its module: tensor: expected memory, got (3, 16) without: its storage was freed.",
        ),
        (
            Asking(),
            "its module raised ServerUnavailableError: expert 'elsewhere': expected a server, got none.",
        ),
    ],
    ids=["freed", "another server"],
)
def test_what_is_wrong_with_one_expert_is_its_own_failure_and_not_that_of_its_server(
    module: nn.Module, text: str
) -> None:
    with (
        ExpertsServer({"bad": module, "good": nn.Linear(D, D)}) as server,
        WireClient(server.address) as client,
    ):
        calls = [client.forward_call(name, tokens(3, D), call_id=i) for i, name in enumerate(["bad", "good"])]
        bad, good = client.stream("Forward", calls)
    assert (bad.code, text in bad.text, good.code) == ("EXPERT_FAILED", True, "OK"), bad.text


@pytest.mark.parametrize(
    ("surplus", "num_come"),
    [({"up.bias": torch.zeros(1 << 20)}, 4), ({f"{n}": torch.zeros(1) for n in range(100)}, 73)],
    ids=["bytes", "entries"],
)
def test_a_state_far_larger_than_the_experts_own_is_refused_while_it_comes(
    client: WireClient, surplus: dict[str, Tensor], num_come: int
) -> None:
    state = client.get_state("ffn.0")["ffn.0"]
    with pytest.raises(grpc.RpcError) as refused:
        client.set_state({"ffn.0": state | surplus})
    told = f"expected about 4 entries of 1065600 bytes at most, got {num_come} of "
    assert told in refused.value.details()


def test_a_state_with_none_in_the_place_of_a_tensor_is_refused(client: WireClient) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        client.set_state({"ffn.0": {"up.bias": cast(Tensor, None)}})
    assert "state of expert 'ffn.0': expected a tensor, got None" in refused.value.details()


def test_a_state_with_a_key_twice_is_refused_and_changes_nothing(client: WireClient) -> None:
    before = client.get_state("ffn.0")
    writer = ParcelWriter()
    entries = [*before["ffn.0"].items(), ("up.bias", torch.zeros(64))]
    writer.add(pb.StateUpdate(client_id=b"x", sequence=1, num_entries=len(entries)))
    for key, tensor in entries:
        writer.add(pb.StateEntry(expert="ffn.0", key=key), [tensor])
    with pytest.raises(grpc.RpcError) as refused:
        client.channel.stream_unary(methods.path("SetState"))(messages_of(writer), timeout=START_S)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "state of expert 'ffn.0': expected each key once, got 'up.bias' again" in refused.value.details()
    torch.testing.assert_close(client.get_state("ffn.0"), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("is_twice", "versions", "text"),
    [
        (True, {"": 1}, "expected versions with one entry alone, got some again with"),
        (False, {"": 1, "up": 2, "down": 0, "weight": 3, "up.bias": -1, "\0..": 1 << 62}, None),
    ],
    ids=["twice", "of modules that are not there"],
)
def test_versions_of_modules_are_taken_once_and_of_what_is_there(
    client: WireClient, is_twice: bool, versions: dict[str, int], text: str | None
) -> None:
    """Those of others are left out: nothing could be done with them."""
    before = client.get_state("ffn.0")
    writer = ParcelWriter()
    writer.add(pb.StateUpdate(client_id=b"v", sequence=1 + is_twice, num_entries=4))
    for is_later, (key, tensor) in enumerate(before["ffn.0"].items()):
        told = {} if is_later and not is_twice else versions
        writer.add(pb.StateEntry(expert="ffn.0", key=key, versions=told), [tensor])
    send = client.channel.stream_unary(methods.path("SetState"))
    if text is None:
        (update,) = unseal(pb.UpdateReply, send(messages_of(writer), timeout=START_S)).updates
        assert update.status.code == pb.OK, update.status.message
    else:
        with pytest.raises(grpc.RpcError) as refused:
            send(messages_of(writer), timeout=START_S)
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert text in refused.value.details()
    torch.testing.assert_close(client.get_state("ffn.0"), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("rpc", "request_", "text"),
    [
        (
            "Step",
            pb.UpdateRequest(
                client_id=b"x", sequence=1, experts=["ffn.0"], gathered=[pb.GatheredBackwards()] * 2
            ),
            "step: expected a count of backwards for each of 1 experts or for none, got 2",
        ),
        (
            "Forget",
            pb.ForgetRequest(client_id=b"x", experts=["ffn.0", "custom"], call_ids=[1]),
            "forget: expected a call of each of 2 experts, got 1",
        ),
    ],
    ids=["step", "forget"],
)
def test_lists_of_different_lengths_are_refused(
    client: WireClient, rpc: str, request_: Any, text: str
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        client.unary(rpc, seal(request_))
    assert (refused.value.code(), text in refused.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, True)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_gradients_of_whole_numbers_are_refused(client: WireClient, phase: str) -> None:
    ids = torch.tensor([1, 2])
    if phase == "forward":
        answer = client.forward("words", ids, input_requires_grad=[True])
    else:
        answer = client.backward("words", tokens(2, D), call_id=404, inputs=[ids], wants_input_grads=[True])
    assert (answer.code, "expected floating inputs where gradients are wanted" in answer.text) == (
        "INVALID_CALL",
        True,
    ), answer.text
