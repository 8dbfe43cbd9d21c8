"""Modules whose `forward` or functions were defined around tensors with history: in closures, and in globals."""

from __future__ import annotations

import dataclasses
import functools
import gc
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from moe_autograd import parallel_apply
from tests.support.comparison import MapFunction, assert_same_program, loss_of, one_after_another
from tests.support.module_programs import finish, leaves, parameters, seeded


def of_its_class(held: Tensor) -> nn.Module:
    class Scales(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * held

    return Scales(4, 4)


def in_a_dictionary(held: Tensor) -> nn.Module:
    scales = {"all": [held]}

    class Scales(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * scales["all"][0]

    return Scales(4, 4)


def of_a_part(held: Tensor) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), of_its_class(held))


def of_a_function_that_it_calls(held: Tensor) -> nn.Module:
    def scaled(x: Tensor, times: int = 1) -> Tensor:
        return scaled(x, times - 1) * held if times else x

    class Scales(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return scaled(super().forward(x))

    return Scales(4, 4)


def behind_a_decorator(held: Tensor) -> nn.Module:
    def decorated(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(forward)
        def decorator(*args: Any) -> Tensor:
            return forward(*args).sin()

        return decorator

    class Scales(nn.Linear):
        @decorated
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * held

    return Scales(4, 4)


def of_its_own(held: Tensor) -> nn.Module:
    module = nn.Linear(4, 4)
    as_before = module.forward
    module.forward = lambda input: as_before(input) * held  # type: ignore[method-assign]
    return module


def of_an_attribute(held: Tensor) -> nn.Module:
    class Scales(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            scaled: Tensor = self.scale(super().forward(x))
            return scaled

    module = Scales(4, 4)
    module.scale = lambda x: x * held  # type: ignore[assignment]
    return module


def beside_an_empty_cell(held: Tensor) -> nn.Module:
    gone = None

    class Scales(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (held if self.bias is not None else gone)  # noqa: F821

    del gone
    return Scales(4, 4)


GLOBALS: dict[str, Any] = {"scales": []}
scale: Any = None
variable: ContextVar[Any] = ContextVar("variable")


def set_globals(held: Tensor) -> None:
    global scale
    scale, GLOBALS["scales"] = held, [held]
    GLOBAL_MODULE.scale = held  # type: ignore[assignment]
    variable.set(held)


class Names(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * scale


class NamesInItsBase(Names):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sin()


class NamesInAMethod(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(super().forward(x))

    def scaled(self, x: Tensor) -> Tensor:
        return x * scale


class HasOne(nn.Linear):
    def of_a_base(self) -> Tensor:
        return cast(Tensor, scale)

    @property
    def of_a_property(self) -> Tensor:
        return cast(Tensor, scale)

    @staticmethod
    def of_a_static_method() -> Tensor:
        return cast(Tensor, scale)

    @classmethod
    def of_a_class_method(cls) -> Tensor:
        return cast(Tensor, scale)


class NamesInAMethodOfItsBase(HasOne):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * super().of_a_base()


class NamesInAProperty(HasOne):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.of_a_property


class NamesInAStaticMethod(HasOne):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.of_a_static_method()


class NamesInAClassMethod(HasOne):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.of_a_class_method()


def _scaled(x: Tensor) -> Tensor:
    return x * scale


class NamesInAFunction(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return _scaled(super().forward(x))


class NamesWithin(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return torch.stack([x * scale for _ in range(2)]).sum(0)


class NamesADictionary(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * GLOBALS["scales"][0]


class NamesAModule(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * GLOBAL_MODULE.scale


class NamesAVariable(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * variable.get()


class IsDecorated(nn.Linear):
    @torch.autocast("cpu", enabled=False)
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * scale


GLOBAL_MODULE = NamesAModule(4, 4)  # which names itself
NAMING = [
    Names,
    NamesInItsBase,
    NamesInAMethod,
    NamesInAMethodOfItsBase,
    NamesInAProperty,
    NamesInAStaticMethod,
    NamesInAClassMethod,
    NamesInAFunction,
    NamesWithin,
    NamesADictionary,
    NamesAModule,
    NamesAVariable,
    IsDecorated,
]


def naming(kind: type[nn.Module]) -> Callable[[Tensor], nn.Module]:
    def make(held: Tensor) -> nn.Module:
        set_globals(held)
        return kind(4, 4) if issubclass(kind, nn.Linear) else kind()

    return make


def of_a_function_that_names_one(held: Tensor) -> nn.Module:
    set_globals(held)
    module = nn.Linear(4, 4)
    as_before = module.forward
    module.forward = lambda input: _scaled(as_before(input))  # type: ignore[method-assign]
    return module


@pytest.mark.parametrize(
    "options", [{}, {"max_concurrency": 1}, {"recompute": True}, {"defer_weight_grads": True}]
)
@pytest.mark.parametrize("num_holders", [1, 2, 4])
@pytest.mark.parametrize(
    "make",
    [
        of_its_class,
        in_a_dictionary,
        of_a_part,
        of_a_function_that_it_calls,
        behind_a_decorator,
        of_its_own,
        of_an_attribute,
        beside_an_empty_cell,
        *[naming(kind) for kind in NAMING],
        of_a_function_that_names_one,
    ],
)
def test_tensors_that_a_modules_functions_enclose_get_their_gradients_as_in_a_loop(
    make: Callable[[Tensor], nn.Module], options: dict[str, Any], num_holders: int
) -> None:
    def program(apply: Any) -> Any:
        (weight,), xs, log = leaves(1, 4), leaves(), list[Tensor]()
        held = weight.exp().sin()
        held.register_hook(lambda grad: log.append(grad.clone()))
        modules = [
            *seeded(lambda: make(held), num_holders),
            *seeded(lambda: nn.Linear(4, 4), len(xs) - num_holders),
        ]
        outputs = apply(modules, [(x,) for x in xs])
        return finish([*outputs, held * 2], *xs, weight, *parameters(modules)), log

    assert_same_program(
        program,
        native_apply=one_after_another,
        mapped_apply=functools.partial(parallel_apply, **options),
        tolerance=1e-12,
    )


def test_modules_may_keep_parts_of_memory_that_was_changed_since() -> None:
    """As `FullyShardedDataParallel` does; PyTorch refuses to tell the history of such a part."""

    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flat = nn.Parameter(torch.linspace(-1, 1, 20))

        def forward(self, x: Tensor) -> Tensor:
            self.weight, self.bias = self.flat.split([16, 4])
            return x @ self.weight.view(4, 4) + self.bias

    def program(apply: MapFunction, is_hidden: bool) -> Any:
        modules, xs = seeded(Split), leaves()
        calls = [lambda x, m=m: m(x) for m in modules] if is_hidden else modules
        said = []
        for _ in range(3):
            said.append(finish(apply(calls, [(x,) for x in xs]), *xs, *parameters(modules)))
            with torch.no_grad():
                for weight in parameters(modules):
                    weight.mul_(0.5)
        return said

    for is_hidden in (False, True):
        same = functools.partial(program, is_hidden=is_hidden)
        assert_same_program(same, native_apply=one_after_another, mapped_apply=parallel_apply)


def test_classes_of_files_that_nobody_holds_any_more_are_freed() -> None:
    """As those that a program generates: what their functions name is remembered, and led to the classes."""
    source = """
class Scaled(nn.Module):
    def forward(self, x):
        return x * scale
"""
    file = {"__name__": "generated", "nn": nn, "scale": 2.0}
    exec(source, file)
    kind: Any = file["Scaled"]
    parallel_apply([kind(), kind()], [(torch.ones(2),)] * 2)
    told = weakref.ref(kind)
    del file, kind
    gc.collect()
    assert told() is None


@dataclasses.dataclass(slots=True)
class Scale:
    """What its slot holds is found also where a class without it is derived from this one."""

    by: Tensor


@dataclasses.dataclass(slots=True)
class NamedScale(Scale):
    name: str


class OneSlot:
    __slots__ = "by"

    def __init__(self, by: Tensor) -> None:
        self.by = by


class Private:
    __slots__ = ("__by",)

    def __init__(self, by: Tensor) -> None:
        self.__by = by

    @property
    def by(self) -> Tensor:
        return self.__by


SLOTS = [Scale, functools.partial(NamedScale, name="half"), OneSlot, Private]


@pytest.mark.parametrize("make", SLOTS, ids=["its own", "of a base", "only one", "private"])
def test_tensors_in_slots_of_objects_among_the_arguments(make: Callable[[Tensor], Any]) -> None:
    def program(apply: Any) -> Any:
        modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()
        scales = [make(x.exp()) for x in xs]
        calls = [lambda x, scale, m=m: m(x) * scale.by for m in modules]
        outputs = apply(calls, [*zip(xs, scales, strict=True)])
        loss_of([*outputs, *[scale.by for scale in scales]]).backward()
        return [x.grad for x in xs]

    assert_same_program(program, native_apply=one_after_another, mapped_apply=parallel_apply, tolerance=1e-12)


class Forwards:
    """Asks for all that it does not have, as a proxy of something on another machine does."""

    __slots__ = ("unset",)

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class LoadsItems(dict[str, object]):
    def values(self) -> Any:
        raise RuntimeError("it takes an hour")


class LoadsRows(list[object]):
    def __iter__(self) -> Any:
        raise RuntimeError("it takes an hour")


@pytest.mark.parametrize("kind", [Forwards, LoadsItems, LoadsRows])
def test_nothing_runs_of_objects_that_are_looked_into(kind: Callable[[], object]) -> None:
    modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()
    held = kind()
    calls = [lambda x, _, m=m: (m(x), held) for m in modules]
    assert all(returned[1] is held for returned in parallel_apply(calls, [(x, kind()) for x in xs]))
