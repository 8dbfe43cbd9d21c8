"""What torch keeps beside the tensors of a `state_dict`, as its `_metadata`: of each module, by path, its version.

A class that has changed what its weights mean raises its `_version`, and migrates older states when it loads them. To
it, a state without versions is one of before there were any.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

Metadata = Mapping[str, Mapping[str, Any]]


def metadata_of(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what a state has beside its tensors, by the paths of modules; nothing, where it is a plain dict.

    >>> from torch import nn
    >>> metadata_of(nn.Sequential(nn.BatchNorm1d(2)).state_dict())
    {'': {'version': 1}, '0': {'version': 2}}
    """
    return {path: dict(values) for path, values in (getattr(state, "_metadata", None) or {}).items()}


def with_metadata(state: Mapping[str, Any], metadata: Metadata) -> OrderedDict[str, Any]:
    """Return a state that has this beside its tensors, where `load_state_dict` looks for it."""
    given: Any = OrderedDict(state)
    given._metadata = copy.deepcopy(dict(metadata))  # a module that loads may change it
    return given  # type: ignore[no-any-return]
