"""Maps on a GPU, between streams: what orders kernels, and whose memory the allocator may hand out again.

Programs run in a plain loop and through the map, with kernels that are held up, and are to give the same bits. Where
memory could be given back too early, other kernels ask for as much and fill it with NaN while the first ones wait.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from moe_autograd import map_with_parallel_backward, parallel_apply
from moe_autograd.errors import UnsupportedTransformError
from tests.support.comparison import natively, one_after_another
from tests.support.devices import DEVICE, HAS_GPU, LONG_CYCLES, hold_up, needs_gpu

pytestmark = pytest.mark.gpu

NUM_CALLS, WIDTH = 6, 64
LARGE = 1 << 22  # elements; of the allocator's segments each has one of its own
PATIENCE_S = 60.0
NAN = float("nan")


def inputs(num_calls: int = NUM_CALLS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(WIDTH, WIDTH, generator=generator).to(DEVICE).requires_grad_() for _ in range(num_calls)
    ]


def grads_of(leaves: list[Tensor]) -> list[Tensor]:
    return [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]


def synchronize() -> None:
    if HAS_GPU:
        torch.cuda.synchronize()


def on_own_stream() -> contextlib.AbstractContextManager[Any]:
    """A stream that goes on after the current one."""
    if not HAS_GPU:
        return contextlib.nullcontext()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(stream)


def forget_free_memory() -> None:
    """What is asked for next is what is given back next."""
    synchronize()
    if HAS_GPU:
        torch.cuda.empty_cache()


def assert_same_bits(got: Any, expected: Any) -> None:
    synchronize()
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


class Slow(Function):
    """Waits on its stream before it reads anything, in both passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *_: Any) -> Any:
        hold_up()
        ctx.save_for_backward(x * 1)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        hold_up()
        return (2 * ctx.saved_tensors[0] * grads[0], *(None,) * (len(ctx.needs_input_grad) - 1))


class Synchronizes(Slow):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *_: Any) -> Any:
        hold_up()
        ctx.save_for_backward(x.cpu().to(DEVICE))
        return x * x.sum().item()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.saved_tensors[0].sum().item() * grads[0].cpu().to(DEVICE)


class HasItsOwnStream(Slow):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *_: Any) -> Any:
        with on_own_stream():
            hold_up()
            result = x * x
            if HAS_GPU:
                side = torch.cuda.current_stream()
                x.record_stream(side)
        if HAS_GPU:
            torch.cuda.current_stream().wait_stream(side)
            result.record_stream(torch.cuda.current_stream())
        ctx.save_for_backward(x * 1)
        return result


class LeavesAnotherStreamCurrent(Slow):
    """What follows it natively is queued on that stream."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *_: Any) -> Any:
        on_own_stream().__enter__()
        return Slow.forward(ctx, x)


class Nested(Slow):
    """Maps within maps, to the depth that the second argument says."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, depth: int = 3, apply: Any = map_with_parallel_backward) -> Any:
        if depth == 0:
            return Slow.forward(ctx, x)
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            halves = apply(Nested, (inner * 2, depth - 1, apply), (inner * 3, depth - 1, apply))
            ctx.inner, ctx.result = inner, halves[0] + halves[1]
        ctx.depth = depth
        return ctx.result.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if not hasattr(ctx, "depth"):
            return Slow.backward(ctx, *grads)
        (grad,) = torch.autograd.grad(ctx.result, ctx.inner, grads[0])
        return (grad, *(None,) * (len(ctx.needs_input_grad) - 1))


class MapsInItsBackward(Slow):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with torch.enable_grad():
            leaf = ctx.saved_tensors[0].detach().requires_grad_()
            halves = map_with_parallel_backward(Slow, (leaf,), (leaf * 2,))
            (grad,) = torch.autograd.grad(halves[0] + halves[1], leaf, grads[0])
        return grad


class ReturnsItsInput(Slow):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *_: Any) -> Any:
        hold_up()
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 3


class ReturnsAView(ReturnsItsInput):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *_: Any) -> Any:
        return x.view(-1, WIDTH)


class ChangesInPlace(ReturnsItsInput):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *_: Any) -> Any:
        hold_up()
        ctx.mark_dirty(x)
        return x.mul_(3)


class ComputesOnTheCPU(Slow):
    """Its input and its result are on the device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *_: Any) -> Any:
        hold_up()
        ctx.save_for_backward(x.cpu())
        return (x.cpu() * x.cpu()).to(DEVICE)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (2 * ctx.saved_tensors[0] * grads[0].cpu()).to(DEVICE)


class GivesAZeroTensor(Slow):
    """Of those that hold no memory, and may not be written to."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return torch._efficientzerotensor(grads[0].shape, device=DEVICE)


class ReturnsAConjugate(Slow):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *_: Any) -> Any:
        hold_up()
        ctx.save_for_backward(torch.complex(x, x).conj())
        return torch.complex(x, 2 * x).conj()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (grads[0] * ctx.saved_tensors[0]).imag * 1


def step(apply: Any, func: type[Function], num_calls: int = NUM_CALLS) -> list[Tensor]:
    """The caller's kernels are held up as well, before, between and after the passes."""
    xs = inputs(num_calls)
    with on_own_stream():  # which puts the stream back that a call replaced
        hold_up()
        depth = (3, apply) if func is Nested else ()
        results = apply(func, *[(x * 3, *depth) for x in xs])
        hold_up()
        loss = torch.stack([(y * 2).abs().sum() for y in results]).sum()
        loss.backward()
        hold_up()
        seen = [*[y.detach() * 1 for y in results], *grads_of(xs)]
        synchronize()
    return seen


FUNCTIONS = [
    *(Slow, Synchronizes, HasItsOwnStream, LeavesAnotherStreamCurrent, Nested, MapsInItsBackward),
    *(ReturnsItsInput, ReturnsAView, ChangesInPlace, ComputesOnTheCPU, GivesAZeroTensor, ReturnsAConjugate),
]


@pytest.mark.parametrize("func", FUNCTIONS)
def test_calls_that_are_held_up_give_the_bits_of_a_loop(func: type[Function]) -> None:
    assert_same_bits(step(map_with_parallel_backward, func), step(natively, func))


@pytest.mark.parametrize("bound", [1, 2, None])
def test_more_calls_than_there_are_streams_give_the_bits_of_a_loop(bound: int | None) -> None:
    def bounded(func: type[Function], *args: Any) -> tuple[Any, ...]:
        return map_with_parallel_backward(func, *args, max_concurrency=bound)

    assert_same_bits(step(bounded, Slow, 40), step(natively, Slow, 40))


# ---- memory


class Returns(Function):
    """What the second argument makes of a new tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pack: Callable[[Tensor], Any]) -> Any:
        return pack(x * 2)


class FillsWithNaN(Function):
    """Takes what the allocator has for a call, without regard to who reads it."""

    @staticmethod
    def forward(ctx: Any, size: int) -> None:
        for dtype in (torch.float32, torch.float64, torch.complex64):
            [torch.full((size,), NAN, dtype=dtype, device=DEVICE) for _ in range(2)]


def coo(x: Tensor) -> Tensor:
    places = torch.arange(len(x), device=x.device)[None] * 1
    return torch.sparse_coo_tensor(places, x, (len(x),), is_coalesced=True, check_invariants=False)


def jagged(x: Tensor) -> Tensor:
    offsets = torch.arange(len(x) + 1, device=x.device)
    return torch.nested.nested_tensor_from_jagged(x[:, None], offsets, min_seqlen=1, max_seqlen=1)


PACKED: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda x: x, lambda y: y),
    "list": (lambda x: [x], lambda y: y[0]),
    "coo_values": (coo, lambda y: y._values()),
    "coo_indices": (coo, lambda y: y._indices()[0]),
    "jagged_values": (jagged, lambda y: y.values()[:, 0]),
    "jagged_offsets": (jagged, lambda y: y.offsets()),
    "conjugate": (lambda x: torch.complex(x, x).conj(), lambda y: y),
}


@pytest.mark.parametrize("kind", PACKED)
def test_results_are_not_written_over_while_their_caller_still_reads_them(kind: str) -> None:
    """The next map's caller is on a stream that waits for none of the reads."""
    pack, unpack = PACKED[kind]
    xs = [torch.full((LARGE,), float(i), device=DEVICE) for i in range(3)]
    expected = [unpack(pack(x * 2)).clone() for x in xs]
    seen = [torch.empty_like(y) for y in expected]
    FillsWithNaN.apply(8)  # type: ignore[no-untyped-call]  # the first launch of a kernel may wait for others
    for own, x in zip(seen, xs, strict=True):
        own.copy_(unpack(pack(x * 2))).zero_()
    forget_free_memory()
    with on_own_stream():
        results = list(map_with_parallel_backward(Returns, *[(x, pack) for x in xs]))
        hold_up(5 * LONG_CYCLES)
        for own in seen:
            own.copy_(unpack(results.pop(0)))
    with on_own_stream():
        map_with_parallel_backward(FillsWithNaN, *[(len(seen[0]),)] * 3)
    assert_same_bits(seen, expected)


class KeepsAside(Function):
    """Keeps a tensor as a free attribute; call 2, held up, lets go of it before call 3 asks for as much memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int, barrier: threading.Barrier) -> Tensor:
        ctx.aside, ctx.number, ctx.barrier = x * 3, number, barrier
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        aside, ctx.aside = ctx.aside, None
        found = torch.empty_like(grad)
        ctx.barrier.wait(PATIENCE_S)
        if ctx.number == 2:
            hold_up(5 * LONG_CYCLES)
        torch.mul(aside, grad, out=found)
        del aside
        ctx.barrier.wait(PATIENCE_S)
        if ctx.number == 3:
            torch.full_like(grad, NAN)
        return found, None, None


@pytest.mark.parametrize("first", [0, 1])
def test_what_a_call_keeps_is_not_written_over_by_another_one_in_a_backward_of_all_or_some(
    first: int,
) -> None:
    xs = [torch.full((LARGE,), float(i + 1), device=DEVICE, requires_grad=True) for i in range(5)]
    expected = [x.detach() * torch.full_like(x, 6.0) for x in xs[first:]]
    forget_free_memory()
    barrier = threading.Barrier(5 - first)
    results = map_with_parallel_backward(KeepsAside, *[(x, i, barrier) for i, x in enumerate(xs)])
    found = torch.autograd.grad(results[first:], xs[first:], [torch.full_like(x, 2.0) for x in xs[first:]])
    assert_same_bits([*found], expected)


def test_inputs_and_weights_may_go_or_change_right_after_the_map() -> None:
    weights = [torch.full((LARGE,), float(i), device=DEVICE) for i in range(NUM_CALLS)]
    expected = [w * 5 for w in weights]

    def call(weight: Tensor) -> Callable[[Tensor], Tensor]:
        def multiply(x: Tensor) -> Tensor:
            hold_up()
            return weight * x

        return multiply

    xs = [torch.full((LARGE,), 5.0, device=DEVICE) for _ in weights]
    results = parallel_apply([call(weight) for weight in weights], [(x,) for x in xs])
    for weight in weights:
        weight.fill_(NAN)
    del weights, xs, weight
    filled = [torch.full((LARGE,), NAN, device=DEVICE) for _ in range(2 * NUM_CALLS)]
    assert_same_bits(results, expected)
    assert len(filled) == 2 * NUM_CALLS


class Attached(nn.Module):
    """A layer whose calls are made on threads: it may do anything."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.note: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        hold_up()
        self.note.append(threading.get_ident())
        y: Tensor = self.inner(x).tanh()
        return y


def train(apply: Any) -> list[Tensor]:
    """Three steps, each of two maps whose gradients add up, with an optimizer that is held up as well."""
    torch.manual_seed(3)
    layers = [Attached().to(DEVICE, torch.float64) for _ in range(NUM_CALLS)]
    weights = [weight for layer in layers for weight in layer.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        for scale in (1, 2):
            outputs = apply(layers, [(x.detach().double() * scale,) for x in inputs()])
            torch.stack([y.square().sum() for y in outputs]).sum().backward()
        hold_up()
        optimizer.step()
    return [weight.detach() for weight in weights]


def test_training_modules_whose_gradients_add_up_gives_the_weights_of_a_loop() -> None:
    """PyTorch warns, which is an error here, if a leaf was first met on another stream than its gradient comes from."""
    torch.testing.assert_close(train(parallel_apply), train(one_after_another), rtol=1e-9, atol=1e-12)


# ---- callers


def in_threads(programs: list[Callable[[], Any]]) -> list[Any]:
    """Run them side by side; return what they returned."""
    returned: dict[int, Any] = {}

    def run(i: int) -> None:
        try:
            returned[i] = programs[i]()
        except BaseException as error:
            returned[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(programs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    for error in returned.values():
        if isinstance(error, BaseException):
            raise error
    return [returned.get(i, "has not ended") for i in range(len(programs))]


def test_maps_of_several_threads_do_not_disturb_each_other() -> None:
    expected = step(natively, Slow)
    for got in in_threads([lambda: [step(map_with_parallel_backward, Slow) for _ in range(3)]] * 4):
        assert_same_bits(got, [expected] * 3)


def test_several_backwards_at_once_of_graphs_made_elsewhere() -> None:
    def made(apply: Any) -> tuple[list[Tensor], Tensor]:
        xs = inputs()
        return xs, torch.stack([y.sum() for y in apply(Slow, *[(x * 3,) for x in xs])]).sum()

    expected, loss = made(natively)
    loss.backward()
    with on_own_stream():
        graphs = [made(map_with_parallel_backward) for _ in range(4)]

    def backward(xs: list[Tensor], loss: Tensor) -> list[Tensor]:
        with on_own_stream():
            hold_up()
            loss.backward()
            return grads_of(xs)

    for got in in_threads([lambda xs=xs, loss=loss: backward(xs, loss) for xs, loss in graphs]):  # type: ignore[misc]
        assert_same_bits(got, grads_of(expected))


def test_results_used_and_differentiated_under_another_stream() -> None:
    xs, others = inputs(), inputs()
    results = map_with_parallel_backward(Slow, *[(x * 3,) for x in xs])
    with on_own_stream():
        loss = torch.stack([y * 2 for y in results]).sum()
    with on_own_stream():
        loss.backward()
        found = grads_of(xs)
    torch.stack([y * 2 for y in natively(Slow, *[(x * 3,) for x in others])]).sum().backward()
    assert_same_bits(found, grads_of(others))


@pytest.mark.parametrize("is_backward", [False, True])
@needs_gpu
def test_the_callers_stream_is_put_back_also_after_an_error(is_backward: bool) -> None:
    class Fails(Slow):
        @staticmethod
        def forward(ctx: Any, x: Tensor, *_: Any) -> Any:
            torch.cuda.set_stream(torch.cuda.Stream())
            if not is_backward:
                raise ValueError("on purpose")
            return Slow.forward(ctx, x)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            torch.cuda.set_stream(torch.cuda.Stream())
            raise ValueError("on purpose")

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        xs = inputs()
        with pytest.raises(ValueError, match="on purpose"):
            torch.stack(map_with_parallel_backward(Fails, *[(x,) for x in xs])).sum().backward()
        assert torch.cuda.current_stream() == stream
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert_same_bits(step(map_with_parallel_backward, Slow), step(natively, Slow))


@needs_gpu
def test_a_capture_is_refused_and_goes_on() -> None:
    graph, xs, total = torch.cuda.CUDAGraph(), inputs(), torch.zeros(8, device=DEVICE)
    with torch.cuda.graph(graph):
        total.add_(1)
        with pytest.raises(UnsupportedTransformError, match="graph capture"):
            map_with_parallel_backward(Slow, *[(x,) for x in xs])
        total.add_(1)
    for _ in range(3):
        graph.replay()
    assert_same_bits(total, torch.full((8,), 6.0, device=DEVICE))
    assert_same_bits(step(map_with_parallel_backward, Slow), step(natively, Slow))


# ---- other devices, other layouts


def test_a_map_in_a_hook_of_a_backward_gives_the_bits_of_a_loop() -> None:
    def program(apply: Any) -> list[Tensor]:
        xs, weights = inputs(), inputs()

        def hook(grad: Tensor) -> Tensor:
            with torch.enable_grad():
                torch.stack(apply(Slow, *[(w * 2,) for w in weights])).sum().backward()
            return grad + sum(grads_of(weights))

        middle = xs[0] * 3
        middle.register_hook(hook)
        torch.stack(apply(Slow, *[(x,) for x in (middle, *xs[1:])])).sum().backward()
        return grads_of([*xs, *weights])

    assert_same_bits(program(map_with_parallel_backward), program(natively))


class Moves(Function):
    """Computes where its input is, and returns it elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, to: str) -> Tensor:
        hold_up()
        ctx.save_for_backward(x * 1)
        return (x * x).to(to)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        hold_up()
        return 2 * x * grad.to(x.device), None


@pytest.mark.parametrize("loss_on", ["cpu", DEVICE])
@pytest.mark.parametrize(
    "ways",
    [
        ["cpu cpu", f"{DEVICE} {DEVICE}", f"cpu {DEVICE}", f"{DEVICE} cpu"],
        [f"{DEVICE} cpu"] * 3,
        [f"cpu {DEVICE}"] * 3,
    ],
    ids=["mixed", "to_cpu", "to_device"],
)
def test_calls_on_the_cpu_and_on_the_device_give_the_bits_of_a_loop(loss_on: str, ways: list[str]) -> None:
    def program(apply: Any) -> list[Tensor]:
        pairs = [way.split() for way in ways]
        xs = [x.detach().to(at).requires_grad_() for x, (at, _) in zip(inputs(len(ways)), pairs, strict=True)]
        results = apply(Moves, *[(x * 3, to) for x, (_, to) in zip(xs, pairs, strict=True)])
        torch.stack([y.to(loss_on).sum() for y in results]).sum().backward()
        return [*[y.detach() for y in results], *grads_of(xs)]

    assert_same_bits(program(map_with_parallel_backward), program(natively))


@needs_gpu
def test_copies_to_pinned_memory_are_there_once_the_callers_stream_is() -> None:
    class Fetches(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, host: Tensor) -> None:
            hold_up()
            host.copy_(x * 2, non_blocking=True)

    xs = [x.detach() for x in inputs()]
    hosts = [torch.empty(WIDTH, WIDTH, pin_memory=True) for _ in xs]
    with on_own_stream():
        map_with_parallel_backward(Fetches, *zip(xs, hosts, strict=True))
        torch.cuda.current_stream().synchronize()
        for host, x in zip([host.clone() for host in hosts], xs, strict=True):
            torch.testing.assert_close(host, x.cpu() * 2, rtol=0, atol=0)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
    "bsr": lambda x: x.to_sparse_bsr((2, 2)),
    "nested": lambda x: torch.nested.nested_tensor([x, x[:3]]),
    "jagged": lambda x: torch.nested.nested_tensor([x, x[:3]], layout=torch.jagged),
    "imaginary": lambda x: torch.view_as_complex(torch.stack([x, x], -1)).imag,
    "negative": lambda x: torch.view_as_complex(torch.stack([x, x], -1)).conj().imag,
    "empty": lambda x: x[:0],
    "expanded": lambda x: x[:1].expand(5, -1, -1),
    "sum": lambda x: x.sum(),
}


def dense(x: Tensor) -> Tensor:
    if x.is_nested:
        return torch.cat([part.flatten() for part in x.unbind()])
    return x.to_dense() if x.layout is not torch.strided else x.clone()


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_and_inputs_of_any_layout_are_those_of_a_loop(layout: str) -> None:
    def again(x: Tensor) -> Tensor:
        hold_up()
        return x.clone()

    def convert(x: Tensor) -> Tensor:
        hold_up()
        return LAYOUTS[layout](x * 2)

    xs = [x.detach() for x in inputs()]

    def program(apply: Any) -> list[Tensor]:
        converted = apply([convert] * NUM_CALLS, [(x,) for x in xs])
        return [dense(y) for y in apply([again] * NUM_CALLS, [(y,) for y in converted])]

    assert_same_bits(program(parallel_apply), program(one_after_another))
