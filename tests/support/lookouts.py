"""Lookouts for tests (`moe_autograd._lookout`)."""

from __future__ import annotations

from moe_autograd._crew import Crew


class NobodyLooks:
    """Stands for a lookout that never comes."""

    def watch(self, crew: Crew) -> None: ...

    def forget(self, crew: Crew) -> None: ...
