"""Calls that set something for the whole process while they run have what they set, and leave nothing behind."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.autograd.functional import jacobian
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.fx import symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel
from torch.nn.attention import sdpa_kernel as choosing
from torch.nn.functional import scaled_dot_product_attention as attend
from torch.nn.utils import parametrize
from torch.utils.flop_counter import FlopCounterMode

from moe_autograd import parallel_apply
from tests.support.comparing_modules import assert_same_without_error
from tests.support.comparison import MapFunction, Raised, assert_same_program
from tests.support.module_programs import finish, leaves, parameters, seeded

# `torch.func.jvp` uses it.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
BACKENDS = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION] * 4
NUM_CALLS = len(BACKENDS)


@pytest.fixture(autouse=True)
def _leave_process_as_it_was() -> Iterator[None]:
    """What fails here may leave settings behind, for all other tests."""
    allowed = _cur_sdpa_kernel_backends()
    dtype = torch.get_default_dtype()
    precision = torch.get_float32_matmul_precision()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    cudnn: Any = torch.backends.cudnn
    with (
        contextlib.chdir(Path.cwd()),
        contextlib.redirect_stdout(sys.stdout),
        warnings.catch_warnings(),
        torch.autograd.set_detect_anomaly(False),
        cudnn.flags(cudnn.enabled),
    ):
        yield
    torch.use_deterministic_algorithms(is_deterministic)
    torch.set_float32_matmul_precision(precision)
    sdpa_kernel(allowed).__enter__()
    torch.set_default_dtype(dtype)


def compute(x: Tensor) -> Tensor:
    """Long enough for other calls to come."""
    for _ in range(50):
        x = (x @ x.transpose(-1, -2) @ x).tanh()
    return x


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.backend = nn.Linear(4, 4), SDPBackend.MATH

    def forward(self, x: Tensor) -> Any:
        x = self.project(x)
        with sdpa_kernel(self.backend):
            compute(x.detach())
            return attend(x, x, x), _cur_sdpa_kernel_backends()


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"defer_weight_grads": True}], ids=str)
def test_kernels_that_calls_choose_are_theirs_alone(options: dict[str, bool]) -> None:
    def program(apply: MapFunction) -> Any:
        modules, xs = seeded(Attention, NUM_CALLS), leaves(NUM_CALLS, 1, 2, 16, 4)
        for module, backend in zip(modules, BACKENDS, strict=True):
            module.backend = backend  # type: ignore[assignment]  # an attribute that nn.Module types loosely
        outputs, chosen = zip(*apply(modules, [(x,) for x in xs]), strict=True)
        said = [[one.name for one in own] for own in chosen], _cur_sdpa_kernel_backends()
        return said, finish(list(outputs), *xs, *parameters(modules))

    assert_same_without_error(program, **options)


class Unrolled(nn.Module):
    """Two steps, each of which computes its weight once; a spectral norm is another one in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Any:
        for _ in range(2):
            with parametrize.cached():
                x = self.linear(self.linear(x))
                compute(x.detach())
        return x


def test_weights_that_calls_cache_are_theirs_alone() -> None:
    def program(apply: MapFunction) -> Any:
        modules, xs = seeded(Unrolled, NUM_CALLS), leaves(NUM_CALLS)
        outputs = apply(modules, [(x,) for x in xs])
        said = parametrize._cache_enabled, len(parametrize._cache)
        return said, finish(outputs, *xs, *parameters(modules)), [list(m.buffers()) for m in modules]

    assert_same_without_error(program)


def with_jvp(module: nn.Module, x: Tensor) -> Any:
    return torch.func.jvp(lambda v: compute(module(v)), (x,), (torch.ones_like(x),))


def with_jacfwd(module: nn.Module, x: Tensor) -> Any:
    return torch.func.jacfwd(lambda v: compute(module(v)))(x)


def with_hessian(module: nn.Module, x: Tensor) -> Any:
    return torch.func.hessian(lambda v: compute(module(v)).sum())(x)


def with_another_dtype(module: nn.Module, x: Tensor) -> Any:
    dtype = torch.float64 if x[0, 0] > 0 else torch.float32
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        compute(x.detach())
        return module(x) + torch.ones(4), torch.get_default_dtype() is dtype
    finally:
        torch.set_default_dtype(before)


def with_forward_mode(module: nn.Module, x: Tensor) -> Any:
    return (
        jacobian(lambda v: compute(module(v)), x.detach(), vectorize=True, strategy="forward-mode") * x.sum()
    )


def with_mutation_allowed(module: nn.Module, x: Tensor) -> Any:
    with allow_mutation_on_saved_tensors():
        y = module(x)
        z = compute(y.sin())
        y.mul_(3)
        (grad,) = torch.autograd.grad((y + z).sum(), x)
    return grad * x


def with_operations_counted(module: nn.Module, x: Tensor) -> Any:
    with FlopCounterMode(display=False) as counter:
        y = compute(module(x))
    return y, torch.tensor([count for own in counter.get_flop_counts().values() for count in own.values()])


def with_operators_recorded(module: nn.Module, x: Tensor) -> Any:
    return make_fx(lambda v: v @ v.T @ v)(x.detach())(module(x))


def with_modules_recorded(module: nn.Module, x: Tensor) -> Any:
    return symbolic_trace(compute)(module(x))


def with_determinism(module: nn.Module, x: Tensor) -> Any:
    is_wanted = bool(x[0, 0] > 0)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(is_wanted)
        return compute(module(x)), torch.are_deterministic_algorithms_enabled() is is_wanted
    finally:
        torch.use_deterministic_algorithms(before)


def with_precision(module: nn.Module, x: Tensor) -> Any:
    precision, before = "high" if x[0, 0] > 0 else "medium", torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        return compute(module(x)), torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    "call",
    [
        *(with_jvp, with_jacfwd, with_hessian, with_forward_mode),
        *(with_another_dtype, with_determinism, with_precision, with_mutation_allowed),
        *(with_operations_counted, with_operators_recorded, with_modules_recorded),
    ],
)
def test_what_calls_set_for_the_whole_process_is_theirs_alone(
    call: Callable[[nn.Module, Tensor], Any],
) -> None:
    def program(apply: MapFunction) -> Any:
        modules, xs = seeded(lambda: nn.Linear(4, 4), NUM_CALLS), leaves(NUM_CALLS)
        outputs = apply([lambda x, m=m: call(m, x) for m in modules], [(x,) for x in xs])
        return torch.get_default_dtype(), finish(outputs, *xs, *parameters(modules))

    assert_same_without_error(program)


@contextlib.contextmanager
def precision(_: Path) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def determinism(_: Path) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextlib.contextmanager
def no_cudnn(_: Path) -> Iterator[None]:
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before


def cudnn_flags(_: Path) -> AbstractContextManager[Any]:
    flags: Any = torch.backends.cudnn.flags
    return flags(enabled=False)  # type: ignore[no-any-return]


def anomalies(_: Path) -> AbstractContextManager[Any]:
    return torch.autograd.set_detect_anomaly(True)


@contextlib.contextmanager
def no_warnings(_: Path) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def other_output(_: Path) -> AbstractContextManager[Any]:
    return contextlib.redirect_stdout(io.StringIO())


def another_folder(folder: Path) -> AbstractContextManager[Any]:
    return contextlib.chdir(folder)


SETTINGS: dict[Callable[[Path], AbstractContextManager[Any]], Callable[[], object]] = {
    precision: torch.get_float32_matmul_precision,
    determinism: torch.are_deterministic_algorithms_enabled,
    no_cudnn: lambda: torch.backends.cudnn.enabled,
    cudnn_flags: lambda: torch.backends.cudnn.enabled,
    anomalies: torch.is_anomaly_enabled,
    no_warnings: lambda: [*warnings.filters],
    other_output: lambda: sys.stdout,
    another_folder: Path.cwd,
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_what_calls_set_and_put_back_is_as_before(
    setting: Callable[[Path], AbstractContextManager[Any]], tmp_path: Path
) -> None:
    seen = SETTINGS[setting]
    before, when_called = seen(), []

    def call(x: Tensor) -> Tensor:
        when_called.append(seen())
        with setting(tmp_path):
            compute(x.detach())
            return x * 2

    for _ in range(5):
        parallel_apply([call] * NUM_CALLS, leaves(NUM_CALLS))
    assert [*when_called, seen()] == [before] * (5 * NUM_CALLS + 1)


class Looking(nn.Module):
    """Looks at settings, and has parts that are called as torch's are."""

    def __init__(self, barrier: threading.Barrier) -> None:
        super().__init__()
        self.barrier, self.cudnn, self.was_enabled = barrier, nn.Identity(), False

    def forward(self, x: Tensor) -> Tensor:
        self.was_enabled = torch.backends.cudnn.enabled
        self.barrier.wait()
        flags = x if torch.backends.mkldnn.is_available() else -x
        return self.cudnn(flags)  # type: ignore[no-any-return]


def test_calls_that_look_at_settings_may_wait_for_each_other() -> None:
    experts = [Looking(barrier) for barrier in [threading.Barrier(4, timeout=60)] * 4]
    parallel_apply(experts, leaves(4))
    assert all(expert.was_enabled for expert in experts)


def choose(backend: SDPBackend, x: Tensor) -> Any:
    with choosing(backend):
        compute(x.detach())
        return attend(x, x, x), torch.tensor([int(one) for one in _cur_sdpa_kernel_backends()])


class ChoosesForward(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, backend: SDPBackend) -> Any:
        return choose(backend, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        return grad.sin(), None


class ChoosesBackward(Function):
    @classmethod
    def forward(cls, x: Tensor, backend: SDPBackend) -> Any:
        return x * 2

    @classmethod
    def setup_context(cls, ctx: Any, inputs: Any, output: Any) -> None:
        ctx.x, ctx.backend = inputs

    @classmethod
    def backward(cls, ctx: Any, grad: Tensor) -> Any:
        return choose(ctx.backend, ctx.x.detach())[1].sum() * grad, None


class ChoosesWithin(ChoosesForward):
    @classmethod
    def apply(cls, *args: Any) -> Any:
        return super().apply(*args)


@pytest.mark.parametrize("func", [ChoosesForward, ChoosesBackward, ChoosesWithin])
def test_kernels_that_autograd_functions_choose_are_theirs_alone(func: type[Function]) -> None:
    def program(apply: MapFunction) -> Any:
        xs = leaves(NUM_CALLS, 1, 2, 16, 4)
        outputs = apply(func, *zip(xs, BACKENDS, strict=True))
        return finish(list(outputs), *xs), [one.name for one in _cur_sdpa_kernel_backends()]

    assert not isinstance(assert_same_program(program), Raised)


def test_kernels_that_functions_within_calls_choose_are_theirs_alone() -> None:
    def program(apply: MapFunction) -> Any:
        xs = leaves(NUM_CALLS, 1, 2, 16, 4)
        outputs = apply([lambda x, b=b: ChoosesForward.apply(x, b) for b in BACKENDS], [(x,) for x in xs])
        return finish(outputs, *xs), [one.name for one in _cur_sdpa_kernel_backends()]

    assert_same_without_error(program)
