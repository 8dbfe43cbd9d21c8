"""An offloaded expert as users see it: a module that stands for one whose weights come and go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from moe_autograd.autograd.grouping import CallGroup, call_alone
from moe_autograd.autograd.offload.checks import check_stays
from moe_autograd.autograd.offload.held import HeldExpert
from moe_autograd.autograd.recompute import Recompute


class OffloadedExpert(nn.Module):
    """One of `OffloadedExperts`: called like the module it stands for, and without parameters of its own."""

    def __init__(self, owner: CallGroup, held: HeldExpert, recompute: Recompute | None = None) -> None:
        super().__init__()
        self._owner, self._held, self._recompute = owner, held, recompute

    @property
    def call_group(self) -> CallGroup:
        """Experts of one group are called together: here one after the other, while the next is read."""
        return self._owner

    @property
    def stands_for(self) -> nn.Module:
        """The module, for those who ask whether calls share buffers."""
        return self._held.module

    @property
    def is_trained(self) -> bool:
        """Whether calls give the weights, or some of them, gradients."""
        parameters = self._held.parameters.values()
        return self._held.optimizer is not None and any(p.requires_grad for p in parameters)

    def recomputed(self, how: Recompute) -> OffloadedExpert:
        """Return the same expert, for calls that keep only inputs; its weights are read once for both in a backward."""
        return OffloadedExpert(self._owner, self._held, how)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the expert; see `OffloadedExperts`."""
        return call_alone(self, args, kwargs)

    def apply(self, fn: Callable[[nn.Module], None]) -> OffloadedExpert:
        """Call a function on the expert and each of its parts, in memory; see `torch.nn.Module.apply`.

        What it changes of them is kept, weights and buffers too, also by way of `.data`. A model's `apply` comes here.
        """
        self._held.apply(fn)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OffloadedExpert:
        """Let `to`, `half` and their like, also of a model, do nothing.

        Raises:
            TypeError: the expert's weights or buffers would get another dtype or device.
        """
        check_stays(self._held.name, self._held.tensors.values(), fn)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what is not the expert's own, which has to be set there.

        Raises:
            AttributeError: the expert has an attribute of this name, and this stand-in has none.
        """
        if not (name.startswith("_") or hasattr(self, name)) and hasattr(self.stands_for, name):
            raise AttributeError(
                f"offloaded expert {self._held.name!r}: expected {name} to be set on the module, got it set on what "
                "stands for it. Set it on `stands_for`; change weights in a function for `apply`."
            )
        super().__setattr__(name, value)

    def train(self, mode: bool = True) -> OffloadedExpert:
        """See `torch.nn.Module.train`."""
        super().train(mode)
        self._held.module.train(mode)
        return self

    def requires_grad_(self, requires_grad: bool = True) -> OffloadedExpert:
        """Say whether the expert's weights get gradients; see `torch.nn.Module.requires_grad_`.

        A module that holds this one cannot pass it on: its `requires_grad_` knows parameters only.

        Raises:
            RuntimeError: a weight that was frozen when the expert was taken over would thaw. Nothing has changed.
        """
        self._held.require_gradients(requires_grad)
        return self

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Say how weights are set, where some are given; see `torch.nn.Module.load_state_dict`.

        Raises:
            RuntimeError: some are, and `strict`.
        """
        if strict and state_dict:
            raise RuntimeError(
                f"offloaded expert {self._held.name!r}: expected no weights, got {', '.join(state_dict)}. Load them "
                "into the module before OffloadedExperts takes it over, or restore() a checkpoint."
            )
        return super().load_state_dict(state_dict, strict, assign)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"offloaded expert {self._held.name!r}: expected to stay where it is, got copied or pickled. "
            "`OffloadedExperts.checkpoint()` and `state_dict(index)` have the weights."
        )

    def extra_repr(self) -> str:
        """See `torch.nn.Module.extra_repr`."""
        return f"{self._held.name}, {self._held.weights.layout.num_bytes} bytes of weights"
