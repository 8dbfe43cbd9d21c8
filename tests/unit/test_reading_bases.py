"""What forwards call of their bases by `super()` is read as well, wherever in the order of the bases that is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from moe_autograd.autograd.reading.arithmetic import reading_of
from tests.support.readable import Expert, assert_modules_mean_the_loop, only_computes, wait


class Adapted(nn.Linear):
    """A linear layer with an adapter of low rank beside it."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.down, self.up, self.scale = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False), 0.5

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.up(self.down(x)) * self.scale


class Gated(Expert):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.w2(self.gate(self.w1(x), self.w3(x)))
        return y


class Residual(Gated):
    """Calls more than one of its base, by place and by name, and what that calls calls it."""

    def activate(self, x: Tensor) -> Tensor:
        return super().activate(x) + super().times(x, factor=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x) * super().forward(x=x)


class Scaled(Residual):
    def forward(self, x: Tensor) -> Tensor:
        if x.dim() > 4:
            raise ValueError(f"expected a batch, got {x.dim()} dimensions")
        return super().forward(x * 2) if self.count > 1 else super().forward(x)


class Left(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class Right(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Both(Left, Right):
    """The base of `Left` is `Right` here."""


@pytest.mark.parametrize("kind", [Adapted, Residual, Scaled, Left, Both])
def test_what_bases_compute_is_known(kind: type[nn.Module]) -> None:
    assert_modules_mean_the_loop([kind() for _ in range(3)])


class WaitsBefore(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(wait(x))


class InheritsWaiting(WaitsBefore):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class WaitsInTheMiddle(Left, WaitsBefore):
    """What `Left` calls by `super()` waits here, though its own base does not."""


class WaitsAsItActivates(Residual):
    def activate(self, x: Tensor) -> Tensor:
        return super().activate(wait(x))


class OfModule(Expert):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x)


class CallsItself(Gated):
    def forward(self, x: Tensor) -> Any:
        return super().__call__(x)


class Keeps(Gated):
    def forward(self, x: Tensor) -> Any:
        base = super()
        return base.forward(x)


class Takes(Gated):
    def forward(self, x: Tensor) -> Any:
        forward = super().forward
        return forward(x)


class Gives(Gated):
    def forward(self, x: Tensor) -> Any:
        return self.call_first((super().activate, x), x)


class NamesTheClass(Gated):
    def forward(self, x: Tensor) -> Any:
        return __class__, super().forward(x)  # type: ignore[name-defined]  # Python puts it there


class OfAnother(Gated):
    def forward(self, x: Tensor) -> Any:
        return super(Gated, self).forward(x)


class WithinALoop(Gated):
    def forward(self, x: Tensor) -> Any:
        for _ in range(3):
            x = super().forward(x)
        return x


class BesideALoop(Gated):
    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return super().forward(x)


class OfALoop(Expert):
    def forward(self, x: Tensor) -> Tensor:
        return super().through_layers(x)


class InAFunction(Gated):
    def forward(self, x: Tensor) -> Any:
        return (lambda: super(InAFunction, self).forward(x))()


class Chooses(Gated):
    def forward(self, x: Tensor) -> Any:
        return (super() if x.dim() else self).forward(x)


class Assigns(Gated):
    def forward(self, x: Tensor) -> Any:
        super().shift = x
        return x


class Drops(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)  # which may do so in place


class KeepsStatistics(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Many(Gated):
    def activate(self, x: Tensor) -> Tensor:
        x = super().activate(super().activate(super().activate(super().activate(x))))
        return super().activate(super().activate(super().activate(super().activate(x))))

    def forward(self, x: Tensor) -> Any:
        x = self.activate(self.activate(self.activate(self.activate(x))))
        return self.activate(self.activate(self.activate(self.activate(x))))


MORE = [InheritsWaiting, WaitsInTheMiddle, WaitsAsItActivates, OfModule, CallsItself, Keeps, Takes, Gives]
MORE += [
    NamesTheClass,
    OfAnother,
    WithinALoop,
    BesideALoop,
    OfALoop,
    InAFunction,
    Chooses,
    Assigns,
    Drops,
    Many,
]


@pytest.mark.parametrize("kind", MORE)
def test_what_may_do_more_is_not(kind: type[nn.Module]) -> None:
    assert not only_computes(kind())


def test_neither_are_statistics() -> None:
    assert not only_computes(KeepsStatistics(4))


def changed(*bases: type) -> type[Any]:
    class Own(*bases):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Any:
            return super().forward(x)

    return Own


def test_a_base_that_was_changed_is_read_again() -> None:
    class Base(Gated):
        def forward(self, x: Tensor) -> Any:
            return self.w2(self.w1(x))

    module = changed(Base)()
    assert only_computes(module)
    Base.forward = Gated.forward
    assert only_computes(module)
    del Base.forward
    assert only_computes(module)
    Base.forward = WaitsBefore.forward
    assert not only_computes(module)


def test_a_method_that_a_base_in_between_was_given_is_read() -> None:
    class Between(Gated):
        pass

    module = changed(Between)()
    assert only_computes(module)
    Between.forward = lambda self, x: wait(x)  # type: ignore[method-assign]
    assert not only_computes(module)


def test_another_order_of_bases_is_read_again() -> None:
    kind = changed(Left)
    module = kind()
    assert only_computes(module)
    kind.__bases__ = (WaitsInTheMiddle,)
    assert not only_computes(module)


def test_a_method_of_the_same_code_may_belong_to_another_class() -> None:
    module = changed(Gated)()
    other: Any = changed(WaitsBefore)
    kind: Any = type(module)
    assert only_computes(module)
    kind.__bases__ = (other,)
    kind.forward = other.forward
    assert not only_computes(module)


def test_another_super_in_the_file_is_not_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    module = changed(Gated)()
    assert only_computes(module)
    monkeypatch.setitem(globals(), "super", lambda *_: wait)
    assert not only_computes(module)


def test_what_an_instance_has_under_a_name_matters_where_it_is_called_of_itself() -> None:
    class Own(Gated):
        def forward(self, x: Tensor) -> Any:
            return super().times(self.activate(x))

    module: Any = Own()
    module.times = wait
    assert only_computes(module)
    module.activate = wait
    assert not only_computes(module)


def test_what_draws_or_reshapes_in_a_base_does() -> None:
    class Draws(Expert):
        def forward(self, x: Tensor) -> Any:
            return F.dropout(self.shape(x), 0.5)

        def shape(self, x: Tensor) -> Tensor:
            return x.unsqueeze(0)

    reading = reading_of(changed(Draws))
    assert reading is not None
    assert reading.draws
    assert reading.reshapes
    plain = reading_of(changed(Gated))
    assert plain is not None
    assert not plain.draws


def test_weights_of_the_base_are_those_of_the_loop() -> None:
    modules = [Adapted() for _ in range(3)]
    for module in modules:
        module.weight.requires_grad_(False)
    assert_modules_mean_the_loop(modules)
    modules[1].bias = None
    assert_modules_mean_the_loop(modules)
