"""Remote experts compute, and differentiate, what the same modules compute here."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from experts_server.configuration.config import LimitsConfig, ServingConfig
from moe_autograd import MixtureOfExperts, TopKRouter, parallel_apply, split_backward
from moe_autograd.errors import InvalidCallError, MoeAutogradError
from moe_autograd.remote import RemoteExperts, RemoteOptimizer, connect


class TwoInputs(nn.Module):
    """Two tensors in, two out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x) * scale, x.sum(dim=-1)


class CountOf(nn.Module):
    """A float output that can be differentiated, and a whole number that cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.weight, (x > 0).sum()


def make_modules() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "mlp": nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)),
        "linear": nn.Linear(4, 4),
        "two": TwoInputs(),
        "count": CountOf(),
        "embedding": nn.Embedding(10, 4),
        "dropout": nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)),
        "double": nn.Linear(4, 4, dtype=torch.float64),
        "bfloat16": nn.Linear(4, 4, dtype=torch.bfloat16),
    }


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1.0)


@pytest.fixture(scope="module")
def local():
    return make_modules()


@pytest.fixture(scope="module")
def server():
    with ExpertsServer(make_modules(), optimizer=sgd) as server:
        yield server


@pytest.fixture
def remote(server):
    with connect(server.address) as experts:
        yield experts


def weights_change(remote: RemoteExperts, name: str) -> bool:
    """Tell whether this client has given `name` gradients: a step is an update only then."""
    before = remote.info()[name].num_updates
    RemoteOptimizer(remote).step()
    RemoteOptimizer(remote).zero_grad()
    return remote.info()[name].num_updates > before


@pytest.fixture
def fresh():
    """A server and its experts, for tests that update weights."""
    with ExpertsServer(make_modules(), optimizer=sgd) as server, connect(server.address) as experts:
        yield experts


class TestValuesAndGradients:
    @pytest.mark.parametrize("name", ["mlp", "linear", "double", "bfloat16"])
    def test_one_input(self, local, remote, name):
        dtype = next(local[name].parameters()).dtype
        x = torch.randn(5, 4, dtype=dtype, requires_grad=True)
        twin = x.detach().clone().requires_grad_()
        expected, got = local[name](x), remote[name](twin)
        torch.testing.assert_close(got, expected)
        assert got.requires_grad
        upstream = torch.randn(5, 4, dtype=dtype)
        expected.backward(upstream)
        got.backward(upstream)
        torch.testing.assert_close(twin.grad, x.grad)

    def test_a_split_backward_gives_weights_behind_another_input_their_gradient(self, local, remote):
        """In its first part nobody asks for that input's gradient, nor ever again."""
        x, weight = torch.randn(5, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
        found = []
        for expert in (local["two"], remote["two"]):
            y = expert(x, weight.sin())[0].sum()
            (x_grad,), pending = split_backward(y, None, x, weight)
            found.append((x_grad, *pending.run()))
        torch.testing.assert_close(found[1], found[0])
        assert not weights_change(remote, "two")

    def test_under_autocast_an_expert_computes_in_its_own_dtype_and_gradients_have_the_inputs(
        self, local, remote
    ):
        x = torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True)
        twin = x.detach().clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = remote["linear"](x)
        expected = local["linear"](twin.float())
        torch.testing.assert_close(y, expected)
        y.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(x.grad, twin.grad)
        with pytest.raises(InvalidCallError, match=r"expected dtype torch\.float32, got torch\.bfloat16"):
            remote["linear"](x)
        with (
            pytest.raises(InvalidCallError, match=r"torch\.int64"),
            torch.autocast("cpu", dtype=torch.bfloat16),
        ):
            remote["linear"](x.long())

    def test_several_inputs_and_outputs(self, local, remote):
        inputs = [torch.randn(5, 4, requires_grad=True), torch.tensor(3.0, requires_grad=True)]
        twins = [x.detach().clone().requires_grad_() for x in inputs]
        expected, got = local["two"](*inputs), remote["two"](*twins)
        assert isinstance(got, tuple)
        for one, other in zip(expected, got, strict=True):
            torch.testing.assert_close(one, other)
        (expected[0].sum() + expected[1].square().sum()).backward()
        (got[0].sum() + got[1].square().sum()).backward()
        for x, twin in zip(inputs, twins, strict=True):
            torch.testing.assert_close(twin.grad, x.grad)

    def test_only_one_of_two_outputs_is_used(self, local, remote):
        x = torch.randn(5, 4, requires_grad=True)
        (expected,) = torch.autograd.grad(local["two"](x, torch.ones(()))[1].sum(), x)
        (got,) = torch.autograd.grad(remote["two"](x, torch.ones(()))[1].sum(), x)
        assert torch.equal(got, expected)

    def test_an_output_of_whole_numbers_has_no_gradient(self, remote):
        x = torch.randn(5, 4, requires_grad=True)
        product, count = remote["count"](x)
        assert product.requires_grad
        assert not count.requires_grad
        product.sum().backward()
        assert torch.equal(x.grad, torch.ones(5, 4))

    def test_inputs_of_whole_numbers(self, local, remote):
        index = torch.tensor([1, 5, 1])
        got = remote["embedding"](index)
        assert torch.equal(got, local["embedding"](index))
        got.sum().backward()

    @pytest.mark.parametrize("shape", [(0, 4), (1, 4), (2, 3, 4)])
    def test_shapes_at_the_edge(self, local, remote, shape):
        x = torch.randn(shape, requires_grad=True)
        got = remote["linear"](x)
        torch.testing.assert_close(got, local["linear"](x))
        got.sum().backward()
        assert x.grad.shape == shape

    def test_an_input_that_is_not_contiguous(self, local, remote):
        x = torch.randn(4, 6).t()
        torch.testing.assert_close(remote["linear"](x), local["linear"](x))

    def test_many_calls_in_one_pass(self, local, remote):
        names = ["mlp", "linear", "mlp", "two"]
        inputs = [(torch.randn(3, 4, requires_grad=True),) for _ in names]
        inputs[3] = (*inputs[3], torch.tensor(2.0))
        group = remote["mlp"].call_group
        got = group.call_together([remote[name] for name in names], inputs, [{}] * 4)
        expected = [local[name](*args) for name, args in zip(names, inputs, strict=True)]
        torch.testing.assert_close([*got[:3], got[3][0]], [*expected[:3], expected[3][0]])
        leaves = [args[0] for args in inputs]
        loss_of = lambda outputs: sum(y.square().sum() for y in [*outputs[:3], outputs[3][0]])  # noqa: E731
        torch.testing.assert_close(
            torch.autograd.grad(loss_of(got), leaves), torch.autograd.grad(loss_of(expected), leaves)
        )

    def test_received_tensors_may_be_changed_in_place(self, remote):
        with torch.no_grad():
            y = remote["linear"](torch.ones(1, 4))
            y.add_(1)
        x = torch.ones(1, 4, requires_grad=True)
        remote["linear"](x).sum().backward()
        x.grad.zero_()


class TestWhatIsAsked:
    def test_under_no_grad_nothing_requires_grad(self, remote):
        with torch.no_grad():
            assert not remote["linear"](torch.ones(1, 4, requires_grad=True)).requires_grad
        with torch.inference_mode():
            assert remote["linear"](torch.ones(1, 4)).is_inference()

    def test_weights_are_trained_even_if_no_input_requires_grad(self, fresh):
        fresh["linear"](torch.ones(1, 4)).sum().backward()
        assert weights_change(fresh, "linear")

    def test_asking_for_input_gradients_only_gathers_none_for_the_weights(self, fresh):
        x = torch.ones(1, 4, requires_grad=True)
        torch.autograd.grad(fresh["linear"](x).sum(), x)
        fresh["linear"](x).sum().backward(inputs=[x])
        assert not weights_change(fresh, "linear")

    @pytest.mark.parametrize("is_closure", [False, True])
    def test_asking_for_gradients_of_an_expert_here_gathers_none_for_one_there(self, fresh, is_closure):
        here, x = nn.Linear(4, 4), torch.ones(1, 4)
        there = (lambda x: fresh["linear"](x)) if is_closure else fresh["linear"]
        outputs = parallel_apply([there, here], [(x,), (x,)])
        torch.autograd.grad(torch.stack(outputs).prod(), here.weight)
        assert not weights_change(fresh, "linear")

    def test_an_expert_whose_output_is_not_used_gets_no_gradient(self, fresh):
        group = fresh["mlp"].call_group
        x = (torch.ones(1, 4),)
        used, _ = group.call_together([fresh["linear"], fresh["mlp"]], [x, x], [{}, {}])
        used.sum().backward()
        RemoteOptimizer(fresh).step()
        assert {name: info.num_updates for name, info in fresh.info().items() if info.num_updates} == {
            "linear": 1
        }

    def test_train_and_eval_travel_with_the_call(self, local, remote):
        x = torch.ones(3, 4)
        expert = copy.deepcopy(remote["dropout"]).eval()
        torch.testing.assert_close(expert(x), local["dropout"].eval()(x))
        assert any((remote["dropout"](x) == 0).any() for _ in range(20))

    def test_experts_without_an_optimizer_are_like_frozen_modules(self):
        with ExpertsServer(make_modules()) as server, connect(server.address) as experts:
            assert not experts["linear"](torch.ones(1, 4)).requires_grad
            x = torch.ones(1, 4, requires_grad=True)
            experts["linear"](x).sum().backward()
            assert x.grad is not None

    def test_an_expert_may_be_frozen_for_this_client(self, fresh):
        expert = fresh["linear"].requires_grad_(False)
        for module in (expert, copy.deepcopy(nn.Sequential(expert))):
            assert not module(torch.ones(1, 4)).requires_grad
            x = torch.ones(1, 4, requires_grad=True)
            module(x).sum().backward()
            assert x.grad is not None
            assert not weights_change(fresh, "linear")
        expert.requires_grad_()(torch.ones(1, 4)).sum().backward()
        assert weights_change(fresh, "linear")

    @pytest.mark.parametrize("is_frozen_at", ["forward", "backward", "neither"])
    def test_an_expert_takes_gradients_if_it_is_frozen_neither_at_the_forward_nor_at_the_backward(
        self, fresh, is_frozen_at
    ):
        """As in torch: a generator may be trained through a discriminator that is frozen for its backward."""
        here = make_modules()["linear"]
        for expert in (here, fresh["linear"]):
            expert.requires_grad_(is_frozen_at != "forward")
            y = expert(torch.ones(1, 4, requires_grad=True))
            expert.requires_grad_(is_frozen_at != "backward")
            y.sum().backward()
        assert (
            weights_change(fresh, "linear") == (here.weight.grad is not None) == (is_frozen_at == "neither")
        )


class TestGraph:
    def test_with_retain_graph_a_second_backward_gives_the_same_again(self, remote):
        x = torch.randn(2, 4, requires_grad=True)
        y = remote["mlp"](x).sum()
        (first,) = torch.autograd.grad(y, x, retain_graph=True)
        (second,) = torch.autograd.grad(y, x)
        torch.testing.assert_close(first, second)

    def test_without_retain_graph_a_second_backward_raises_as_pytorch_does(self, remote):
        y = remote["mlp"](torch.randn(2, 4, requires_grad=True)).sum()
        y.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            y.backward()

    def test_a_second_derivative_raises_and_is_never_wrong(self, remote):
        x = torch.randn(2, 4, requires_grad=True)
        (grad,) = torch.autograd.grad(remote["mlp"](x).sum(), x, create_graph=True)
        assert grad.requires_grad
        with pytest.raises(RuntimeError, match="differentiated once"):
            (grad * x).sum().backward()

    @pytest.mark.parametrize("kind", ["expert", "layer"])
    @pytest.mark.parametrize("what", ["input", "before the input", "grad_outputs"])
    def test_a_second_derivative_by_one_tensor_raises_though_it_is_reached_elsewhere_too(
        self, remote, kind, what
    ):
        module = remote["mlp"]
        if kind == "layer":
            module = MixtureOfExperts(TopKRouter(4, 2, top_k=2), [remote["mlp"], remote["linear"]])
        weight, ones = torch.randn(4, 4, requires_grad=True), torch.ones(2, 4, requires_grad=True)
        x = torch.randn(2, 4) @ weight
        (grad,) = torch.autograd.grad(module(x), x, ones, create_graph=True)
        by = {"input": x, "before the input": weight, "grad_outputs": ones}[what]
        with pytest.raises(RuntimeError, match="differentiated once"):
            torch.autograd.grad((grad * x * ones).sum(), by)

    def test_a_change_in_place_of_an_input_raises_as_pytorch_does(self, remote):
        x = torch.randn(2, 4)
        y = remote["mlp"](x).sum()
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()

    def test_hooks_on_inputs_and_outputs_fire(self, remote):
        fired = []
        x = torch.randn(2, 4, requires_grad=True)
        x.register_hook(lambda grad: fired.append("input"))
        y = remote["mlp"](x)
        y.register_hook(lambda grad: fired.append("output"))
        y.sum().backward()
        assert fired == ["output", "input"]

    @pytest.mark.parametrize("kept_bytes", [1, 300])
    def test_a_forward_that_the_server_let_go_of_is_computed_again(self, local, kept_bytes):
        config = ServingConfig(limits=LimitsConfig(kept_forward_bytes=kept_bytes))
        with (
            ExpertsServer(make_modules(), optimizer=sgd, config=config) as server,
            connect(server.address) as experts,
        ):
            group = experts["mlp"].call_group
            inputs = [(torch.randn(3, 4, requires_grad=True),) for _ in range(5)]
            got = group.call_together([experts["mlp"]] * 5, inputs, [{}] * 5)
            grads = torch.autograd.grad(sum(y.square().sum() for y in got), [x for (x,) in inputs])
            expected = torch.autograd.grad(
                sum(local["mlp"](x).square().sum() for (x,) in inputs), [x for (x,) in inputs]
            )
            torch.testing.assert_close(grads, expected)


class TestModule:
    def test_it_has_no_parameters_and_moves_nowhere(self, remote):
        assert list(remote["mlp"].parameters()) == []
        assert remote["mlp"].to(torch.float64)(torch.ones(1, 4)).dtype == torch.float32

    def test_a_copy_shares_the_connection(self, remote):
        twin = copy.deepcopy(nn.Sequential(remote["linear"], nn.ReLU()))
        assert twin[0].call_group is remote["linear"].call_group
        assert copy.copy(remote["linear"]).name == "linear"

    def test_so_does_a_copy_of_all_experts_and_of_their_optimizer(self, remote):
        twins, optimizer = copy.deepcopy((remote, RemoteOptimizer(remote)))
        assert twins["linear"].call_group is remote["linear"].call_group
        assert repr(optimizer) == repr(RemoteOptimizer(remote))
        assert list(twins) == list(remote)

    def test_none_of_them_can_be_pickled(self, remote):
        for holder in (remote["linear"], nn.Sequential(remote["linear"]), remote, RemoteOptimizer(remote)):
            with pytest.raises(TypeError, match=r"experts at .*expected to stay in its process, got pickled"):
                pickle.dumps(holder)

    def test_repr_shows_name_kind_and_address(self, remote, server):
        assert repr(remote["linear"]) == f"RemoteExpert('linear', kind='Linear', address='{server.address}')"

    def test_keyword_arguments_are_refused(self, remote):
        with pytest.raises(TypeError, match=r"keyword arguments \['x'\]\. Only positional tensors travel"):
            remote["linear"](x=torch.ones(1, 4))
        with pytest.raises(TypeError, match="keyword arguments"):
            parallel_apply([remote["linear"]], [()], [{"x": torch.ones(1, 4)}])

    @pytest.mark.parametrize(("inputs", "error"), [((3,), TypeError), ((), ValueError)])
    def test_what_is_no_tensor_is_refused_here(self, remote, inputs, error):
        with pytest.raises(error, match="expert 'linear': expected"):
            remote["linear"](*inputs)

    @pytest.mark.parametrize(
        "x",
        [
            torch.ones(2, 4).to_sparse(),
            torch.ones(2, 4, device="meta"),
            torch.ones(2, 4).to(torch.float8_e4m3fn),
        ],
        ids=["sparse", "meta", "float8"],
    )
    def test_a_tensor_that_cannot_travel_is_refused_by_the_name_of_the_expert(self, remote, x):
        for is_autocast in (False, True):
            with (
                torch.autocast("cpu", enabled=is_autocast),
                pytest.raises(
                    TypeError, match="expert 'linear', input 0: tensor: expected a dense tensor of"
                ),
            ):
                remote["linear"](x)

    def test_errors_of_ours_are_one_tree(self, remote):
        with pytest.raises(MoeAutogradError):
            remote["linear"](torch.ones(1, 5))
