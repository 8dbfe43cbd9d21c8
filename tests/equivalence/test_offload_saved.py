"""What autograd saved of an offloaded expert is what its backward reads, or the backward raises as PyTorch's does."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_autograd.autograd.offload import OffloadedExperts
from moe_autograd.autograd.offload.flat import Layout
from moe_autograd.autograd.offload.parts import Part
from tests.support.offloading import OPTIMIZERS
from tests.support.stores import put_all_out

MICROBATCHES = pytest.mark.parametrize("num_microbatches", [None, 1, 2])


def gradient_or_error(call: Any, x: Tensor) -> Tensor | str:
    """Of the input, after two calls and one backward."""
    leaf = x.clone().requires_grad_()
    y = call(leaf) + call(2 * leaf)
    try:
        (y.abs() if y.is_complex() else y).sum().backward()
    except RuntimeError as error:
        return str(error)[:60]
    assert leaf.grad is not None
    return leaf.grad


def assert_same_gradient(module: nn.Module, x: Tensor, **options: Any) -> Tensor | str:
    """Natively and offloaded, where other experts take the memory in between."""
    others = [copy.deepcopy(module) for _ in range(3)]
    for parameter in nn.ModuleList(others).parameters():
        parameter.data.mul_(3)  # with the same values their memory would do
    native = gradient_or_error(copy.deepcopy(module), x)
    size = sum(t.nbytes for t in (*module.parameters(), *module.buffers()))
    limit = 2 * size + (1000 if options["num_microbatches"] is None else 4000)
    experts = OffloadedExperts([module, *others], OPTIMIZERS["sgd"], max_resident_bytes=limit, **options)

    def call(x: Tensor) -> Tensor:
        y = experts[0](x)
        rest = experts.residency.add(Part("rest", Layout({}, limit - 2 * size)))
        with torch.no_grad(), experts.residency.hold([rest]):  # so that there is room for two
            for other in experts[1:]:
                other(x)
        experts.residency.forget(rest)
        return y  # type: ignore[no-any-return]

    ours = gradient_or_error(call, x)
    if isinstance(native, str):
        assert ours == native
    else:
        torch.testing.assert_close(ours, native)
    return native


class Scaled(nn.Module):
    """Uses a buffer, and changes it before or after, in place or not."""

    def __init__(self, changes: str, is_in_place: bool) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(200))
        self.weight = nn.Parameter(torch.randn(200))
        self.changes, self.is_in_place = changes, is_in_place

    def change(self) -> None:
        if self.is_in_place:
            self.scale += 1
        else:
            self.scale = self.scale + 1

    def forward(self, x: Tensor) -> Tensor:
        if self.changes == "before":
            self.change()
        y = x * self.scale * self.weight
        if self.changes == "after":
            self.change()
        return y


@pytest.mark.parametrize("num_microbatches", [None, 1])
@pytest.mark.parametrize("changes", ["before", "after"])
@pytest.mark.parametrize("is_in_place", [False, True], ids=["replaced", "in place"])
def test_a_buffer_that_was_saved_and_then_changed(
    changes: str, is_in_place: bool, num_microbatches: int | None
) -> None:
    found = assert_same_gradient(
        Scaled(changes, is_in_place), torch.ones(4, 200), num_microbatches=num_microbatches
    )
    assert isinstance(found, str) == is_in_place


@pytest.mark.parametrize("num_microbatches", [None, 1])
def test_a_weight_that_is_clipped_after_its_use(num_microbatches: int | None) -> None:
    class Clipped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(200))

        def forward(self, x: Tensor) -> Tensor:
            y = x * self.weight
            with torch.no_grad():
                self.weight.clamp_(-0.5, 0.5)
            return y

    found = assert_same_gradient(Clipped(), torch.ones(4, 200), num_microbatches=num_microbatches)
    assert isinstance(found, str), "PyTorch refuses it"


@MICROBATCHES
def test_an_activation_that_is_changed_in_place_after_it_was_saved(num_microbatches: int | None) -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight).exp().add_(1)

    found = assert_same_gradient(Changing(), torch.ones(4, 8), num_microbatches=num_microbatches)
    assert isinstance(found, str), "PyTorch refuses it"


@MICROBATCHES
def test_complex_tensors_that_are_conjugated_or_negated_lazily(num_microbatches: int | None) -> None:
    class Conjugating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            h = x @ self.weight.conj() @ self.weight
            return h * h.conj() * h.exp() + h * self.weight[0].conj().imag

    torch.manual_seed(0)
    found = assert_same_gradient(
        Conjugating(), torch.randn(6, 4, dtype=torch.complex64) / 8, num_microbatches=num_microbatches
    )
    assert isinstance(found, Tensor)


@MICROBATCHES
@pytest.mark.parametrize("values", ["constant", "weights"])
def test_sparse_matrices(values: str, num_microbatches: int | None) -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            ones = torch.ones(4)
            matrix = torch.sparse_coo_tensor(
                torch.arange(4).repeat(2, 1),
                self.weight if values == "weights" else ones,
                (4, 4),
                check_invariants=False,
                is_coalesced=True,  # else its values are a copy
            )
            return torch.sparse.mm(matrix, x.T).T * self.weight

    torch.manual_seed(0)
    assert isinstance(
        assert_same_gradient(Sparse(), torch.randn(6, 4), num_microbatches=num_microbatches), Tensor
    )


class Growing(nn.Module):
    """Puts a tensor of another shape or dtype in the place of a buffer, makes one, or takes one away."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("seen", torch.ones(3))
        self.register_buffer("cached", None)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "shape":
            self.seen = self.seen.sum()
        elif self.how == "dtype":
            self.seen = self.seen.double()
        elif self.how == "made":
            self.cached = torch.ones(8)
        else:
            self.seen = None
        return x * self.weight


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("shape", r"seen of shape \(3,\) and torch.float32, got shape \(\) and torch.float32"),
        ("dtype", r"seen of shape \(3,\) and torch.float32, got shape \(3,\) and torch.float64"),
        ("made", r"no cached, got shape \(8,\) and torch.float32"),
        ("gone", r"seen of shape \(3,\) and torch.float32, got none"),
    ],
)
def test_a_buffer_that_is_no_longer_the_one_that_was_taken_over_is_told(how: str, text: str) -> None:
    experts = OffloadedExperts([Growing(how), *(nn.Linear(4, 4) for _ in range(4))], max_resident_bytes=200)
    with pytest.raises(RuntimeError, match=f"expert-00000: expected a call to leave {text}"):
        experts[0](torch.ones(8))
    for expert in experts[1:]:
        expert(torch.ones(4))
    with pytest.raises(RuntimeError, match="expert-00000"):
        experts[0](torch.ones(8))


class Resizing(nn.Module):
    """Resizes a buffer in place, behind which others lie."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.register_buffer("scratch", torch.zeros(1, 8))
        self.register_buffer("none_yet", torch.zeros(0))
        self.register_buffer("mean", torch.full((8,), 3.0))
        self.linear = nn.Linear(8, 8)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "and back":
            self.scratch.resize_(x.shape).copy_(x)
            self.scratch.resize_(1, 8)
        elif self.how == "for good":  # as torch's quantization aware training does
            self.none_yet.resize_(8).copy_(x[0])
        elif self.how == "smaller":
            self.scratch.resize_(0)
        else:
            with contextlib.suppress(RuntimeError):
                self.scratch.resize_(x.shape)
        y: Tensor = self.linear(x) * self.mean
        return y


@pytest.mark.parametrize("how", ["and back", "for good", "smaller", "in vain"])
def test_a_buffer_that_a_call_resizes_in_place_leaves_the_others_as_they_are(how: str) -> None:
    """It had grown into them, without an error."""
    experts = OffloadedExperts([Resizing(how)], max_resident_bytes=1000)
    before = experts.state_dict(0)
    for _ in range(2):
        with pytest.raises(RuntimeError) as raised:
            experts[0](torch.ones(4, 8))
        told = [str(raised.value), *getattr(raised.value, "__notes__", [])]
        assert "expert-00000: expected a call to leave" in told[-1]
        torch.testing.assert_close(experts.state_dict(0), before)
        put_all_out(experts.residency)
        torch.testing.assert_close(experts.state_dict(0), before)


def test_so_does_one_that_a_call_has_put_in_its_place() -> None:
    module = Resizing("as it is")
    experts = OffloadedExperts([module], max_resident_bytes=1000)
    module.forward = lambda x: setattr(module, "scratch", x[:1])  # type: ignore[method-assign]
    experts[0](torch.ones(4, 8))
    del module.forward
    before = experts.state_dict(0)
    assert before["scratch"].eq(1).all()
    module.how = "and back"
    with pytest.raises(RuntimeError):
        experts[0](torch.ones(4, 8))
    torch.testing.assert_close(experts.state_dict(0), before)


class Force(nn.Module):
    """The gradient of an energy: a backward inside the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(200, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            return torch.autograd.grad(self.linear(x).tanh().sum(), x, create_graph=True)[0]


@MICROBATCHES
def test_a_backward_inside_the_forward(num_microbatches: int | None) -> None:
    torch.manual_seed(0)
    assert_same_gradient(Force(), torch.randn(4, 200), num_microbatches=num_microbatches)
