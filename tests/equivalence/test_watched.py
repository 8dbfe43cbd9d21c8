"""A call that changes a shared module otherwise than by what it names is alone with it, or the map raises."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from moe_autograd import parallel_apply
from moe_autograd.autograd import watched
from tests.equivalence.test_statistics import Gate
from tests.support.comparing_modules import assert_same_without_error
from tests.support.comparison import MapFunction, one_after_another
from tests.support.functions_waiting import PATIENCE_S
from tests.support.module_programs import finish, leaves, seeded
from tests.support.templates import NUM_CALLS, Weights, say, template_and_weights


class Adapted(nn.Linear):
    """Chooses by a hook for as long as a call runs, as `peft` does for `adapter_names`, in another file."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(4, 4)
        self.gate, self.chosen = gate, ["none"]

    def forward(self, x: Tensor, adapter_names: list[str] | None = None) -> Tensor:
        before, self.__dict__["chosen"] = self.chosen, adapter_names or self.chosen
        x = self.gate.pass_first(x) if self.chosen == ["first"] else self.gate.open(x)
        y = super().forward(x) * len(self.chosen[0])
        self.__dict__["chosen"] = before
        return y


@pytest.mark.parametrize("is_within", [False, True])
def test_calls_with_names_of_adapters_take_turns(is_within: bool) -> None:
    def program(apply: MapFunction) -> Any:
        gate, xs = Gate(apply), leaves(3)
        (module,) = seeded(lambda: Adapted(gate), 1)
        names = [["first"], ["the second"], None]
        if is_within:
            calls = [lambda x, own=own: module(x, adapter_names=own) for own in names]
            outputs = apply([*calls, gate.open], [(x,) for x in [*xs, xs[0]]])
        else:
            calls, kwargs = [module] * 3, [{"adapter_names": own} for own in names]
            outputs = apply([*calls, gate.open], [(x,) for x in [*xs, xs[0]]], [*kwargs, {}])
        return finish(outputs, *xs, *module.parameters())

    assert_same_without_error(program)


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("", "training", False),
        ("", "forward", torch.sin),
        ("", "_forward_hooks", {1: lambda module, args, y: y * 2}),
        ("0", "_backward_hooks", {1: lambda module, *_: None}),
        ("", "_modules", {}),
        ("", "_parameters", {}),
    ],
)
def test_a_change_that_nobody_looked_for_raises_in_a_call_that_meets_it(
    part: str, name: str, value: object
) -> None:
    (template,), xs = seeded(lambda: nn.Sequential(nn.Linear(4, 4)), 1), leaves(2)
    template.bias = nn.Parameter(torch.zeros(4))
    has_begun, has_changed = threading.Event(), threading.Event()

    def meets(x: Tensor) -> Any:
        has_begun.set()
        assert has_changed.wait(PATIENCE_S)
        return template(x)

    def change(x: Tensor) -> Any:
        assert has_begun.wait(PATIENCE_S)
        setattr(template.get_submodule(part), name, value)
        has_changed.set()
        return template(x)

    with pytest.raises(
        RuntimeError, match=r"what call 0 .* shares .*\(Sequential, Linear\).* Pass max_concurrency=1"
    ):
        parallel_apply([meets, change], [(x,) for x in xs])


def test_an_error_that_a_change_may_have_brought_about_says_so() -> None:
    (module,), xs = seeded(lambda: nn.Linear(4, 4), 1), leaves(2)
    has_begun, has_changed = threading.Event(), threading.Event()

    def meets(x: Tensor) -> Any:
        has_begun.set()
        assert has_changed.wait(PATIENCE_S)
        if not module.training:
            raise ValueError("not training")
        return module(x)

    def change(x: Tensor) -> Any:
        assert has_begun.wait(PATIENCE_S)
        setattr(module, "training", False)  # noqa: B010  # by a name that nobody looks for
        has_changed.set()
        return module(x)

    with pytest.raises(ValueError, match="not training") as caught:
        parallel_apply([meets, change], [(x,) for x in xs])
    assert any("what call 0" in note for note in caught.value.__notes__)


def test_weights_that_calls_change_in_place_raise() -> None:
    """As one that keeps an average of them does, without gradients."""
    (template,), xs = seeded(lambda: nn.Linear(4, 4), 1), leaves(2)
    barrier = threading.Barrier(2)

    def average(x: Tensor) -> Any:
        barrier.wait(PATIENCE_S)
        with torch.no_grad():
            for p in template.parameters():
                p.lerp_(torch.ones_like(p), 0.1)
            return template(x) + x

    with pytest.raises(RuntimeError, match=r"parameters of a module changed meanwhile"):
        parallel_apply([average] * 2, [(x,) for x in xs])


def test_weights_that_count_no_changes_may_be_shared() -> None:
    with torch.inference_mode():
        module = nn.Linear(4, 4)
    barrier, xs = threading.Barrier(2), [torch.randn(3, 4) for _ in range(2)]
    with torch.no_grad():
        outputs = parallel_apply([lambda x: (barrier.wait(PATIENCE_S), module(x))[1]] * 2, xs)
        assert all(map(torch.equal, outputs, map(module, xs)))


class RefusesLooks(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_version = getattr(func, "__self__", None) is Tensor._version
        assert not (is_version and type(args[0]) is nn.Parameter)
        return func(*args, **(kwargs or {}))


def test_modes_do_not_see_how_a_shared_module_is_looked_at() -> None:
    (module,), xs = seeded(lambda: nn.Linear(4, 4), 1), leaves(2)
    barrier = threading.Barrier(2)
    with RefusesLooks():
        parallel_apply([lambda x: (barrier.wait(PATIENCE_S), module(x))[1]] * 2, [(x,) for x in xs])


def test_a_change_that_is_undone_while_a_call_runs_raises_where_it_meets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watched, "AT_ONCE_S", 0.0)
    (module,), xs = seeded(lambda: nn.Linear(4, 4), 1), leaves(4)
    changed, may_undo, undone = threading.Event(), threading.Event(), threading.Event()

    def changes(x: Tensor) -> Any:
        setattr(module, "training", False)  # noqa: B010  # by a name that nobody looks for
        changed.set()
        assert may_undo.wait(PATIENCE_S)
        setattr(module, "training", True)  # noqa: B010
        undone.set()
        return module(x)

    def comes_before(x: Tensor) -> Any:
        assert changed.wait(PATIENCE_S)
        return x * 2

    def meets(x: Tensor) -> Any:
        may_undo.set()
        assert undone.wait(PATIENCE_S)
        return module(x)

    def comes_after(x: Tensor) -> Any:
        may_undo.set()
        return x * 2

    calls = [changes, comes_before, meets, comes_after]
    with pytest.raises(RuntimeError, match=r"what call 2 .* shares"):
        parallel_apply(calls, [(x,) for x in xs], max_concurrency=2)


def test_a_module_may_say_that_changes_are_its_own_business() -> None:
    class Counts(nn.Linear):
        keeps_statistics = False

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.bias += 1
            return x * 2

    module, xs = Counts(4, 4), leaves(2)
    barrier = threading.Barrier(2)
    parallel_apply([lambda x: (barrier.wait(PATIENCE_S), module(x))] * 2, [(x,) for x in xs])


def run(template: nn.Module, weights: Weights, x: Tensor) -> Any:
    return template(x)


def run_with(template: nn.Module, weights: Weights, x: Tensor) -> Any:
    return functional_call(template, weights, (x,))


class RunsByName(nn.Module):
    def __init__(self, template: nn.Module, weights: Weights) -> None:
        super().__init__()
        self.template, self.weights = template, weights

    def forward(self, x: Tensor) -> Any:
        return run(self.template, self.weights, x)


def test_a_function_that_is_defined_anew_is_looked_at_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook, where the module that calls it is the one of before."""

    def program(apply: MapFunction) -> Any:
        (template, waits, own), xs = template_and_weights(apply), leaves(NUM_CALLS)
        calls, inputs = [RunsByName(template, weights) for weights in own], [(x,) for x in xs]
        apply([*calls, waits.come], [*inputs, (xs[0],)])
        with monkeypatch.context() as anew:
            anew.setitem(globals(), "run", run_with)
            if apply is not one_after_another:
                waits.has_come.clear()
            return say(apply, template, waits, calls, inputs, *xs)

    assert_same_without_error(program)


class Config:
    train, eval = True, False


class Meets(nn.Linear):
    """Reads what is called as the methods that change a module, and computes once all calls have come."""

    def __init__(self, num_calls: int) -> None:
        super().__init__(4, 4)
        self.config, self.barrier = Config(), threading.Barrier(num_calls)

    def forward(self, x: Tensor, training: bool = True, hessian: object = None) -> Tensor:
        self.barrier.wait(PATIENCE_S)
        return super().forward(x) * self.config.train + eval("0") + self.config.eval


def test_calls_that_read_such_a_name_and_do_not_call_it_can_wait_for_each_other() -> None:
    module = Meets(3)
    xs = [torch.ones(2, 4)] * 3
    assert len(parallel_apply([module] * 3, xs)) == 3
    assert len(parallel_apply([lambda x: module(x)] * 3, xs)) == 3
    assert len(parallel_apply([module] * 3, xs, [{"training": False, "hessian": 1}] * 3)) == 3


class Expression:
    """Has methods that are called as those which change a module."""

    def eval(self, x: Tensor) -> Tensor:
        return x * 2

    def train(self, x: Tensor) -> None:
        pass


class Agent:
    """Has them as well, and they do change one."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def eval(self, x: Tensor) -> Tensor:
        self.module.eval()
        return x


EXPRESSION = Expression()


def test_calls_of_what_is_no_module_and_has_such_a_method_of_its_own_can_wait_for_each_other() -> None:
    module, expression, barrier = nn.Linear(4, 4), Expression(), threading.Barrier(3)

    def call(x: Tensor) -> Tensor:
        EXPRESSION.train(x)
        barrier.wait(PATIENCE_S)
        return expression.eval(x) + module(x) + EXPRESSION.eval(x)

    assert len(parallel_apply([call] * 3, [torch.ones(2, 4)] * 3)) == 3


def test_calls_of_what_is_no_module_and_changes_one_take_turns() -> None:
    module, running = nn.Linear(4, 4).double(), threading.Lock()
    agent, xs = Agent(module), leaves(3)

    def call(x: Tensor) -> Any:
        assert running.acquire(blocking=False)
        was_training, _ = module.training, agent.eval(x)
        y = module(x)
        module.training = True
        running.release()
        return y, was_training

    outputs = parallel_apply([call] * 3, [(x,) for x in xs])
    assert [was_training for _, was_training in outputs] == [True] * 3


def test_calls_that_pass_on_whether_a_tensor_requires_a_gradient_can_wait_for_each_other() -> None:
    """As `torch.utils.checkpoint` does for what it detaches."""
    module, barrier = nn.Linear(4, 4), threading.Barrier(3)

    def call(x: Tensor) -> Tensor:
        own = x.detach()
        own.requires_grad = x.requires_grad
        barrier.wait(PATIENCE_S)
        return module(own)

    assert len(parallel_apply([call] * 3, [torch.ones(2, 4)] * 3)) == 3


class CountsLooks(nn.Module):
    """Is looked into like an offloaded expert."""

    looks = 0

    @property
    def stands_for(self) -> nn.Module:
        CountsLooks.looks += 1
        return nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_a_module_that_calls_share_is_looked_through_once_for_a_map() -> None:
    trunk = nn.Sequential(nn.Linear(4, 4), CountsLooks()).double()
    CountsLooks.looks = 0
    through_closures = [lambda x, scale=scale: trunk(x) * scale for scale in range(3)]
    outputs = parallel_apply([trunk, *through_closures, trunk], [(x,) for x in leaves(5)])
    torch.stack(outputs).sum().backward()
    assert CountsLooks.looks == 1
