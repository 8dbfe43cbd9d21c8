"""What functions take, whatever their annotations name."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

if sys.version_info >= (3, 14):
    import annotationlib


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Do as `inspect.signature`, for functions too whose annotations name what is imported for type checkers alone.

    From Python 3.14 on nobody evaluates these before they are asked for, and `inspect.signature` does.

    Raises:
        TypeError, ValueError: it is not written in Python, and does not say what it takes.
    """
    if sys.version_info >= (3, 14):
        return inspect.signature(function, annotation_format=annotationlib.Format.FORWARDREF)
    return inspect.signature(function)
