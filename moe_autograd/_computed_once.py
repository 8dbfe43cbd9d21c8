"""An attribute that is computed when it is first asked for, and no lock.

`functools.cached_property` has one until Python 3.12, for all instances of a class: what one thread computes for one of
them, every other thread waits for, and a child that is forked just then waits for it for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

T = TypeVar("T")


class computed_once(Generic[T]):  # a decorator, named as `property` is
    """Make a method an attribute, whose value is kept with the instance.

    Args:
        compute: the method. Threads that ask at once may each call it: one of the values is kept.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self._name = compute.__name__
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: object | None, owner: type) -> Self | T:
        """Return the value; from then on Python finds it in the instance itself, and asks here no more."""
        if instance is None:
            return self
        value: T = instance.__dict__.setdefault(self._name, self._compute(instance))
        return value
