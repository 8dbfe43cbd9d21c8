"""The whole catalogue: importing this module registers every function of the three files beside it."""

from __future__ import annotations

from tests.support import functions_context, functions_numbers, functions_results
from tests.support.catalogue import CATALOGUE, Case, Leaves

__all__ = ["CATALOGUE", "Case", "Leaves", "functions_context", "functions_numbers", "functions_results"]
