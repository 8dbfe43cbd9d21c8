"""By which names a map knows calls that set something for the whole process, and who merely has such names."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch as th
import torch._higher_order_ops as hop
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.attention import SDPBackend, sdpa_kernel

from moe_autograd import map_with_parallel_backward, parallel_apply
from tests.support.functions_waiting import PATIENCE_S
from tests.support.module_programs import leaves

Call = Callable[[Tensor], Any]
of_cudnn: Any = torch.backends.cudnn


def meet(call: Call, patience_s: float = PATIENCE_S) -> None:
    """Let two calls of one map wait for each other; raise `BrokenBarrierError` where they are made in turn."""
    both_are_here = threading.Barrier(2)

    def waiting(x: Tensor) -> Any:
        both_are_here.wait(patience_s)
        return call(x)

    parallel_apply([waiting] * 2, [(x,) for x in leaves(2)])


class Meets(nn.Module):
    """Has attributes of ordinary names; is called with the other call there."""

    hessian: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.breakpoint, self.chdir = nn.Parameter(torch.zeros(4)), torch.ones(1)
        self.linearize, self.set_trace, self.while_loop, self.jvp = nn.Identity(), False, 2, None
        self.backends, self.settings = nn.Identity(), {"strategy": ""}
        self.both_are_here, self.patience_s = threading.Barrier(1), PATIENCE_S

    def forward(self, x: Tensor) -> Any:
        self.both_are_here.wait(self.patience_s)
        return self.compute(x)

    def compute(self, x: Tensor) -> Any:
        raise NotImplementedError


def meet_in_modules(kind: type[Meets], patience_s: float) -> None:
    modules, both_are_here = [kind(), kind()], threading.Barrier(2)
    for module in modules:
        module.both_are_here, module.patience_s = both_are_here, patience_s
    parallel_apply(modules, [(x,) for x in leaves(2)])


class Attributes(Meets):
    def compute(self, x: Tensor) -> Any:
        for _ in range(self.while_loop):
            x = torch.where(x > self.breakpoint, self.linearize(x), -x) * self.chdir
        return x if self.set_trace or self.jvp else x * 2


class Methods(Meets):
    def hessian(self, x: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(x.sin().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.sum(), x, create_graph=True)[0]

    def compute(self, x: Tensor) -> Any:
        return (lambda own: own.hessian(x))(self) + self.hessian(x)


class Texts(Meets):
    def compute(self, x: Tensor) -> Any:
        options = {"jvp": False, "hessian": True}
        is_forward = self.settings["strategy"] == "forward-mode"
        return x * sum(name in options for name in ("jvp", "chdir", "breakpoint")) * (1 + is_forward)


class Backends(Meets):
    def compute(self, x: Tensor) -> Any:
        self.backends.last = x.shape
        return self.backends(x)


def scaled(x: Tensor, *, breakpoint: float, chdir: bool = False) -> Tensor:
    return -x if chdir else x * breakpoint


class Keywords(Meets):
    def compute(self, x: Tensor) -> Any:
        return scaled(x, breakpoint=2.0, chdir=True)


class Variables(Meets):
    def compute(self, x: Tensor) -> Any:
        jvp, breakpoint = x * 2, 0.5
        return (lambda: jvp * breakpoint)()


def linearize(x: Tensor) -> Tensor:
    return x * 2


class OfTheFile(Meets):
    def compute(self, x: Tensor) -> Any:
        return linearize(x)


@pytest.mark.parametrize(
    "kind", [Attributes, Methods, Texts, Backends, Keywords, Variables, OfTheFile], ids=lambda k: k.__name__
)
def test_ordinary_words_do_not_keep_calls_from_waiting_for_each_other(kind: type[Meets]) -> None:
    meet_in_modules(kind, PATIENCE_S)


def test_nor_do_they_in_functions() -> None:
    jvp = torch.ones(1)
    meet(lambda x: scaled(x * jvp, breakpoint=2.0))


def imports_a_debugger(x: Tensor) -> Tensor:
    if x.isnan().any():
        import pdb

        pdb.set_trace()
    return x * 2


def imports_by_name(x: Tensor) -> Any:
    from torch.func import jvp

    return (lambda v: jvp(torch.sin, (v,), (v,)))(x)


def imports_under_another_name(x: Tensor) -> Any:
    import torch.func as f

    return (lambda v: f.jvp(torch.sin, (v,), (v,)))(x)


def imports_flags(x: Tensor) -> Tensor:
    import torch.backends.cudnn as c

    c.benchmark = c.benchmark
    return x * 2


def imports_flags_by_name(x: Tensor) -> Tensor:
    from torch.backends import mkldnn as m

    with m.flags(enabled=True):  # type: ignore[no-untyped-call]  # torch's
        return x * 2


def names_flags(x: Tensor) -> Tensor:
    own = torch.backends.cudnn
    own.benchmark = own.benchmark
    return x * 2


def sets_flags(x: Tensor) -> Tensor:
    of_cudnn.set_flags(of_cudnn.enabled)
    return x * 2


@of_cudnn.flags(enabled=True)
def decorated(x: Tensor) -> Tensor:
    return x * 2


sine_or_cosine = partial(torch.cond, true_fn=torch.sin, false_fn=torch.cos)


def either_by_another_name(x: Tensor) -> Any:
    return th.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


def either_by_its_file(x: Tensor) -> Any:
    return torch._higher_order_ops.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


def either_by_its_operator(x: Tensor) -> Any:
    return torch.ops.higher_order.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


def either_imported(x: Tensor) -> Any:
    from torch import cond as either

    return either(x.sum() > 0, torch.sin, torch.cos, (x,))


def either_bound_in_part(x: Tensor) -> Any:
    return sine_or_cosine(x.sum() > 0, operands=(x,))


def each_row(x: Tensor) -> Any:
    return hop.map(torch.sin, x)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # which torch.func.jvp uses
@pytest.mark.parametrize(
    "call",
    [
        *(imports_a_debugger, imports_by_name, imports_under_another_name),
        *(imports_flags, imports_flags_by_name, names_flags, sets_flags, decorated),
        *(either_by_another_name, either_by_its_file, either_by_its_operator, either_imported),
        *(either_bound_in_part, each_row),
    ],
)
def test_what_goes_by_another_name_is_known(call: Call) -> None:
    with pytest.raises(threading.BrokenBarrierError):
        meet(call, patience_s=0.1)


@contextlib.contextmanager
def on_paper() -> Iterator[None]:
    with sdpa_kernel(SDPBackend.MATH):
        yield


class DecoratedForward(Meets):
    @sdpa_kernel(SDPBackend.MATH)
    def forward(self, x: Tensor) -> Any:
        return super().forward(x)

    def compute(self, x: Tensor) -> Any:
        return x * 2


class DecoratedMethod(Meets):
    @of_cudnn.flags(enabled=True)
    def compute(self, x: Tensor) -> Any:
        return x * 2


class DecoratedByOwn(Meets):
    @on_paper()
    def compute(self, x: Tensor) -> Any:
        return x * 2


class CallsDecorated(Meets):
    def compute(self, x: Tensor) -> Any:
        return decorated(x)


@pytest.mark.parametrize(
    "kind", [DecoratedForward, DecoratedMethod, DecoratedByOwn, CallsDecorated], ids=lambda k: k.__name__
)
def test_settings_that_decorate_methods_are_known(kind: type[Meets]) -> None:
    with pytest.raises(threading.BrokenBarrierError):
        meet_in_modules(kind, 0.1)


class Decorated(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, both_are_here: threading.Barrier) -> Tensor:
        both_are_here.wait(0.1)
        return x.clone()

    @staticmethod
    @sdpa_kernel(SDPBackend.MATH)
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


def test_settings_that_decorate_an_autograd_function_are_known() -> None:
    both_are_here = threading.Barrier(2)
    with pytest.raises(threading.BrokenBarrierError):
        map_with_parallel_backward(Decorated, *[(x, both_are_here) for x in leaves(2)])
