"""On an accelerator the allocator knows which streams use a tensor's memory; and which calls take turns there."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from moe_autograd import _streams, map_with_parallel_backward, parallel_apply
from tests.support.launches import NUM_CALLS, launch_everywhere, leaves
from tests.support.streams import Kernel, RecordingAccelerator


def test_tensors_are_recorded_where_they_are_used(accelerator: RecordingAccelerator) -> None:
    class Saves(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x * 1)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * ctx.saved_tensors[0]

    def uses() -> dict[bool, int]:
        used = dict.fromkeys((False, True), 0)
        for _, stream in accelerator.recorded:
            used[stream.name.startswith("lane")] += 1
        accelerator.recorded.clear()
        return used

    results = map_with_parallel_backward(Saves, *[(x,) for x in leaves()])
    assert uses() == {True: NUM_CALLS, False: 2 * NUM_CALLS}, (
        "arguments there; results and what is saved here"
    )
    torch.stack(results).sum().backward()
    assert uses() == {True: 2 * NUM_CALLS, False: NUM_CALLS}, (
        "saved tensors and gradients there; gradients here"
    )


@pytest.mark.usefixtures("nothing_is_small")
def test_modules_arguments_and_returned_tensors_are_recorded(accelerator: RecordingAccelerator) -> None:
    xs = leaves()
    with torch.no_grad():
        outputs = parallel_apply([lambda x: x.tanh()] * NUM_CALLS, [(x,) for x in xs])
    recorded = {(id(tensor), stream.name.startswith("lane")) for tensor, stream in accelerator.recorded}
    assert {(id(x), True) for x in xs} | {(id(y), False) for y in outputs} <= recorded


def test_tensors_in_objects_that_modules_take_and_return_are_recorded(
    accelerator: RecordingAccelerator,
) -> None:
    boxes = [types.SimpleNamespace(x=x) for x in leaves()]
    calls = [lambda box: types.SimpleNamespace(y=box.x.tanh(), rest=[box.x.detach() * 2])] * NUM_CALLS
    outputs = parallel_apply(calls, [(box,) for box in boxes])
    recorded = {(id(tensor), stream.name.startswith("lane")) for tensor, stream in accelerator.recorded}
    returned = {(id(y), False) for output in outputs for y in (output.y, *output.rest)}
    assert {(id(box.x), True) for box in boxes} | returned <= recorded


def test_tensors_in_lists_that_functions_return_are_recorded(accelerator: RecordingAccelerator) -> None:
    class ReturnsAList(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Any:
            return x * 2, [x * 3]

    outputs = map_with_parallel_backward(ReturnsAList, *[(x,) for x in leaves()])
    recorded = {(id(tensor), stream.name.startswith("lane")) for tensor, stream in accelerator.recorded}
    assert {(id(listed), False) for _, (listed,) in outputs} <= recorded


class Notes(nn.Module):
    """Notes the kernels that it queues, one on each device; it keeps statistics if it is told to."""

    def __init__(self, accelerator: RecordingAccelerator, *, keeps_statistics: bool) -> None:
        super().__init__()
        self.keeps_statistics = keeps_statistics
        self.accelerator, self.kernels, self.caches_casts = accelerator, list[list[Kernel]](), set[bool]()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        self.kernels.append(launch_everywhere(self.accelerator))
        self.caches_casts.add(torch.is_autocast_cache_enabled())
        return x * self.weight


@pytest.mark.parametrize("recompute", [False, True])
def test_calls_that_take_turns_do_so_on_the_devices_as_well(
    accelerator: RecordingAccelerator, recompute: bool
) -> None:
    """Statistics that a call adds to are those that the call before has queued a kernel for."""
    shared = Notes(accelerator, keeps_statistics=True)
    outputs = parallel_apply([shared] * NUM_CALLS, [(x,) for x in leaves()], recompute=recompute)
    forward, shared.kernels = shared.kernels, []
    torch.stack(outputs).sum().backward()
    assert len(shared.kernels) == (NUM_CALLS if recompute else 0)
    for kernels in (forward, shared.kernels):
        for earlier, later in itertools.pairwise(kernels):
            assert all(kernel.comes_after(other) for kernel in later for other in earlier)


@pytest.mark.parametrize("is_shared", [False, True])
def test_calls_that_share_a_weight_cast_it_each_for_itself(
    accelerator: RecordingAccelerator, is_shared: bool
) -> None:
    """A cast that another call has put into autocast's cache is on another stream."""
    made = [Notes(accelerator, keeps_statistics=False) for _ in range(NUM_CALLS)]
    parallel_apply([made[0]] * NUM_CALLS if is_shared else made, [(x,) for x in leaves()])
    assert made[0].caches_casts == {not is_shared}
    assert torch.is_autocast_cache_enabled()

    class Casts(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            made[0].caches_casts.add(torch.is_autocast_cache_enabled())
            return x * weight

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            return grad, grad

    made[0].caches_casts.clear()
    weights = [made[0].weight] * NUM_CALLS if is_shared else leaves()
    map_with_parallel_backward(Casts, *zip(leaves(), weights, strict=True))
    assert made[0].caches_casts == {not is_shared}


@pytest.mark.filterwarnings("ignore:Sparse CS", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: x.to_sparse(),
        lambda x: x.to_sparse_csr(),
        lambda x: x.to_sparse_csc(),
        lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged),
        lambda x: torch.nested.nested_tensor([x, x]),
        lambda x: (x + 1j).conj(),
        lambda x: (x + 1j).conj().imag,
    ],
    ids=["strided", "coo", "csr", "csc", "jagged", "nested", "conjugate", "negative"],
)
def test_a_tensors_memory_is_found_in_every_layout(make: Callable[[Tensor], Tensor]) -> None:
    made = make(torch.eye(3))
    parts = _streams._strided_parts(made)
    assert parts
    for part in parts:
        assert part.layout is torch.strided
        records_otherwise = part.is_nested, part.is_conj(), part.is_neg()
        assert not any(records_otherwise)
        assert part.untyped_storage().nbytes() > 0
    if made.layout is torch.strided and not made.is_nested:
        assert parts[0].untyped_storage().data_ptr() == made.untyped_storage().data_ptr()


def test_lengths_and_offsets_of_jagged_tensors_are_memory_as_well() -> None:
    jagged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
    recorded = {part.data_ptr() for part in _streams._strided_parts(jagged)}
    assert {jagged.values().data_ptr(), jagged.offsets().data_ptr()} <= recorded


def test_zeros_that_keep_no_memory_are_not_recorded() -> None:
    assert _streams._strided_parts(torch._efficientzerotensor(3)) == ()


def test_without_an_accelerator_there_are_no_lanes() -> None:
    if torch.accelerator.current_accelerator() is None:
        assert _streams.lanes_from_here(shares_weights=False) is None
        _streams.use_here([torch.ones(2)])


@pytest.mark.parametrize("by_name", [False, True])
def test_calls_of_jagged_tensors_stay_on_the_callers_streams(
    accelerator: RecordingAccelerator, by_name: bool
) -> None:
    """The engine cannot hand their gradients from one stream to another."""
    jagged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
    kernels: list[Kernel] = []

    def call(x: Tensor) -> Tensor:
        kernels.extend(launch_everywhere(accelerator))
        return x * 2

    given: list[Any] = [{"x": jagged}] * NUM_CALLS
    if by_name:
        parallel_apply([call] * NUM_CALLS, [()] * NUM_CALLS, given)
    else:
        parallel_apply([call] * NUM_CALLS, [(jagged,)] * NUM_CALLS)
    assert {kernel.stream for kernel in kernels} == set(accelerator.defaults)


def test_gradients_of_a_batch_are_recorded_as_the_memory_that_they_are() -> None:
    found: list[Tensor] = []

    class Looks(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            found.extend(_streams._strided_parts(grad))
            return grad

    x, grads = torch.ones(3, requires_grad=True), torch.eye(3)
    torch.autograd.grad(Looks.apply(x), x, grads, is_grads_batched=True)  # type: ignore[no-untyped-call]
    assert [one.untyped_storage().data_ptr() for one in found] == [grads.untyped_storage().data_ptr()]


def test_modes_see_nothing_of_it() -> None:
    seen: list[Any] = []

    class Sees(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class SeesFunctions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class OnNothing(_streams.Accelerator):
        def __init__(self) -> None:
            self.kind = "meta"

        def current_stream(self, device: int) -> Any:
            return torch.Stream("cpu")

    x, refused = torch.ones(2, device="meta"), pytest.raises(NotImplementedError, match="record_stream")
    with Sees(), SeesFunctions(), refused:  # by torch itself
        OnNothing().record(x)
    assert [func for func in seen if "record_stream" in str(func)] == []
