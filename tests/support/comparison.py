"""Run a program twice, natively and through the map, and compare everything it says about its tensors.

Guarantees: a difference in a value, a structure, a type, an autograd flag, an alias or an error is an
assertion failure that names where it is. Values are compared exactly unless a tolerance is given: the map
runs the same operators on the same numbers.

A *program* takes something that is called like `map_with_parallel_backward` and returns nested tuples, lists
and dicts of tensors and plain objects, or raises.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from moe_autograd import map_with_parallel_backward

MapFunction = Callable[..., tuple[Any, ...]]
Program = Callable[[MapFunction], Any]


def natively(func: type[Function], *args_per_call: Sequence[Any], max_concurrency: int | None = None) -> Any:
    """What the map means."""
    return tuple(func.apply(*args) for args in args_per_call)


@dataclass(frozen=True)
class Raised:
    """An error that a program ended with. The map's graph nodes have other names: these don't count."""

    type: type[BaseException]
    text: str
    notes: tuple[str, ...]

    @classmethod
    def by(cls, error: BaseException) -> Raised:
        text = re.sub(r"\b\w+Backward\w*", "<node>", str(error))
        text = re.sub(r"\b([Oo])utput \d+ of \w+", r"\1utput <n> of <node>", text)
        text = re.sub(r"'[^']*' object has no", "<ctx> has no", text)
        return cls(type(error), text, tuple(getattr(error, "__notes__", ())))


def attempt(program: Callable[..., Any], *args: Any) -> Any:
    """Return what the program returns, or how it raised."""
    try:
        return program(*args)
    except Exception as error:
        return Raised.by(error)


def one_after_another(
    modules: Sequence[Callable[..., Any]],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]] | None = None,
    **_: Any,
) -> list[Any]:
    """What `parallel_apply` means."""
    kwargs_tup = kwargs_tup if kwargs_tup is not None else [{}] * len(modules)
    args = [x if isinstance(x, tuple | list) else (x,) for x in inputs]
    return [m(*x, **k) for m, x, k in zip(modules, args, kwargs_tup, strict=True)]


def assert_same_program(
    program: Program,
    *,
    native_apply: MapFunction = natively,
    mapped_apply: MapFunction = map_with_parallel_backward,
    tolerance: float = 0.0,
) -> Any:
    """Run `program` natively and through the map, compare, and return what the map's run said."""
    native, mapped = attempt(program, native_apply), attempt(program, mapped_apply)
    assert_same(native, mapped, tolerance=tolerance)
    return mapped


def assert_same(
    native: Any,
    mapped: Any,
    place: str = "result",
    *,
    tolerance: float = 0.0,
    but: frozenset[str] = frozenset(),
) -> None:
    """Assert that two outcomes agree, tensors in value and all facts `but` these."""
    if isinstance(native, Raised) or isinstance(mapped, Raised):
        assert isinstance(native, Raised), f"{place}: only the map raised: {mapped}"
        assert isinstance(mapped, Raised), f"{place}: the map did not raise {native}"
        assert native.type is mapped.type, f"{place}: {native} became {mapped}"
        assert native.text in mapped.text, f"{place}: {native} became {mapped}"
        return
    assert type(native) is type(mapped), f"{place}: {type(native)} became {type(mapped)}"
    if isinstance(native, Tensor):
        said, says = facts(native), facts(mapped)
        assert [fact for fact in said if said[fact] != says[fact] and fact not in but] == [], place
        assert_same_values(native, mapped, place, tolerance=tolerance)
    elif isinstance(native, tuple | list):
        assert len(native) == len(mapped), f"{place}: {len(native)} items became {len(mapped)}"
        for i, pair in enumerate(zip(native, mapped, strict=True)):
            assert_same(*pair, f"{place}[{i}]", tolerance=tolerance, but=but)
    elif isinstance(native, dict):
        assert native.keys() == mapped.keys(), place
        for key in native:
            assert_same(native[key], mapped[key], f"{place}[{key!r}]", tolerance=tolerance, but=but)
    else:
        assert native == mapped, f"{place}: {native!r} became {mapped!r}"


def assert_same_values(native: Tensor, mapped: Tensor, place: str, *, tolerance: float) -> None:
    native, mapped = (
        t.detach().to_dense() if t.layout is not torch.strided else t.detach() for t in (native, mapped)
    )
    torch.testing.assert_close(
        mapped, native, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda text: f"{place}: {text}"
    )


def facts(tensor: Tensor) -> dict[str, Any]:
    """What PyTorch says of a tensor beside its values."""
    return {
        "type": type(tensor),
        "dtype": tensor.dtype,
        "shape": tuple(tensor.shape),
        "stride": tensor.stride() if tensor.layout is torch.strided else None,
        "layout": tensor.layout,
        "requires_grad": tensor.requires_grad,
        "is_leaf": tensor.is_leaf,
        "has_grad_fn": tensor.grad_fn is not None,
        "is_view": tensor._is_view(),
        "is_inference": tensor.is_inference(),
        "is_conj": tensor.is_conj(),
    }


def tensors_in(result: Any) -> Iterator[Tensor]:
    """The tensors of a function's results, in order, as deep as tuples and lists go."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, tuple | list):
        for item in result:
            yield from tensors_in(item)


def aliases(results: Any, args: Any) -> list[tuple[bool, bool]]:
    """For each pair of a result and an argument: are they one object, and do they share memory?"""

    def address(tensor: Tensor) -> int:
        return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0

    return [
        (result is arg, address(result) == address(arg) != 0)
        for result in tensors_in(results)
        for arg in tensors_in(args)
    ]


def loss_of(results: Any) -> Tensor:
    """A real number that depends on every differentiable result, on each with its own weights."""
    total = torch.zeros((), dtype=torch.float64)
    for i, tensor in enumerate(t for t in tensors_in(results) if t.requires_grad):
        weights = torch.linspace(0.5, 1.5 + i, max(tensor.numel(), 1))[: tensor.numel()].view(tensor.shape)
        weighted = torch.view_as_real(tensor).sum(-1) if tensor.is_complex() else tensor
        total = total + (weighted.double() * weights.double()).sum()
    return total
