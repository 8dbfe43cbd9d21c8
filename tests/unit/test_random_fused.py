"""Operators that take no generator and draw within their own kernels draw what is their call's.

The device is a fake: one operator, whose kernel draws from the device's generator, as those of fused attention do.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _python_dispatch
from torch.utils.checkpoint import checkpoint

from moe_autograd import parallel_apply
from moe_autograd._random import fused, operators, stand_ins
from tests.support.functions_waiting import PATIENCE_S

NUM_CALLS = 4

# They are tagged as random: but the first four draw for nobody, the others are given what they are to draw from, or
# belong to devices whose kernels draw in ways of their own.
NEVER_DRAW = {
    *(
        "_fused_sdp_choice",
        "_nested_tensor_softmax_with_shape",
        "_flash_attention_forward_no_dropout_inplace",
        "_cudnn_attention_forward_no_dropout_inplace",  # from torch 2.15 on
    ),
    *("_cudnn_attention_backward", "_scaled_dot_product_cudnn_attention_backward"),
    *("_scaled_dot_product_efficient_attention_backward", "_fill_mem_eff_dropout_mask_"),
    *("_cudnn_init_dropout_state", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_lstm_mps", "_scaled_dot_product_attention_math_for_mps", "miopen_rnn"),
}


def test_every_operator_that_draws_without_a_generator_is_caught() -> None:
    """A new version of torch that has another one fails here."""
    caught = {"native_dropout", "_cudnn_rnn", *(name for name, _ in operators.fused_operators())}
    caught |= {name for name, *_ in operators.operators_that_draw_inside()}
    found = {name for name, operator in operators_of_torch() if is_random(operator)}
    assert found - caught <= NEVER_DRAW
    assert caught <= found


def operators_of_torch() -> Iterator[tuple[str, OpOverload]]:
    for qualified in torch._C._dispatch_get_all_op_names():
        if qualified.startswith("aten::"):
            packet, _, overload = qualified.removeprefix("aten::").partition(".")
            yield (
                qualified.removeprefix("aten::"),
                getattr(getattr(torch.ops.aten, packet), overload or "default"),
            )


def is_random(operator: OpOverload) -> bool:
    """Whether it draws, takes no generator, and is not composed of others."""
    is_composed = operators._is_composite(operator) or (
        operator._overloadname == "out" and str(operator._opname) not in operators.RANDOM_OPERATORS
    )
    takes_generator = operators._generator_position(operator) >= 0
    return torch.Tag.nondeterministic_seeded in operator.tags and not is_composed and not takes_generator


class Device:
    """Stands in for the generator of a device; it can share another's state."""

    def __init__(self) -> None:
        self.state = torch.Generator()

    def graphsafe_get_state(self) -> torch.Generator:
        return self.state

    def graphsafe_set_state(self, state: torch.Generator) -> None:
        self.state = state


@pytest.fixture
def attend(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpOverload]:
    """An operator that multiplies by a mask, which it draws from the device."""
    device = Device()
    monkeypatch.setattr(fused, "generator_of", lambda _: device)
    library = torch.library.Library("fused_of_tests", "FRAGMENT")
    library.define("attend(Tensor x, float dropout_p) -> (Tensor, Tensor)")
    operator = torch.ops.fused_of_tests.attend.default

    def kernel(x: Tensor, dropout_p: float) -> tuple[Tensor, Tensor]:
        mask = torch.rand(x.shape, generator=device.state) if dropout_p else torch.ones_like(x)
        return x * mask, mask

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output[1])

    library.impl("attend", kernel, "CPU")
    torch.library.register_autograd(
        operator, lambda ctx, grad, _: (grad * ctx.saved_tensors[0], None), setup_context=save, lib=library
    )
    library.impl("attend", operators.fused_kernel(operator), operators._KEY_NAME)
    before = device.state.get_state()
    yield operator
    assert torch.equal(device.state.get_state(), before), "the device's own has moved"
    library._destroy()


def masks_of(operator: OpOverload, max_concurrency: int | None, recompute: bool = False) -> list[Any]:
    """Return results and gradients, both of which are the masks, and what the caller draws then."""
    torch.manual_seed(3)
    xs = [torch.ones(8, requires_grad=True) for _ in range(NUM_CALLS)]

    def call(x: Tensor) -> Tensor:
        inner: Tensor = checkpoint(lambda x: operator(x, 0.5)[0], x, use_reentrant=False)
        outer: Tensor = operator(x, 0.5)[0]
        return inner * outer

    ys = parallel_apply(
        [call] * NUM_CALLS, [(x,) for x in xs], max_concurrency=max_concurrency, recompute=recompute
    )
    return [*(y.detach() for y in ys), *torch.autograd.grad(sum(y.sum() for y in ys), xs), torch.rand(3)]


def test_a_fused_kernel_draws_from_its_call_whatever_the_scheduling(attend: OpOverload) -> None:
    expected = masks_of(attend, 1)
    torch.testing.assert_close(masks_of(attend, None), expected, rtol=0, atol=0)
    masks = expected[:NUM_CALLS]
    assert len({tuple(mask.tolist()) for mask in masks}) == NUM_CALLS
    torch.testing.assert_close(expected[NUM_CALLS:-1], [2 * mask for mask in masks])


def test_a_fused_kernel_that_is_run_again_draws_the_same_again(attend: OpOverload) -> None:
    torch.testing.assert_close(masks_of(attend, None, recompute=True), masks_of(attend, 1), rtol=0, atol=0)


def test_a_fused_kernel_leaves_torchs_compiler_alone(
    attend: OpOverload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a mode that overlaps with that of another thread torch would think for ever that somebody is in one."""
    monkeypatch.setattr(_python_dispatch, "_is_in_torch_dispatch_mode", False)
    masks_of(attend, None)
    assert not _python_dispatch.is_in_torch_dispatch_mode()
    program = (
        "import sys, moe_autograd._random.fused as fused, torch\n"
        "with fused.OnOwnState(None, None): torch.ones(2) + 1\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_without_dropout_nothing_is_drawn(attend: OpOverload) -> None:
    torch.manual_seed(3)
    (y,) = parallel_apply([lambda x: attend(x, 0.0)[0]], [(torch.ones(8),)])
    assert torch.equal(y, torch.ones(8))
    drawn = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(3))


def test_hooks_of_what_a_fused_operator_saves_may_wait_for_other_calls(attend: OpOverload) -> None:
    all_there = threading.Barrier(NUM_CALLS)

    def pack(tensor: Tensor) -> Tensor:
        all_there.wait(PATIENCE_S)
        return tensor

    def call(x: Tensor) -> Tensor:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            y: Tensor = attend(x, 0.5)[0]
        return y

    xs = [torch.ones(8, requires_grad=True) for _ in range(NUM_CALLS)]
    ys = parallel_apply([call] * NUM_CALLS, [(x,) for x in xs])
    torch.testing.assert_close(torch.autograd.grad(sum(y.sum() for y in ys), xs), tuple(ys))


def test_cudnns_layers_get_a_dropout_state_that_is_seeded_by_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One for each run of them; torch's own is passed on where nothing is dropped."""
    seeds: list[int] = []

    class Operators:
        class _cudnn_init_dropout_state:
            @staticmethod
            def default(dropout: float, train: bool, seed: int, **options: Any) -> int:
                seeds.append(seed)
                return seed

        class _cudnn_rnn:
            @staticmethod
            def default(*args: Any) -> Any:
                return args[-1]

    def run(_: int) -> list[Any]:
        head = [torch.ones(1), *[None] * 10]
        return [
            operators._run_rnn(*head, dropout, train, False, [], "torch's")
            for dropout, train in ((0.5, True), (0.5, True), (0.0, True), (0.5, False))
        ]

    monkeypatch.setattr(torch.ops, "aten", Operators)
    states = []
    for bound in (1, None):
        torch.manual_seed(3)
        states.append(
            parallel_apply([run] * NUM_CALLS, [(i,) for i in range(NUM_CALLS)], max_concurrency=bound)
        )
    assert states[0] == states[1]
    assert all(one[2:] == ["torch's"] * 2 for one in states[0])
    assert len({state for one in states[0] for state in one[:2]}) == 2 * NUM_CALLS
    assert sorted(seeds) == sorted(2 * [state for one in states[0] for state in one[:2]])


class DrawsOnTheDevice(Device):
    """Is asked for its state, by a thread outside of maps, while it is lent."""

    def __init__(self) -> None:
        super().__init__()
        self.is_lent, self.may_go_on = threading.Event(), threading.Event()

    def graphsafe_set_state(self, state: torch.Generator) -> None:
        super().graphsafe_set_state(state)
        self.is_lent.set()
        assert self.may_go_on.wait(PATIENCE_S)

    def get_state(self) -> Tensor:
        return self.state.get_state()


def test_who_asks_for_the_state_of_a_device_never_gets_a_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    device, place = DrawsOnTheDevice(), torch.device("cuda", 0)
    monkeypatch.setattr(fused, "generator_of", lambda _: device)
    stand_in, before, found = stand_ins._StandIn(place, cast(Any, device)), device.get_state(), []

    def lend() -> None:
        with fused._drawing_from(torch.Generator().manual_seed(1)):
            pass

    threads = [
        threading.Thread(target=lend),
        threading.Thread(target=lambda: found.append(stand_in.get_state())),
    ]
    threads[0].start()
    assert device.is_lent.wait(PATIENCE_S)
    threads[1].start()
    threads[1].join(0.1)
    assert threads[1].is_alive()
    device.may_go_on.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert torch.equal(found[0], before)
