"""Seeds for calls that draw their numbers in another process (Rule 4 of `_random`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

from moe_autograd._contexts import contextmanager
from moe_autograd._random.seeds import CallSeeds, running

Seeds = tuple[list[int], Callable[[], None]]


def seeds_elsewhere(may_draw: Sequence[bool]) -> AbstractContextManager[Seeds]:
    """Enter this around calls that are made elsewhere, together.

    The caller's stream stays where it is: calls that fail, or draw nothing, leave no trace.

    Args:
        may_draw: for each call whether it may draw random numbers.

    Returns:
        Yields a seed for each call, 0 where it draws nothing; and what to call if one has drawn, which advances the
        caller's stream.
    """
    return _promised(may_draw) if any(may_draw) else nullcontext(([0] * len(may_draw), _do_nothing))


@contextmanager
def _promised(may_draw: Sequence[bool]) -> Iterator[Seeds]:
    own, places = running.seeds, running.places
    running.places = None
    if own is None or places is None:  # they are a map of their own
        own, places = CallSeeds(), range(len(may_draw))
    with own.promised():
        yield (
            [
                (own.seed_of(place) or 1) if draws else 0
                for draws, place in zip(may_draw, places, strict=True)
            ],
            own.note_drawn,
        )


def _do_nothing() -> None:
    return None
