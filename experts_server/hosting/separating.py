"""The weight gradients of several calls that were computed together, each call's by itself.

A backward through joined rows gives a weight one gradient: the sum over all calls. But gradients gather by client, so
each call's own part is wanted. For a module that treats its rows one by one, and whose weights are those of linear
layers, it can be had for little. With x the rows that went into a layer and g the gradient of what came out,

    weight.grad = gᵀ x        bias.grad = sum of g        (each over the rows)

and a call's part is the same over its own rows. So one forward and one backward of all rows together give the
gradients of the inputs and g of every layer; then there is one small product for each layer and call, which are the
products that separate backwards would take too.

Modules with any other part are not separated: their calls are computed one by one.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from experts_server.hosting.gradients import Gradients
from experts_server.hosting.modules import IdentityExpert
from moe_autograd._contexts import contextmanager
from moe_autograd.autograd.in_turn import HOOKS, HOOKS_OF_ALL, is_watched
from moe_autograd.moe.experts import FeedForwardExpert, SwiGLUExpert

ROW_WISE = frozenset(
    [
        *(nn.Linear, nn.Identity, nn.Sequential),
        *(nn.ELU, nn.GELU, nn.LeakyReLU, nn.ReLU, nn.Sigmoid, nn.SiLU, nn.Tanh),
        *(IdentityExpert, FeedForwardExpert, SwiGLUExpert),
    ]
)


_HOOKS_OF_WEIGHT = operator.attrgetter("_backward_hooks")
PUT_IN_PLACE = frozenset(["forward", "_call_impl", "_compiled_call_impl"])  # of an instance: what calls it


def is_its_class(part: nn.Module) -> bool:
    """Whether a part does what its class says.

    Not where a hook makes it do more, where somebody's own function calls it or is its activation, or where a weight is
    of a class that may compute otherwise (`__torch_function__`).
    """
    is_given_a_function = isinstance(part, FeedForwardExpert) and not part.only_computes()
    if is_given_a_function or is_watched(part) or not PUT_IN_PLACE.isdisjoint(part.__dict__):
        return False
    tensors = (*part._parameters.values(), *part._buffers.values())
    return all(type(tensor) in (nn.Parameter, Tensor) for tensor in tensors if tensor is not None)


def is_row_wise(module: nn.Module) -> bool:
    """Whether every part of `module` is known to treat rows one by one."""
    return all(type(part) in ROW_WISE and is_its_class(part) for part in module.modules())


def is_separable(module: nn.Module) -> bool:
    """Whether every part of `module` treats rows one by one, and all trained weights are those of linear layers.

    Not where a part works in place: a layer's output is then no longer what came out of it, nor is its gradient. Nor
    where a weight has a hook, which would not see its gradient.
    """
    layers = [part for part in module.modules() if type(part) is nn.Linear]
    own = {id(weight) for layer in layers for weight in (layer.weight, layer.bias)}
    is_in_place = any(getattr(part, "inplace", False) for part in module.modules())
    trained = [p for p in module.parameters() if p.requires_grad]
    are_plain = all(id(p) in own and not p._backward_hooks for p in trained)
    return is_row_wise(module) and not is_in_place and are_plain


class LateHooks:
    """Tells whether a module whose parts were looked at has been given hooks since.

    They are seen as soon as they are there: on a part, on a weight, on all modules, or a function put into an instance
    in the place of what calls it. To look at all parts again would take a tenth of the time of a small call. Parts,
    weights and activations that are put in the place of others are not seen.

    Args:
        module: as it was looked at.

    Threads: may be asked from any.
    """

    def __init__(self, module: nn.Module) -> None:
        instances = [part.__dict__ for part in module.modules()]
        self._are_apart = [instance.keys().isdisjoint for instance in instances]
        own = [instance[kind] for instance in instances for kind in HOOKS if kind in instance]
        self._hooks: list[Mapping[int, Any]] = [*HOOKS_OF_ALL, *own]
        self._weights = list(module.parameters())

    def __bool__(self) -> bool:
        """Whether there are any; what a tape notes with are none."""
        if any(self._hooks) and not all(map(_is_of_a_tape, self._found())):
            return True
        for are_apart in self._are_apart:  # no generators: each call of a small expert asks four times
            if not are_apart(PUT_IN_PLACE):
                return True
        return any(map(_HOOKS_OF_WEIGHT, self._weights))

    def _found(self) -> list[Any]:
        return [hook for hooks in self._hooks if hooks for hook in list(hooks.values())]


class LinearTape:
    """Notes what goes into and comes out of the linear layers of a module.

    Args:
        module: separable.
    """

    def __init__(self, module: nn.Module) -> None:
        self._layers = [part for part in module.modules() if type(part) is nn.Linear]
        self._noted: list[tuple[nn.Linear, Tensor, Tensor]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Take note of the calls within."""
        hooks = [layer.register_forward_hook(self._note) for layer in self._layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _note(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(layer, nn.Linear)
        self._noted.append((layer, inputs[0].detach(), output))

    @property
    def outputs(self) -> list[Tensor]:
        """What came out of the layers, in the order of their calls."""
        return [output for _, _, output in self._noted]

    def separate(
        self, output_grads: Sequence[Tensor | None], rows: slice, parameters: Sequence[nn.Parameter]
    ) -> Gradients:
        """Return the parameters' gradients over some of the rows.

        Args:
            output_grads: of `outputs`.
            rows: of the first dimension.
            parameters: whose gradients are wanted, in this order; `None` for one that had no part in it.
        """
        found: dict[int, Tensor] = {}
        for (layer, x, _), grad in zip(self._noted, output_grads, strict=True):
            if grad is None:
                continue
            g_rows, x_rows = grad[rows].flatten(0, -2), x[rows].flatten(0, -2)
            if layer.weight.requires_grad:
                _add(found, layer.weight, g_rows.T @ x_rows.conj())
            if layer.bias is not None and layer.bias.requires_grad:
                _add(found, layer.bias, g_rows.sum(0))
        return [found.get(id(parameter)) for parameter in parameters]


def _add(found: dict[int, Tensor], parameter: Tensor, grad: Tensor) -> None:
    before = found.get(id(parameter))
    found[id(parameter)] = grad if before is None else before + grad


def _is_of_a_tape(hook: Any) -> bool:
    return getattr(hook, "__func__", None) is LinearTape._note
