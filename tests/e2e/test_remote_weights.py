"""The weights of hosted experts from here: fetched, set, and saved with the model that they are part of."""

from __future__ import annotations

import copy
import functools
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from experts_server import ExpertsServer
from moe_autograd.errors import InvalidCallError
from moe_autograd.remote import connect
from tests.support.limits_page import of
from tests.support.proxy import Proxy


def make_modules(seed: int) -> dict[str, nn.Module]:
    torch.manual_seed(seed)
    modules: dict[str, nn.Module] = {f"ffn.{index}": nn.Linear(4, 4) for index in (1, 10)}
    modules["norm"] = nn.BatchNorm1d(4)
    modules["large"] = nn.Linear(600, 1100)  # more than one part
    return modules


def flat(modules: dict[str, nn.Module]) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{key}": value
        for name, module in modules.items()
        for key, value in module.state_dict().items()
    }


@pytest.fixture
def modules():
    return make_modules(0)


@pytest.fixture
def server(modules):
    with ExpertsServer(modules) as server:
        yield server


@pytest.fixture
def experts(server):
    with connect(server.address) as experts:
        yield experts


def test_state_dict_is_what_the_modules_have(experts, modules):
    torch.testing.assert_close(experts.state_dict(), flat(modules), rtol=0, atol=0)


def test_load_state_dict_sets_it(experts, modules):
    other = make_modules(1)
    experts.load_state_dict(flat(other))
    torch.testing.assert_close(flat(modules), flat(other), rtol=0, atol=0)


def test_several_servers_and_replicas_are_all_set(modules):
    replica, other = make_modules(2), make_modules(1)
    with (
        ExpertsServer(modules | {"first": nn.Linear(2, 2)}) as one,
        ExpertsServer(replica | {"second": nn.Linear(2, 2)}) as two,
        connect([one.address, two.address]) as experts,
    ):
        assert {"first.weight", "second.weight", *flat(modules)} <= experts.state_dict().keys()
        experts.load_state_dict(flat(other))
    torch.testing.assert_close(flat(modules), flat(other), rtol=0, atol=0)
    torch.testing.assert_close(flat(replica), flat(other), rtol=0, atol=0)


def test_replicas_of_other_dtypes_are_all_set_each_in_its_own():
    """Whichever of them the client takes for the expert."""
    replicas = [nn.Linear(4, 4).to(dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16)]
    with ExitStack() as stack:
        servers = [stack.enter_context(ExpertsServer({"e": replica})) for replica in replicas]
        for value, server in enumerate(servers):
            others = [other.address for other in servers if other is not server]
            with connect([server.address, *others]) as experts:
                state = experts.state_dict()
                experts.load_state_dict(
                    {key: torch.full_like(tensor, value) for key, tensor in state.items()}
                )
            assert all((tensor == value).all() for replica in replicas for tensor in replica.parameters())
    assert [replica.weight.dtype for replica in replicas] == [torch.float32, torch.float64, torch.bfloat16]


def test_a_part_of_the_experts_may_be_set(experts, modules):
    before = copy.deepcopy(modules["ffn.10"].state_dict())
    experts.load_state_dict({"ffn.1.weight": torch.ones(4, 4), "ffn.1.bias": torch.zeros(4)})
    assert torch.equal(modules["ffn.1"].weight, torch.ones(4, 4))
    torch.testing.assert_close(modules["ffn.10"].state_dict(), before)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"ffn.1.weight": torch.ones(4, 4)}, InvalidCallError),
        ({"ffn.1.weight": torch.ones(4, 5), "ffn.1.bias": torch.ones(4)}, InvalidCallError),
        ({"ffn.2.weight": torch.ones(4, 4)}, KeyError),
        ({3: torch.ones(4, 4)}, KeyError),
        ({"ffn.1.weight": 3, "ffn.1.bias": torch.ones(4)}, TypeError),
        ({"ffn.1.weight": torch.ones(4, 4, device="meta"), "ffn.1.bias": torch.ones(4)}, TypeError),
        ({"ffn.1.weight": torch.ones(4, 4).to_sparse(), "ffn.1.bias": torch.ones(4)}, TypeError),
    ],
    ids=["missing key", "shape", "unknown expert", "no text", "no tensor", "meta", "sparse"],
)
def test_weights_that_do_not_fit_change_nothing(experts, modules, bad, error):
    before = copy.deepcopy(flat(modules))
    with pytest.raises(error, match=r"expected"):
        experts.load_state_dict({"ffn.10.weight": torch.ones(4, 4), "ffn.10.bias": torch.ones(4), **bad})
    torch.testing.assert_close(flat(modules), before, rtol=0, atol=0)


def test_states_that_could_be_of_either_of_two_experts_are_refused_and_each_ones_own_is_not():
    modules = {"a": nn.Sequential(), "a.b": nn.Linear(2, 2)}
    modules["a"].add_module("b", nn.Linear(2, 2))
    with ExpertsServer(modules) as server, connect(server.address) as experts:
        load = functools.partial(experts.load_state_dict, {"a.b.weight": torch.ones(2, 2)})
        for refused in (experts.state_dict, load):
            with pytest.raises(ValueError, match=r"experts 'a' and 'a\.b': .* got 'a\.b\.weight'"):
                refused()
        experts["a"].load_state_dict({key: tensor + 1 for key, tensor in modules["a"].state_dict().items()})
        for name in modules:
            torch.testing.assert_close(experts[name].state_dict(), dict(modules[name].state_dict()))


def test_names_within_names_are_no_harm_where_keys_tell_them_apart():
    modules = {"a": nn.Linear(2, 2), "a.b": nn.Linear(2, 2), "a.b.c": nn.Linear(2, 2)}
    with ExpertsServer(modules) as server, connect(server.address) as experts:
        state = {key: tensor + 1 for key, tensor in experts.state_dict().items()}
        experts.load_state_dict(state)
    torch.testing.assert_close(flat(modules), state, rtol=0, atol=0)


def test_a_state_that_is_no_mapping_is_refused(experts):
    with pytest.raises(TypeError, match="expected a mapping of tensors, got list"):
        experts.load_state_dict([torch.ones(4)])


def test_a_model_with_remote_experts_is_saved_and_restored_as_one(experts, modules):
    model = nn.Sequential(nn.Linear(4, 4), experts["ffn.1"], experts["ffn.10"])
    local = nn.Sequential(nn.Linear(4, 4), *(copy.deepcopy(modules[name]) for name in ("ffn.1", "ffn.10")))
    saved = model.state_dict()
    assert saved.keys() == local.state_dict().keys()
    local.load_state_dict(saved)
    x = torch.randn(2, 4)
    torch.testing.assert_close(model(x), local(x))
    with torch.no_grad():
        for parameter in local.parameters():
            parameter.add_(1)
    model.load_state_dict(local.state_dict())
    torch.testing.assert_close(model(x), local(x))


def test_a_model_says_which_expert_does_not_fit(experts):
    model = nn.Sequential(experts["ffn.1"])
    with pytest.raises(RuntimeError, match=r"state of expert 'ffn\.1': expected"):
        model.load_state_dict({"0.weight": torch.ones(4, 4)})
    with pytest.raises(
        RuntimeError, match=r"expert 'ffn\.1', state of 'bias': expected a tensor, got NoneType"
    ):
        model.load_state_dict({"0.weight": torch.ones(4, 4), "0.bias": None})
    with pytest.raises(RuntimeError, match=r"expert 'ffn\.1', state of 'weight': .* got .* on meta"):
        model.load_state_dict({"0.weight": torch.ones(4, 4, device="meta"), "0.bias": torch.ones(4)})


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("of_a_model", [False, True])
def test_weights_of_another_dtype_are_converted_as_in_torch(experts, modules, dtype, of_a_model):
    here, before = copy.deepcopy(modules["norm"]), copy.deepcopy(flat(modules))
    state = {key: (3.7 * tensor + 1.9).to(dtype) for key, tensor in here.state_dict().items()}
    here.load_state_dict(state)
    if of_a_model:
        nn.Sequential(experts["norm"]).load_state_dict({f"0.{key}": tensor for key, tensor in state.items()})
    else:
        experts.load_state_dict({f"norm.{key}": tensor for key, tensor in state.items()})
    expected = before | flat({"norm": here})
    torch.testing.assert_close(flat(modules), expected, rtol=0, atol=0)
    torch.testing.assert_close(experts.state_dict(), expected, rtol=0, atol=0)


def test_weights_that_lose_their_imaginary_part_are_told_of_as_in_torch(experts, modules):
    state = {"weight": torch.full((4, 4), 1 + 2j), "bias": torch.ones(4)}
    torch.set_warn_always(True)  # else once a process
    try:
        with pytest.warns(UserWarning, match="Casting complex values to real discards the imaginary part"):
            experts["ffn.1"].load_state_dict(state)
    finally:
        torch.set_warn_always(False)
    assert torch.equal(modules["ffn.1"].weight, torch.ones(4, 4))


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_may_have_any_values_as_in_torch(experts, modules, value):
    """A buffer may be a mask of -inf; and what a run that diverged has saved can be looked at."""
    experts.load_state_dict({"ffn.1.weight": torch.full((4, 4), value), "ffn.1.bias": torch.ones(4)})
    torch.testing.assert_close(modules["ffn.1"].weight, torch.full((4, 4), value), equal_nan=True)
    torch.testing.assert_close(experts.state_dict(), flat(modules), rtol=0, atol=0, equal_nan=True)


def test_a_model_says_that_a_state_lacks_an_expert(experts, modules):
    model, before = nn.Sequential(nn.Linear(4, 4), experts["ffn.1"]), copy.deepcopy(flat(modules))
    state = {key: value for key, value in model.state_dict().items() if key.startswith("0.")}
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "1.weight", "1.bias"'):
        model.load_state_dict(state)
    result = model.load_state_dict(state, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["1.weight", "1.bias"], [])
    torch.testing.assert_close(flat(modules), before, rtol=0, atol=0)


def test_a_model_says_which_keys_an_expert_does_not_have(experts, modules):
    model = nn.Sequential(experts["ffn.1"])
    state = {"0.weight": torch.ones(4, 4), "0.bias": torch.ones(4), "0.gate": torch.ones(1)}
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "0.gate"'):
        model.load_state_dict(state)
    assert model.load_state_dict(state, strict=False).unexpected_keys == ["0.gate"]
    assert torch.equal(modules["ffn.1"].weight, torch.ones(4, 4))


class Counting(nn.Linear):
    """Has a state that is no tensor."""

    count = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16], ids=str)
def test_a_state_that_cannot_travel_is_refused_once_by_name(dtype, caplog):
    odd = torch.nn.Linear(4, 4)
    odd.register_buffer("table", torch.ones(4).to(dtype))
    plain = torch.nn.Linear(4, 4)
    with ExpertsServer({"odd": odd, "plain": plain}) as server, connect(server.address) as experts:
        torch.testing.assert_close(experts["odd"](x := torch.ones(1, 4)), odd(x))
        for fetch in (experts.state_dict, experts["odd"].state_dict):
            with pytest.raises(InvalidCallError, match=rf"'odd', state of 'table': .* got {dtype}"):
                fetch()
        torch.testing.assert_close(dict(experts["plain"].state_dict()), dict(plain.state_dict()))
    assert not [record for record in caplog.records if record.levelname == "ERROR"], (
        "it is no failure of the server"
    )


class Resizing(nn.Linear):
    """Has a buffer that gets its size from the first call, as observers of quantization-aware training have."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("seen", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.resize_(4).copy_(x.detach().amax(0))
        return super().forward(x)


class Growing(nn.Linear):
    """Has an entry from its first call on."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("seen", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.detach().amax(0)
        return super().forward(x)


@of("their `state_dict()` is refused by name from then on")
@pytest.mark.parametrize(
    ("made", "change"),
    [
        (Resizing, r"'seen': expected \(0,\) of torch.float32, got \(4,\) of torch.float32"),
        (Growing, r"expected keys .*\(missing=\[\], unknown=\['seen'\]\)"),
    ],
)
def test_a_state_that_calls_have_changed_is_refused_once_by_name(made, change, caplog):
    """It was fetched again and again for two seconds, and said to be corrupt and another configuration's."""
    odd, plain = made(), nn.Linear(4, 4)
    with ExpertsServer({"odd": odd, "plain": plain}) as server, connect(server.address) as experts:
        experts["odd"].state_dict()
        experts["odd"](torch.ones(1, 4))
        for fetch in (experts.state_dict, experts["odd"].state_dict):
            with pytest.raises(InvalidCallError, match=rf"'odd', state of another form than .*: {change}\."):
                fetch()
        torch.testing.assert_close(dict(experts["plain"].state_dict()), dict(plain.state_dict()))
    assert not [record for record in caplog.records if record.levelname == "ERROR"], (
        "it is no failure of the server"
    )


def test_a_state_of_before_is_refused_once_the_module_has_other_entries():
    """What fitted was set, and all keys were said to match."""
    module = Growing()
    with ExpertsServer({"e": module}) as server, connect(server.address) as experts:
        before = experts["e"].state_dict()
        experts["e"](torch.ones(1, 4))
        weight = module.weight.clone()
        with pytest.raises(RuntimeError, match=r"state of expert 'e': .* got others: seen\. Have its class"):
            experts["e"].load_state_dict({key: tensor + 1 for key, tensor in before.items()})
        torch.testing.assert_close(module.weight, weight, rtol=0, atol=0)


def prepared() -> nn.Module:
    quantization = pytest.importorskip("torch.ao.quantization")  # which torch is about to drop
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    module.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    return quantization.prepare_qat(module)


@pytest.mark.filterwarnings(
    "ignore:torch.ao.quantization is deprecated", "ignore:Please use quant_min and quant_max"
)
def test_a_state_prepared_for_quantization_is_fetched_and_set_where_it_was_called_when_it_was_built():
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    called, not_called = prepared(), prepared()
    called(x)
    plain = copy.deepcopy(called)
    with ExpertsServer({"called": called, "not": not_called}) as server, connect(server.address) as experts:
        before = experts["called"].state_dict()
        for expert in (experts["called"], experts["not"], plain):
            expert(2 * x)
        torch.testing.assert_close(experts["called"].state_dict(), plain.state_dict(), rtol=0, atol=0)
        with pytest.raises(
            InvalidCallError, match=r"'not', state of another form .* expected \(1,\) of .* got \(4,\)"
        ):
            experts["not"].state_dict()
        experts["called"].load_state_dict(before)
        torch.testing.assert_close(experts["called"].state_dict(), before, rtol=0, atol=0)


def test_what_is_no_tensor_of_a_state_stays_where_it_is():
    module = Counting(4, 4)
    module.count = 3
    with ExpertsServer({"e": module}) as server, connect(server.address) as experts:
        with pytest.warns(UserWarning, match="not in the state"):
            state = {key: tensor + 1 for key, tensor in experts.state_dict().items()}
        assert state.keys() == {"e.weight", "e.bias"}
        experts.load_state_dict(state)
    torch.testing.assert_close({"e.weight": module.weight, "e.bias": module.bias}, state, rtol=0, atol=0)
    assert module.count == 3


def test_what_is_no_tensor_of_a_state_is_told_of_once_for_each_class():
    """It was left out without a word."""
    modules = {f"counting.{i}": nn.Sequential(nn.Linear(4, 4), Counting(4, 4)) for i in range(3)}
    modules |= {"alone": Counting(4, 4), "plain": nn.Linear(4, 4)}
    with ExpertsServer(modules) as server, connect(server.address) as experts:
        model = nn.ModuleList([experts["plain"], experts["counting.1"], experts["counting.0"]])
        said = r"'counting\.1', state_dict: expected tensors alone, .* under 1\._extra_state \(kind='Sequential'\)"
        with pytest.warns(UserWarning, match=said) as told:
            model.state_dict()
        assert len(told) == 1
        model.state_dict()  # a warning would be an error
        with pytest.warns(UserWarning, match=r"'alone', .* under _extra_state \(kind='Counting'\)") as told:
            experts.state_dict()
        assert len(told) == 1
        experts.state_dict()


class Telling(nn.Linear):
    """Counts how often it is given weights, and tells of the first time."""

    num_loaded = 0

    def load_state_dict(self, *args, **options):
        result = super().load_state_dict(*args, **options)
        self.num_loaded += 1
        if self.num_loaded == 1:
            self.tell()
        return result


def test_weights_whose_answer_was_lost_are_set_once():
    module = Telling(4, 4)
    with (
        ExpertsServer({"e": module}) as server,
        Proxy(server.address) as proxy,
        connect(proxy.address) as experts,
    ):
        module.tell = proxy.cut
        for num_loaded in (1, 2):
            experts.load_state_dict(experts.state_dict())
            assert module.num_loaded == num_loaded
        assert proxy.num_accepted > 1


def test_gradients_after_loading_are_those_of_the_new_weights(experts, modules):
    x = torch.randn(2, 4, requires_grad=True)
    experts.load_state_dict({"ffn.1.weight": torch.eye(4), "ffn.1.bias": torch.zeros(4)})
    experts["ffn.1"](x).sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 4))
