"""Small networks that pad, scale up or transpose convolutions are the plain loop; what these make counts."""

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
from moe_autograd.autograd.reading.growing import GROWING, TRANSPOSED, growth_of
from moe_autograd.autograd.reading.sizes import size_of
from moe_autograd.autograd.reading.work import work_of
from tests.support.comparison import one_after_another
from tests.support.made_in_turn import is_made_in_turn

pytestmark = pytest.mark.usefixtures("some_are_small")

SHAPES = {0: (2, 36, 9), 1: (2, 4, 6), 2: (2, 4, 6, 6), 3: (2, 4, 4, 4, 4)}

Make = Callable[[], nn.Module]

KINDS: list[tuple[int, Make]] = [
    *[(1, lambda: nn.ConvTranspose1d(4, 6, 3)), (3, lambda: nn.ConvTranspose3d(4, 6, 3, 2, bias=False))],
    *[(2, lambda: nn.ConvTranspose2d(4, 6, 4, 2, 1)), (2, lambda: nn.ConvTranspose2d(4, 6, (1, 3), 3, 0, 2))],
    *[(1, lambda: nn.ConstantPad1d((3, 0), 1.0)), (2, lambda: nn.ConstantPad2d((1, 2, 3, 4), 1.0))],
    *[(3, lambda: nn.ConstantPad3d(1, 2.0)), (1, lambda: nn.ZeroPad1d(2)), (2, lambda: nn.ZeroPad2d(-1))],
    *[(3, lambda: nn.ZeroPad3d(1)), (1, lambda: nn.ReflectionPad1d(5)), (2, lambda: nn.ReflectionPad2d(1))],
    *[(3, lambda: nn.ReflectionPad3d(1)), (1, lambda: nn.ReplicationPad1d(20))],
    *[(2, lambda: nn.ReplicationPad2d((9, 0, 0, 9))), (3, lambda: nn.ReplicationPad3d(1))],
    *[(1, lambda: nn.CircularPad1d(6)), (2, lambda: nn.CircularPad2d(1)), (3, lambda: nn.CircularPad3d(2))],
    *[(1, lambda: nn.Upsample(scale_factor=2)), (2, lambda: nn.Upsample(scale_factor=(1.5, 0.5)))],
    *[(1, lambda: nn.Upsample(scale_factor=3, mode="linear")), (3, lambda: nn.Upsample(size=5))],
    *[(2, lambda: nn.Upsample(size=(9, 9), mode="bilinear", align_corners=True))],
    *[(2, lambda: nn.Upsample(scale_factor=2, mode="bicubic"))],
    *[(3, lambda: nn.Upsample(scale_factor=2, mode="trilinear"))],
    *[(2, lambda: nn.UpsamplingNearest2d(scale_factor=2)), (2, lambda: nn.UpsamplingBilinear2d(size=7))],
    *[(2, lambda: nn.PixelShuffle(2)), (2, lambda: nn.PixelUnshuffle(3)), (2, lambda: nn.ChannelShuffle(2))],
    *[(2, lambda: nn.Unfold(3)), (2, lambda: nn.Unfold((2, 3), 1, 4, (1, 2)))],
    *[(0, lambda: nn.Fold(5, 3)), (0, lambda: nn.Fold((11, 11), 3, 1, 0, 4))],
    *[(2, lambda: nn.LocalResponseNorm(3)), (2, lambda: nn.Threshold(0.1, 0.5)), (2, nn.Softmax2d)],
    *[(1, nn.Hardshrink), (1, nn.Softshrink), (1, nn.Tanhshrink), (1, lambda: nn.Softmin(1))],
]


def decoder() -> nn.Module:
    return nn.Sequential(
        *(nn.ReflectionPad2d(1), nn.Conv2d(4, 16, 3), nn.PixelShuffle(2), nn.BatchNorm2d(4)),
        *(nn.ReLU(inplace=True), nn.ConvTranspose2d(4, 8, 4, 2, 1), nn.Threshold(0.1, 0.0, inplace=True)),
        *(
            nn.Upsample(scale_factor=2, mode="bilinear"),
            nn.Conv2d(8, 3, 3, padding=1),
            nn.LocalResponseNorm(2),
        ),
    )


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(4, 8, 3, 2, 1), nn.ConvTranspose2d(8, 4, 2, 2)
        self.pad, self.head, self.act = nn.ZeroPad2d(1), nn.Conv2d(4, 3, 3), nn.ReLU()

    def forward(self, x: Tensor) -> Any:
        return self.head(self.pad(self.act(self.grown(self.act(self.down(x)))) + x))

    def grown(self, x: Tensor) -> Any:
        return self.up(x)


class Twice(Skips):
    def forward(self, x: Tensor) -> Any:
        return self.pad(self.pad(x))


class TwiceByAMethod(Skips):
    def forward(self, x: Tensor) -> Any:
        return self.padded(self.padded(x))

    def padded(self, x: Tensor) -> Any:
        return self.pad(x)


class TwiceByItsBase(Twice):
    def forward(self, x: Tensor) -> Any:
        return self.pad(super().forward(x))


class InALoop(Skips):
    def forward(self, x: Tensor) -> Any:
        for _ in range(4):
            x = self.pad(x)
        return x


class TwiceWithin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Identity(), nn.ZeroPad2d(1))

    def forward(self, x: Tensor) -> Any:
        return self.inner(self.inner(x))


class SaysSo(TwiceWithin):
    def only_computes(self) -> bool:
        return True


def program(modules: list[nn.Module], apply: Any, dims: int) -> list[Tensor]:
    """Values and gradients of copies."""
    modules = copy.deepcopy(modules)
    torch.manual_seed(1)
    xs = [torch.randn(SHAPES[dims], requires_grad=True) for _ in modules]
    ys = apply(modules, [(x,) for x in xs])
    parameters = list(nn.ModuleList(modules).parameters())
    return [*ys, *torch.autograd.grad(sum(y.square().sum() for y in ys), [*xs, *parameters])]


@pytest.mark.parametrize(("dims", "make"), [*KINDS, (2, decoder), (2, Skips)])
def test_layers_that_make_more_are_called_in_turn(dims: int, make: Make) -> None:
    modules = [make() for _ in range(2)]
    assert all(is_made_in_turn(copy.deepcopy(module), torch.randn(SHAPES[dims])) for module in modules)
    expected = program(modules, one_after_another, dims)
    for mine, same in zip(program(modules, parallel_apply, dims), expected, strict=True):
        torch.testing.assert_close(mine, same, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("dims", "make"), KINDS)
@pytest.mark.parametrize("is_tiny", [True, False])
def test_none_makes_more_than_is_known(dims: int, make: Make, is_tiny: bool) -> None:
    module, x = make(), torch.randn(SHAPES[dims])
    if type(module) not in GROWING:
        return
    if is_tiny:
        x = {0: x[..., :1], 1: x[..., :1], 2: x[..., :1, :1], 3: x[..., :1, :1, :1]}[dims]
    try:
        y = module(x)
    except RuntimeError:
        return  # it is too tiny for torch
    if type(module) in TRANSPOSED:
        x, y = x[:, 0], y[:, 0]  # of how many channels it makes how many, its weights tell
    assert y.numel() <= growth_of(module) * x.numel()


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.ZeroPad2d(10**6), nn.AdaptiveAvgPool2d(1)),
        lambda: nn.Upsample(scale_factor=1e300),
        lambda: nn.Upsample(size=[8, 8]),
        lambda: nn.Sequential(*[nn.Upsample(scale_factor=8) for _ in range(40)]),
        lambda: nn.Sequential(*[nn.Upsample(scale_factor=2)] * 8),
        lambda: nn.Sequential(nn.ReflectionPad2d(1), nn.ReLU(inplace=True)),  # may change what it is given
        *(Twice, TwiceByAMethod, TwiceByItsBase, InALoop, TwiceWithin, SaysSo),
    ],
)
def test_what_makes_far_more_or_is_called_again_gets_a_thread(make: Make) -> None:
    size = size_of([torch.randn(SHAPES[2])])
    assert size is not None
    work = work_of(make(), size, {}, set())  # what that says is not to be tried
    assert work is None or work.most > in_turn.most_small()


def test_a_function_that_may_call_it_again_gets_a_thread() -> None:
    pad = nn.ZeroPad2d(1)
    assert not is_made_in_turn(lambda x: pad(pad(x)), torch.randn(SHAPES[2]))


def test_a_convolution_behind_multiplies_at_all_positions_that_are_made() -> None:
    conv = nn.Conv2d(16, 32, 3, padding=1, bias=False)
    num_positions = in_turn.most_small() // conv.weight.numel()
    image = torch.zeros(1, 16, 1, 1)
    for up in (nn.UpsamplingNearest2d(scale_factor=4), nn.PixelShuffle(4)):
        before = nn.Conv2d(16, 256, 1) if isinstance(up, nn.PixelShuffle) else nn.Identity()
        assert is_made_in_turn(nn.Sequential(before, up, conv), image.expand(1, 16, num_positions // 64, 1))
        many = image.expand(1, 16, num_positions // 16 + 1, 1)
        assert not is_made_in_turn(nn.Sequential(before, up, conv), many)


def test_a_transposed_convolution_multiplies_at_the_positions_that_it_is_given() -> None:
    transposed = nn.ConvTranspose2d(16, 32, 4, 4, bias=False)
    num_positions = in_turn.most_small() // transposed.weight.numel()
    image = torch.zeros(1, 16, 1, 1)
    assert is_made_in_turn(transposed, image.expand(1, 16, num_positions * 9 // 10, 1))
    assert not is_made_in_turn(transposed, image.expand(1, 16, num_positions + 1, 1))


@pytest.mark.parametrize("name", ["_check_input_dim", "_output_padding", "forward"])
def test_what_is_not_as_torch_made_it_gets_a_thread(name: str) -> None:
    kind = nn.ConvTranspose2d(4, 4, 3) if name == "_output_padding" else nn.CircularPad2d(1)
    setattr(kind, name, getattr(kind, name))
    assert not is_made_in_turn(kind, torch.randn(SHAPES[2]))


@pytest.mark.parametrize("name", ["interpolate", "pad", "conv_transpose2d"])
def test_what_is_put_in_the_place_of_their_functions_is_seen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = getattr(F, name)
    monkeypatch.setattr(F, name, lambda *args, **kwargs: same(*args, **kwargs))
    assert not is_made_in_turn(decoder(), torch.randn(SHAPES[2]))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.pad(x, (1, 1)),
        lambda x: F.interpolate(x, scale_factor=2.0),
        lambda x: F.conv2d(x, x, padding=1),
    ],
)
def test_functions_that_make_as_much_as_some_number_says_get_a_thread(call: Any) -> None:
    assert not is_made_in_turn(call, torch.randn(SHAPES[2]))
