"""Small networks for images and signals are the plain loop, with its statistics; how much they compute is known."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_autograd import parallel_apply
from moe_autograd.autograd import in_turn
from tests.support.comparison import one_after_another
from tests.support.made_in_turn import is_made_in_turn

pytestmark = pytest.mark.usefixtures("some_are_small")

SHAPES = {1: (2, 4, 8), 2: (2, 4, 8, 8), 3: (2, 4, 4, 4, 4)}

KINDS: list[tuple[int, Callable[[], nn.Module]]] = [
    *[(1, lambda: nn.Conv1d(4, 6, 3)), (2, lambda: nn.Conv2d(4, 6, 3)), (3, lambda: nn.Conv3d(4, 6, 3))],
    *[
        (1, lambda: nn.Conv1d(4, 4, 3, padding="same", bias=False)),
        (2, lambda: nn.Conv2d(4, 4, 5, 2, 2, groups=2)),
    ],
    (2, lambda: nn.Conv2d(4, 4, (1, 3), padding=(0, 2), dilation=(1, 2), padding_mode="reflect")),
    *[(1, lambda: nn.BatchNorm1d(4)), (2, lambda: nn.BatchNorm2d(4)), (3, lambda: nn.BatchNorm3d(4))],
    *[
        (2, lambda: nn.BatchNorm2d(4, affine=False)),
        (2, lambda: nn.BatchNorm2d(4, track_running_stats=False)),
    ],
    *[(1, lambda: nn.InstanceNorm1d(4)), (2, lambda: nn.InstanceNorm2d(4, affine=True))],
    (3, lambda: nn.InstanceNorm3d(4, track_running_stats=True)),
    *[(1, lambda: nn.AvgPool1d(2)), (2, lambda: nn.AvgPool2d(3, 2, 1)), (3, lambda: nn.AvgPool3d(2))],
    *[(1, lambda: nn.MaxPool1d(2)), (2, lambda: nn.MaxPool2d(3, 2, 1)), (3, lambda: nn.MaxPool3d(2))],
    *[(1, lambda: nn.AdaptiveAvgPool1d(1)), (2, lambda: nn.AdaptiveAvgPool2d((1, None)))],
    *[(3, lambda: nn.AdaptiveAvgPool3d(1)), (1, lambda: nn.AdaptiveMaxPool1d(1))],
    *[(2, lambda: nn.AdaptiveMaxPool2d(1)), (3, lambda: nn.AdaptiveMaxPool3d((1, 1, 1)))],
    *[(1, lambda: nn.Dropout1d(0.0)), (2, lambda: nn.Dropout2d(0.0)), (3, lambda: nn.Dropout3d(0.0))],
]


def blocks() -> nn.Module:
    return nn.Sequential(
        *(
            nn.Conv2d(4, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        ),
        *(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Linear(8, 3)),
    )


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.short = nn.Sequential(nn.Conv2d(4, 8, 1, stride=2), nn.BatchNorm2d(8))
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        h = F.relu(self.norm2(self.conv2(h)) + self.short(x))
        return self.head(F.max_pool2d(h, 2).flatten(1))  # type: ignore[no-any-return]


def signals() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 4 * 8 * 8)), nn.Conv1d(1, 4, 5, 4), nn.InstanceNorm1d(4), nn.Flatten()
    )


def program(modules: list[nn.Module], apply: Any, dims: int) -> list[Tensor]:
    """Two passes of copies: values, gradients and buffers."""
    modules = copy.deepcopy(modules)
    results: list[Tensor] = []
    for seed in range(2):
        torch.manual_seed(seed)
        xs = [torch.randn(SHAPES[dims], requires_grad=True) for _ in modules]
        ys = apply(modules, [(x,) for x in xs])
        parameters = list(nn.ModuleList(modules).parameters())
        results += [*ys, *torch.autograd.grad(sum(y.square().sum() for y in ys), [*xs, *parameters])]
        results += [buffer.clone() for buffer in nn.ModuleList(modules).buffers()]
    return results


def on_threads(modules: Any, args: Any) -> Any:
    return parallel_apply([module.__call__ for module in modules], args)


@pytest.mark.parametrize(("dims", "make"), KINDS)
@pytest.mark.parametrize("is_training", [True, False])
def test_layers_for_images_are_called_in_turn(
    dims: int, make: Callable[[], nn.Module], is_training: bool
) -> None:
    modules = [make().train(is_training) for _ in range(2)]
    assert all(is_made_in_turn(copy.deepcopy(module), torch.randn(SHAPES[dims])) for module in modules)
    expected = program(modules, one_after_another, dims)
    for apply, tolerance in ((parallel_apply, 0.0), (on_threads, 1e-5)):  # there with other intra-op threads
        for mine, same in zip(program(modules, apply, dims), expected, strict=True):
            torch.testing.assert_close(mine, same, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("make", [blocks, Residual, lambda: nn.Sequential(nn.Flatten(), signals())])
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("is_shared", [True, False])
def test_networks_for_images_are_called_in_turn(
    make: Callable[[], nn.Module], is_training: bool, is_shared: bool
) -> None:
    """One that is called several times has the statistics of the loop, which makes the calls in this order."""
    modules = [make().train(is_training)] * 3 if is_shared else [make().train(is_training) for _ in range(3)]
    assert is_made_in_turn(copy.deepcopy(modules[0]), torch.randn(SHAPES[2]))
    mine, same = (program(modules, apply, 2) for apply in (parallel_apply, one_after_another))
    for result, expected in zip(mine, same, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)  # gradients that meet


class Buffer(Tensor):
    pass


def with_a_buffer_of_another_class() -> nn.Module:
    norm = nn.BatchNorm2d(4)
    norm.running_mean = torch.zeros(4).as_subclass(Buffer)
    return norm


def with_a_method_of_its_own(name: str, module: nn.Module) -> nn.Module:
    setattr(module, name, getattr(module, name))
    return module


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Conv2d(4, 4, 1, padding=1),
        lambda: nn.Conv2d(4, 4, 3, padding=(1, 2)),
        lambda: nn.Conv2d(4, 4, (3, 1), padding=1),
        lambda: nn.MaxPool2d(2, padding=1),
        lambda: nn.AdaptiveAvgPool2d((1, 64)),
        lambda: nn.SyncBatchNorm(4),
        with_a_buffer_of_another_class,
        lambda: with_a_method_of_its_own("_conv_forward", nn.Conv2d(4, 4, 3)),
        lambda: with_a_method_of_its_own("_check_input_dim", nn.BatchNorm2d(4)),
    ],
)
def test_what_makes_more_of_its_input_or_is_not_as_torch_made_it_gets_a_thread(
    make: Callable[[], nn.Module],
) -> None:
    assert not is_made_in_turn(make(), torch.randn(SHAPES[2]))


def test_a_convolution_multiplies_all_of_its_weights_at_each_position() -> None:
    conv = nn.Conv2d(16, 32, 3, padding=1, bias=False)
    num_positions = in_turn.most_small() // conv.weight.numel()
    image, most_rows = torch.zeros(1, 16, 1, 1), num_positions // 4
    fewer_rows = most_rows * 99 // 100  # each element counts besides
    assert is_made_in_turn(conv, image.expand(1, 16, fewer_rows, 4))
    assert not is_made_in_turn(conv, image.expand(1, 16, most_rows + 1, 4))
    assert not is_made_in_turn(nn.Sequential(nn.Conv2d(16, 16, 1), conv), image.expand(1, 16, fewer_rows, 4))


def test_linear_layers_before_and_behind_convolutions_count() -> None:
    wide, few = nn.Linear(4, 4096), nn.Conv1d(1, 1, 3, padding=1)
    x = torch.zeros(1, 1, 4)
    assert is_made_in_turn(nn.Sequential(wide, few), x.expand(8, 1, 4))
    assert not is_made_in_turn(nn.Sequential(wide, nn.Conv1d(1, 256, 3, padding=1)), x.expand(2048, 1, 4))
    head = nn.Sequential(nn.Conv1d(1, 16, 3, padding=1), nn.Flatten(), nn.Linear(16 * 256, 1024))
    row = torch.zeros(1, 1, 256)
    most_rows = in_turn.most_small() // (16 * 256 * 1024)
    assert is_made_in_turn(head, row.expand(most_rows // 2, 1, 256))
    assert not is_made_in_turn(head, row.expand(most_rows + 1, 1, 256))


def test_of_a_large_network_for_images_it_is_not_known_that_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Since pools and strides leave it fewer positions, and threads would gain something."""
    monkeypatch.setattr(in_turn, "MOST_SMALL", 64)
    monkeypatch.setattr(in_turn, "LEAST_LARGE", 1 << 14)
    monkeypatch.setattr(in_turn, "num_cores", torch.get_num_threads)
    x = torch.randn(2, 4, 16, 16)
    assert is_made_in_turn(nn.Linear(16, 256), x)
    assert not is_made_in_turn(nn.Conv2d(4, 64, 3, stride=16, padding=1), x)
