"""A program of modules, called by the map and one after the other, says the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tests.support.module_programs_objects
import tests.support.module_programs_results
import tests.support.module_programs_shared
import tests.support.module_programs_tensors  # noqa: F401  # they add their programs to the others
from moe_autograd import parallel_apply
from tests.support.comparison import MapFunction, Raised, assert_same_program, one_after_another
from tests.support.module_programs import PROGRAMS as PROGRAMS

# Gradients of what serves twice in one call, or outside as well, may be added up in another order.
ORDER = 1e-12


def assert_same_modules_program(
    program: Callable[[MapFunction], Any], mapped: MapFunction = parallel_apply
) -> Any:
    return assert_same_program(program, native_apply=one_after_another, mapped_apply=mapped, tolerance=ORDER)


def assert_same_without_error(program: Callable[[MapFunction], Any], **options: bool) -> None:
    """Compare with `parallel_apply` under these options; neither may raise."""
    said = assert_same_modules_program(program, functools.partial(parallel_apply, **options))
    assert not isinstance(said, Raised)


def name_of(program: Callable[[MapFunction], Any]) -> str:
    return program.__name__
