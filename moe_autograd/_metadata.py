"""What torch keeps beside the tensors of a `state_dict`, as its `_metadata`: of each module, by path, its version.

A class that has changed what its weights mean raises its `_version`, and migrates older states when it loads them. To
it, a state without versions is one of before there were any.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

Metadata = Mapping[str, Mapping[str, Any]]
_INT64 = range(-(1 << 63), 1 << 63)


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
    # Whoever loads it may change them.
    given._metadata = {path: dict(values) for path, values in metadata.items()}
    return given  # type: ignore[no-any-return]


def versions_of(state: Mapping[str, Any]) -> dict[str, int]:
    """Return the versions of those modules that have tensors in a state, by path: what of its metadata can travel.

    >>> from torch import nn
    >>> versions_of(nn.Sequential(nn.BatchNorm1d(2), nn.ReLU()).state_dict())
    {'': 1, '0': 2}
    """
    holding = paths_in(state)
    versions = {path: values.get("version") for path, values in metadata_of(state).items() if path in holding}
    return {path: version for path, version in versions.items() if type(version) is int and version in _INT64}


def paths_in(keys: Iterable[str]) -> set[str]:
    """Return the paths of all modules in which there may be something with these keys.

    >>> sorted(paths_in(["up.norm.weight", "scale"]))
    ['', 'up', 'up.norm']
    """
    paths = {""}
    for key in keys:
        path = key.rpartition(".")[0]
        while path not in paths:
            paths.add(path)
            path = path.rpartition(".")[0]
    return paths


def of_versions(versions: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """Return metadata that has these versions, by path."""
    return {path: {"version": version} for path, version in versions.items()}


def merged(first: Metadata, second: Metadata) -> dict[str, dict[str, Any]]:
    """Return what both have, where both have the same that of the second."""
    return {path: {**first.get(path, {}), **second.get(path, {})} for path in {**first, **second}}


def metadata_below(prefix: str, local_metadata: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return, in a `_load_from_state_dict`, what the state has beside its tensors for the module and what is in it.

    Torch passes each module its own alone (`local_metadata`), and one that stands for modules which are elsewhere has
    none inside that would be passed theirs. So it is looked up in torch's `load_state_dict`, which is running.
    """
    path, frame = path_within(prefix, ""), sys._getframe(1)
    found: Metadata = {path: local_metadata}
    while (outer := frame.f_back) is not None:
        frame = outer
        if frame.f_globals.get("__name__") == "torch.nn.modules.module":
            metadata = frame.f_locals.get("metadata")
            if isinstance(metadata, Mapping) and metadata.get(path) is local_metadata:
                found = metadata
                break
    return {
        each.removeprefix(path).removeprefix("."): dict(values)
        for each, values in found.items()
        if each == path or each.startswith(prefix)
    }


def path_within(prefix: str, path: str) -> str:
    """Return the path of a module with this path in one whose keys begin with a prefix (with its last dot).

    >>> path_within("layers.0.", "up"), path_within("layers.0.", "")
    ('layers.0.up', 'layers.0')
    """
    return f"{prefix}{path}" if path else prefix.removesuffix(".")
