"""Lookouts for tests (`moe_autograd._lookout`)."""

from __future__ import annotations

from moe_autograd._crew import Crew


class NobodyLooks:
    """Stands for a lookout that never comes.

    Args:
        is_watching: whether it seems to look at another crew.
    """

    def __init__(self, *, is_watching: bool = False) -> None:
        self.is_watching = is_watching

    def watch(self, crew: Crew) -> None: ...

    def forget(self, crew: Crew) -> None: ...
