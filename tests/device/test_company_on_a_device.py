"""Maps on a device in the company of wrappers, optimizers, hooks, modes, forks, and of torch's own warnings.

Where there is a GPU, kernels are held up on their streams: a missing order between streams shows in the numbers.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from moe_autograd import parallel_apply
from moe_autograd._streams import MOST_LANES
from tests.support.comparison import one_after_another
from tests.support.devices import DEVICE, hold_up, needs_gpu
from tests.support.modules_held_up import (
    NUM_CALLS,
    SHORT,
    WIDTH,
    Apply,
    assert_same_of_modules,
    delayed,
    experts,
    gradients_of,
    grads_of,
    inputs,
    layer,
    loss_of,
    parameters,
    tokens,
    values_of,
)
from tests.support.plain_layer import plain_loop

pytestmark = pytest.mark.gpu

# Before the first matrix product: else `use_deterministic_algorithms` refuses those of a GPU.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


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
