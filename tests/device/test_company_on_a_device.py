"""Maps on a device in the company of what else PyTorch users do: checkpoints, graphs, profilers, optimizers, forks.

Where there is a GPU, kernels are held up on their streams: a missing order between streams shows in the numbers.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

# Before the first matrix product: else `use_deterministic_algorithms` refuses those of a GPU.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from moe_autograd import (
    FeedForwardExpert,
    MixtureOfExperts,
    TopKRouter,
    map_with_parallel_backward,
    parallel_apply,
)
from moe_autograd._streams import MOST_LANES
from tests.support.comparison import natively, one_after_another
from tests.support.devices import DEVICE, HAS_GPU, hold_up, needs_gpu
from tests.support.plain_layer import plain_loop

pytestmark = pytest.mark.gpu

Apply = Callable[..., Any]  # called like `parallel_apply`

NUM_CALLS, WIDTH = 8, 16
SHORT = 3_000_000  # cycles of a GPU's clock: some 2 ms


class Delay(Function):
    """A copy that comes late, in the backward too; it saves something."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        hold_up(SHORT)
        ctx.save_for_backward(x * 1)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        hold_up(SHORT)
        saved: Tensor = ctx.saved_tensors[0]
        return grad + saved * 0


def delayed(x: Tensor) -> Tensor:
    late: Tensor = Delay.apply(x)  # type: ignore[no-untyped-call]  # torch's own gap
    return late


class Late(nn.Module):
    """Its input and output come late."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(delayed(self.first(x)).tanh())
        return y


def experts(make: Callable[[], nn.Module] = Late, device: str = DEVICE) -> list[nn.Module]:
    torch.manual_seed(1)
    return [make().to(device, torch.float64) for _ in range(NUM_CALLS)]


def inputs(device: str = DEVICE) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    drawn = [torch.randn(4 + i, WIDTH, generator=generator, dtype=torch.float64) for i in range(NUM_CALLS)]
    return [x.to(device).requires_grad_() for x in drawn]


def parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    return [p for module in modules for p in module.parameters()]


def grads_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.grad * 1 for tensor in tensors if tensor.grad is not None]


def values_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.detach() * 1 for tensor in tensors]


def loss_of(outputs: Iterable[Tensor]) -> Tensor:
    return delayed(torch.cat(list(outputs))).square().sum()


def assert_same_of_modules(program: Callable[[Apply], Any]) -> None:
    torch.testing.assert_close(program(parallel_apply), program(one_after_another))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_around_a_map_gives_the_same_gradients(use_reentrant: bool) -> None:
    def program(apply: Apply) -> list[Tensor]:
        modules, (x, *_) = experts(), inputs()
        layer = lambda x: torch.cat(apply(modules, [(x * i,) for i in range(NUM_CALLS)]))  # noqa: E731
        loss_of([checkpoint(layer, delayed(x), use_reentrant=use_reentrant)]).backward()
        return grads_of([x, *parameters(modules)])

    assert_same_of_modules(program)


def test_checkpoints_within_the_calls_give_the_same_gradients() -> None:
    def program(apply: Apply) -> list[Tensor]:
        modules, xs = experts(lambda: nn.Sequential(Late(), nn.Dropout(0.0))), inputs()
        calls = [lambda x, m=m: checkpoint(m, x, use_reentrant=False) for m in modules]
        loss_of(apply(calls, [(delayed(x),) for x in xs])).backward()
        return grads_of([*xs, *parameters(modules)])

    assert_same_of_modules(program)


@pytest.mark.parametrize("where", ["forward", "both passes"])
def test_what_is_saved_on_the_cpu_in_pinned_memory_comes_back_whole(where: str) -> None:
    def program(apply: Apply, of_function: Apply) -> list[Tensor]:
        modules, xs = experts(), inputs()
        with contextlib.ExitStack() as stack:
            stack.enter_context(save_on_cpu(pin_memory=True))
            outputs = apply(modules, [(delayed(x),) for x in xs])
            outputs = of_function(Delay, *[(y * 2,) for y in outputs])
            loss = loss_of(outputs)
            if where == "forward":
                stack.close()
            noise = [
                torch.full_like(y, torch.nan) for y in outputs
            ]  # where the allocator had put what was saved
            loss.backward()
        del noise
        return grads_of([*xs, *parameters(modules)])

    for _ in range(3):
        ours = program(parallel_apply, map_with_parallel_backward)
        torch.testing.assert_close(ours, program(one_after_another, natively))


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:Error detected in")
def test_anomaly_detection_finds_a_nan_within_a_call() -> None:
    def make_nan(x: Tensor) -> Tensor:
        return delayed(torch.sqrt(x * 0))  # loss_of's gradient is 0 there, and that of the root infinite

    for apply in (one_after_another, parallel_apply):
        with (
            pytest.raises(RuntimeError, match="'SqrtBackward0' returned nan"),
            torch.autograd.detect_anomaly(check_nan=True),
        ):
            loss_of(apply([delayed, make_nan], [(x,) for x in inputs()[:2]])).backward()


def test_a_profiler_shows_a_range_for_each_call_and_kernels_of_many_streams() -> None:
    modules, xs = experts(), inputs()
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * HAS_GPU]
    with torch.profiler.profile(activities=activities, experimental_config=config) as profile:
        loss_of(parallel_apply(modules, [(x,) for x in xs])).backward()
        if HAS_GPU:
            torch.cuda.synchronize()
    events = profile.events()
    assert events is not None
    on_cpu = torch.autograd.DeviceType.CPU
    names = [event.name for event in events if event.device_type == on_cpu]
    for phase in ("forward", "backward"):
        ranges = [name for name in names if f"parallel_apply, {phase}: call" in name]
        assert len(ranges) == len(set(ranges)) == NUM_CALLS
    on_device = [event for event in events if event.device_type != on_cpu and not event.is_user_annotation]
    assert not HAS_GPU or len({event.device_resource_id for event in on_device}) > NUM_CALLS


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
def test_a_compiled_model_around_a_layer_gives_the_same_gradients() -> None:
    torch._dynamo.reset()
    ours, theirs = layer(), layer()
    compiled = torch.compile(lambda x: ours(x.sin()).cos(), backend="aot_eager")
    torch.testing.assert_close(
        gradients_of(ours, compiled), gradients_of(theirs, lambda x: plain_loop(theirs, x.sin()).cos())
    )


def layer(**options: Any) -> MixtureOfExperts:
    torch.manual_seed(3)
    made = [nn.Sequential(Late(), FeedForwardExpert(WIDTH)) for _ in range(4)]
    return MixtureOfExperts(TopKRouter(WIDTH, 4, top_k=2), made, **options).to(DEVICE, torch.float64)


def tokens() -> Tensor:
    return torch.cat(inputs()).detach()


def gradients_of(module: nn.Module, function: Callable[[Tensor], Tensor]) -> list[Tensor]:
    x = tokens().requires_grad_()
    for _ in range(2):  # the second adds to what the first has left
        loss_of([function(delayed(x))]).backward()
    return grads_of([x, *module.parameters()])


@needs_gpu
def test_experts_that_are_cuda_graphs_are_called_side_by_side() -> None:
    def program(apply: Apply) -> list[Tensor]:
        modules, xs = experts(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())), inputs()
        graphed: list[Any] = [
            torch.cuda.make_graphed_callables(m, (torch.zeros_like(x).requires_grad_(),))
            for m, x in zip(modules, xs, strict=True)
        ]
        said = []
        for factor in (1, 2):
            for tensor in (*xs, *parameters(modules)):
                tensor.grad = None
            outputs = apply(graphed, [(delayed(x) * factor,) for x in xs])
            loss_of(outputs).backward()
            said += [*values_of(outputs), *grads_of([*xs, *parameters(modules)])]
        return said

    assert_same_of_modules(program)


@needs_gpu
def test_a_plain_loop_can_be_captured_after_maps_have_run() -> None:
    modules, xs = experts(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())), inputs()

    def step(apply: Apply) -> None:
        for tensor in (*xs, *parameters(modules)):
            tensor.grad = None
        torch.cat(apply(modules, [(x * 2,) for x in xs])).square().sum().backward()

    for _ in range(3):
        step(parallel_apply)
    expected = grads_of([*xs, *parameters(modules)])
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step(one_after_another)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    for tensor in (*xs, *parameters(modules)):
        tensor.grad = None
    with torch.cuda.graph(graph):
        step(one_after_another)
    graph.replay()
    torch.testing.assert_close(grads_of([*xs, *parameters(modules)]), expected)
    step(parallel_apply)
    torch.testing.assert_close(grads_of([*xs, *parameters(modules)]), expected)


@contextlib.contextmanager
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_a_layer_within_distributed_data_parallel_has_the_gradients_of_the_plain_loop() -> None:
    ours, theirs = layer(zero_grads_for_idle_experts=True), layer()
    with group_of_one():
        model = DistributedDataParallel(ours)
        got = gradients_of(ours, model)
        del model
    torch.testing.assert_close(got, gradients_of(theirs, lambda x: plain_loop(theirs, x)))


def test_optimizers_that_step_in_backward_hooks_give_the_same_weights() -> None:
    def program(apply: Apply) -> list[Tensor]:
        modules = experts()
        for p in parameters(modules):
            optimizer = torch.optim.SGD([p], lr=0.01, momentum=0.9)

            def step(q: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                hold_up(SHORT // 10)
                optimizer.step()
                optimizer.zero_grad()

            p.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            loss_of(apply(modules, [(delayed(x),) for x in inputs()])).backward()
        assert grads_of(parameters(modules)) == []
        return values_of(parameters(modules))

    assert_same_of_modules(program)


def test_hooks_of_modules_and_tensors_see_and_change_the_same() -> None:
    def program(apply: Apply) -> Any:
        modules, xs, seen = experts(), inputs(), {}
        for i, (module, x) in enumerate(zip(modules, xs, strict=True)):

            def note(kind: str, tensor: Tensor, i: int = i) -> Tensor:
                hold_up(SHORT // 10)
                seen[f"{kind} {i}"] = tensor.detach() * 1
                return tensor * 2

            module.register_forward_pre_hook(lambda m, args, note=note: (note("input", args[0]),))
            module.register_forward_hook(lambda m, args, y, note=note: note("output", y))
            see: Any = lambda m, gx, gy, note=note: (note("backward", gx[0]),)  # noqa: E731
            module.register_full_backward_hook(see)
            x.register_hook(lambda grad, note=note: note("gradient", grad))
            for name, p in module.named_parameters():
                p.register_hook(lambda grad, name=name, note=note: note(name, grad))
        outputs = apply(modules, [(x,) for x in xs])
        for i, y in enumerate(outputs):
            y.register_hook(lambda grad, i=i: grad * (i + 1))
        loss_of(outputs).backward()
        return dict(sorted(seen.items())), grads_of([*xs, *parameters(modules)])

    assert_same_of_modules(program)


def test_inference_mode_gives_the_same_values() -> None:
    def program(apply: Apply) -> list[Tensor]:
        modules, xs = experts(), inputs()
        with torch.inference_mode():
            outputs = apply(modules, [(delayed(x),) for x in xs])
            assert all(y.is_inference() for y in outputs)
            return [delayed(y) for y in outputs]

    assert_same_of_modules(program)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_deterministic_algorithms_give_the_same_bits_each_time(deterministic: None) -> None:
    def run() -> list[Tensor]:
        ours = layer()
        ours.router.top_k, ours.router.capacity_factor = 3, 0.9  # type: ignore[assignment]
        return gradients_of(ours.float(), lambda x: ours(x.float()))

    expected = run()
    for _ in range(3):
        torch.testing.assert_close(run(), expected, rtol=0, atol=0)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "fused Adam": lambda weights: torch.optim.Adam(weights, lr=0.01, fused=True),
    "foreach Adam": lambda weights: torch.optim.Adam(weights, lr=0.01, foreach=True),
    "foreach SGD": lambda weights: torch.optim.SGD(weights, lr=0.01, momentum=0.9, foreach=True),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_layer_trains_as_the_plain_loop_with_clipped_gradients(kind: str) -> None:
    def trained(*, is_plain: bool) -> tuple[list[Tensor], list[Tensor]]:
        model = layer()
        optimizer, norms = OPTIMIZERS[kind](list(model.parameters())), []
        for i in range(4):
            optimizer.zero_grad()
            x = tokens() + i
            loss_of([plain_loop(model, x) if is_plain else model(x)]).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
        return values_of(norms), values_of(model.parameters())

    torch.testing.assert_close(trained(is_plain=False), trained(is_plain=True))


class Mapped(Dataset[list[str]]):
    """What calls on the CPU give in a child, in words; torch refuses gradients there, if its own threads are gone."""

    def __init__(self, *, is_differentiated: bool) -> None:
        self._is_differentiated = is_differentiated

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> list[str]:
        apply: Apply = parallel_apply if index % 2 else one_after_another
        make = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())  # noqa: E731
        modules, xs = experts(make, "cpu"), inputs("cpu")
        try:
            with torch.set_grad_enabled(self._is_differentiated):
                outputs = apply(modules, [(x,) for x in xs])
            said = values_of(outputs)
            if self._is_differentiated:
                torch.cat(list(outputs)).square().sum().backward()
                said += grads_of([*xs, *parameters(modules)])
        except RuntimeError as error:
            return [str(error)]
        return [f"{tensor.sum().item():.9g}" for tensor in said]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python's own, of any thread
@pytest.mark.parametrize("is_differentiated", [False, True])
def test_forked_workers_of_a_data_loader_map_beside_a_device(is_differentiated: bool) -> None:
    loss_of(parallel_apply(experts(), [(x,) for x in inputs()])).backward()
    dataset = Mapped(is_differentiated=is_differentiated)
    loader: DataLoader[list[str]] = DataLoader(
        dataset, batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60
    )
    loop, *others = list(loader)
    assert others == [loop] * 3
    assert is_differentiated or loop == dataset[0]


@pytest.mark.filterwarnings("default")
def test_no_backward_warns_of_streams_that_nobody_has_chosen() -> None:
    """PyTorch does where the node that accumulates a gradient was made on another stream than the gradient."""
    torch.set_warn_always(True)
    try:
        for apply in (one_after_another, parallel_apply):
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                modules, xs = experts(), inputs()
                for _ in range(2):
                    loss_of(apply(modules * 2, [(x,) for x in xs * 2])).backward()
            assert [str(one.message) for one in warned if "stream" in str(one.message)] == [], apply
    finally:
        torch.set_warn_always(False)


@needs_gpu
def test_the_memory_that_matrix_products_work_in_comes_to_an_end() -> None:
    """Torch keeps some for each pair of a thread's handle and a stream."""
    meet = threading.Barrier(NUM_CALLS)
    weight = torch.ones(WIDTH, WIDTH, device=DEVICE)

    def multiply(x: Tensor) -> Tensor:
        meet.wait(60)
        return x @ weight

    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    with torch.cuda.stream(torch.cuda.Stream()):
        weight @ weight
    torch.cuda.synchronize()
    one = torch.cuda.memory_allocated() - before
    for _ in range(40):
        parallel_apply([multiply] * NUM_CALLS, [(weight,)] * NUM_CALLS)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before <= MOST_LANES * (NUM_CALLS + 2) * one


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_within_attention_is_the_same_in_whatever_order_calls_come_to_it(dtype: torch.dtype) -> None:
    x = torch.randn(1, 2, 32, 16).to(DEVICE, dtype)

    def run(*, is_reversed: bool) -> list[Tensor]:
        torch.manual_seed(7)
        done = [threading.Event() for _ in range(NUM_CALLS + 1)]
        done[-1].set()

        def attend(index: int) -> Tensor:
            if is_reversed:
                done[index + 1].wait(60)
            y = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
            done[index].set()
            return y

        bound = None if is_reversed else 1
        return parallel_apply([attend] * NUM_CALLS, [(i,) for i in range(NUM_CALLS)], max_concurrency=bound)

    expected = run(is_reversed=False)
    torch.testing.assert_close(run(is_reversed=True), expected, rtol=0, atol=0)
    assert len({tuple(y.flatten().tolist()) for y in expected}) == NUM_CALLS
