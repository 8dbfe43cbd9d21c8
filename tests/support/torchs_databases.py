"""Compare every operator and module of torch's own databases, natively and through the map.

Several samples of each are called at once. To be run in a process of its own: to import the databases sets much for the
whole process (`torch.backends.disable_global_flags`).
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.nn.modules.lazy import LazyModuleMixin
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.opinfo import core
from torch.utils import _pytree as pytree

from moe_autograd import parallel_apply
from tests.support.comparison import Raised, assert_same, attempt, one_after_another

MOST_SAMPLES = 3
MOST_SAMPLES_OF_MODULES = 24  # some have hundreds, which are all combinations of their options
ORDER = 1e-12  # of sums
# What calls on threads saved gets its gradient in two parts; some operators cancel digits.
ORDER_OF_SECOND = 1e-10

# For each sample it searches the stack for a test of unittest, and all modules for the files there: most of the time.
for module in (common_utils, core):
    module.extract_test_fn = lambda: None

UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
UNDEFINED |= {"resize_", "resize_as_"}  # they return memory as it was found

DIFFERENT_IN_EVALUATION = (nn.RReLU, nn.modules.dropout._DropoutNd)
DIFFERENT_IN_EVALUATION += tuple(info.module_cls for info in module_db if info.train_and_eval_differ)

Apply = Callable[..., Sequence[Any]]
Case = tuple[str, list[Callable[..., Any]], list[tuple[Any, Any]]]


def tensors_of(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def clone(tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), tree)


def random_like(tensor: Tensor) -> Tensor:
    return torch.randn_like(tensor) if tensor.layout is torch.strided else 2 * tensor.detach()


def derivatives(outputs: list[Tensor], inputs: list[Tensor]) -> tuple[Any, Any]:
    """Return the gradients of the outputs, and theirs, whose strides are anybody's; or how they raised."""
    torch.manual_seed(1)
    if not outputs or not inputs:
        return None, None
    weights = [*map(random_like, outputs)]
    gradients = attempt(partial(grad, create_graph=True, allow_unused=True), outputs, inputs, weights)
    if isinstance(gradients, Raised):
        return gradients, attempt(partial(grad, allow_unused=True), outputs, inputs, weights)
    differentiable = [one for one in gradients if one is not None and one.requires_grad]
    if not differentiable:
        return gradients, None
    weights = [*map(random_like, differentiable)]
    second = attempt(partial(grad, allow_unused=True), differentiable, inputs, weights)
    if isinstance(second, Raised):
        return gradients, second
    return gradients, [None if one is None else one.contiguous() for one in second]


def called(apply: Apply, case: Case) -> tuple[Any, list[Any]]:
    """Make the calls with clones of everything, differentiate, and return the second derivatives and all else."""
    _, functions, calls = case
    functions, calls = copy.deepcopy(functions), clone(calls)
    modules = [function for function in functions if isinstance(function, nn.Module)]
    torch.manual_seed(0)
    returned = attempt(apply, functions, [args for args, _ in calls], [kwargs for _, kwargs in calls])
    if isinstance(returned, Raised):
        return None, [returned]
    outputs = tensors_of(returned)
    inputs = tensors_of(calls)
    weights = [weight for module in modules for weight in module.parameters()]
    buffers = [buffer for module in modules for buffer in module.buffers()]
    first, second = derivatives(
        *([one for one in some if one.requires_grad] for some in (outputs, inputs + weights))
    )
    return second, [outputs, first, inputs, weights, buffers]


def compare(cases: Iterable[Case], *, at_least: int) -> None:
    """Print what differs, a line for each case; so many have to return something, and not to raise."""
    warnings.simplefilter("ignore")  # some come once for the process
    num_compared = 0
    for case in cases:
        (native_second, native), (second, mapped) = (
            called(one_after_another, case),
            called(parallel_apply, case),
        )
        num_compared += not isinstance(native[0], Raised)
        but = frozenset({"is_view"})  # a view of a tensor that nobody else has is no view after a map
        try:
            assert_same(native, mapped, tolerance=ORDER, but=but)
            assert_same(native_second, second, "second", tolerance=ORDER_OF_SECOND, but=but)
        except AssertionError as error:
            print(case[0], *str(error).split())
    assert num_compared >= at_least, num_compared


def operators(dtype: torch.dtype) -> Iterator[Case]:
    for operator in op_db:
        if operator.name not in UNDEFINED and dtype in operator.supported_dtypes("cpu"):
            differentiable = operator.supports_autograd and dtype in operator.supported_backward_dtypes("cpu")
            samples = operator.sample_inputs("cpu", dtype, requires_grad=differentiable)
            calls = [((one.input, *one.args), one.kwargs) for one in itertools.islice(samples, MOST_SAMPLES)]
            if calls:
                yield f"{operator.name} {operator.variant_test_name}", [operator.op] * len(calls), calls


def modules(*, training: bool) -> Iterator[Case]:
    """In evaluation, those that do something else there, or hold such: torch's own tests leave out others as well."""
    for info in module_db:
        if issubclass(info.module_cls, LazyModuleMixin):
            continue  # weights are drawn
        samples = info.module_inputs_func(info, "cpu", torch.float64, requires_grad=True, training=training)
        made, calls = [], []
        for sample in spread(samples):
            if sample.forward_input is not None:
                constructor, forward = sample.constructor_input, sample.forward_input
                made.append(info.module_cls(*constructor.args, **constructor.kwargs).double().train(training))
                calls.append((forward.args, forward.kwargs))
        if calls and (training or differs_in_evaluation(made[0])):
            yield info.name, made, calls


def spread(samples: Sequence[Any]) -> Sequence[Any]:
    """Return at most so many of all; an odd number lies between two: every second would have one value of an option."""
    step = -(-len(samples) // MOST_SAMPLES_OF_MODULES)
    return samples[:: step + (step % 2 == 0)]


def differs_in_evaluation(module: nn.Module) -> bool:
    return any(isinstance(part, DIFFERENT_IN_EVALUATION) for part in module.modules())
