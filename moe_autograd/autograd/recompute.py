"""Recompute: keep the inputs of a call, and run its forward again when its backward comes.

It is `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`, which by itself goes wrong among concurrent calls:
it saves and sets the generator of the whole process, and counts what is saved. In a map both belong to the call
(`_random`, Rule 3; `ordered_hooks`), so here it only has to be called, once for each call of the map::

      forward     inputs ──▶ [ call, nothing kept ] ──▶ outputs
      backward    inputs ──▶ [ call again, same random numbers ] ◀── gradients       on the worker of this backward

A module of a call group (`grouping`) is not wrapped, but asked for a version of itself that is recomputed; one that
has none keeps only its inputs anyway, as remote experts do.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.utils.checkpoint import checkpoint, noop_context_fn

from moe_autograd._random import GivenSeeds, own_streams, running
from moe_autograd.autograd.entry import entered_again
from moe_autograd.autograd.sleeping_hooks import let_new_hooks_sleep
from moe_autograd.autograd.uncompiled import uncompiled


@dataclasses.dataclass(frozen=True)
class Recompute:
    """How calls are recomputed, for `parallel_apply(..., recompute=...)` and `MixtureOfExperts`.

    Args:
        context_fn: called once for each call; returns two context managers, one for its forward and one for the
            second run. For selective policies: `functools.partial(create_selective_checkpoint_contexts, policy)`.
        determinism_check: "default" compares shape, dtype and device of what both runs save; "none" does not.
        early_stop: end the second run as soon as all that is needed has been computed.

    Threads: `context_fn` is called by the workers, several at once.

    Example:
        >>> import torch
        >>> from moe_autograd import parallel_apply
        >>> experts, x = [torch.nn.Linear(4, 4) for _ in range(3)], torch.randn(5, 4)
        >>> outputs = parallel_apply(experts, [(x,)] * 3, recompute=Recompute(early_stop=False))
        >>> torch.stack(outputs).sum().backward()
    """

    context_fn: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]] = (
        noop_context_fn
    )
    determinism_check: str = "default"
    early_stop: bool = True

    @uncompiled
    def __call__(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Make a call whose forward runs again in its backward.

        Raises:
            torch.utils.checkpoint.CheckpointError: in the backward, if the second run saved other tensors; it lists
                those of both.
        """
        return self._checkpoint(functools.partial(_run, call, kwargs), *args)

    def without_draws(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Make a call that draws no random numbers, in the caller's own graph; see `__call__`."""
        return self._checkpoint(functools.partial(call, **kwargs), *args, preserve_rng_state=False)

    def with_draws(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Make a call that draws from a stream of its own, in the caller's own graph; see `__call__`."""
        drawing = _DrawsAgain(functools.partial(_run, call, kwargs))
        return self._checkpoint(drawing, *args, preserve_rng_state=False)

    def _checkpoint(self, call: Callable[..., Any], *args: Any, **options: bool) -> Any:
        # Keywords of the call's own are within it: `checkpoint` has some, too, which may have the same names.
        return checkpoint(
            call,
            *args,
            use_reentrant=False,
            context_fn=self.context_fn,
            determinism_check=self.determinism_check,
            early_stop=self.early_stop,
            **options,
        )


class _DrawsAgain:
    """A call whose second run draws what its first one drew, and leaves the stream of whoever runs it alone."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self._has_run = False
        self._seed: int | None = None  # of its stream, if something has been drawn

    def __call__(self, *args: Any) -> Any:
        if self._has_run and self._seed is not None:
            streams = own_streams(GivenSeeds(self._seed))
            try:
                with streams:
                    running.index = 0
                    return self._call(*args)
            except BaseException:
                streams.__exit__()
                raise
        returned = self._call(*args)
        if not self._has_run and running.seeds is not None and running.seeds.has_drawn:
            self._seed = running.seeds.seed_of(running.index)
        self._has_run = True
        return returned


def _run(call: Callable[..., Any], kwargs: dict[str, Any], /, *args: Any) -> Any:
    try:
        with entered_again(args) as entered:
            return call(*entered, **kwargs)
    finally:
        let_new_hooks_sleep()


def as_recompute(option: bool | Recompute) -> Recompute | None:
    """Return how to recompute; `None`: not at all."""
    if isinstance(option, Recompute):
        return option
    if not isinstance(option, bool):
        raise TypeError(
            f"recompute: expected True, False or a Recompute, got {option!r}. Options of "
            "torch.utils.checkpoint go into Recompute(...)."
        )
    return Recompute() if option else None
