"""Who may import whom: the rooms of both packages and the doors between them.

Each room lists the rooms it may import from, itself included by nature. A file that belongs to no room fails, so
that a new one gets its doors on purpose.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOORS: dict[str, tuple[str, ...]] = {
    "moe_autograd.errors": (),
    "moe_autograd._natural_order": (),
    "moe_autograd._metadata": (),
    "moe_autograd._contexts": (),
    "moe_autograd._computed_once": (),
    "moe_autograd.timeline": (
        "moe_autograd._contexts",
        "moe_autograd._interrupts",
        "moe_autograd._natural_order",
    ),
    "moe_autograd._intraop": (),
    "moe_autograd._signatures": (),
    "moe_autograd._imported": (),
    "moe_autograd._ambient": ("moe_autograd.errors",),
    "moe_autograd._random": ("moe_autograd._contexts",),
    "moe_autograd._habits": ("moe_autograd._intraop",),
    "moe_autograd._switching": (),
    "moe_autograd._frames": (),
    "moe_autograd._interrupts": ("moe_autograd._contexts",),
    "moe_autograd._waiting": ("moe_autograd._interrupts",),
    "moe_autograd._streams": ("moe_autograd._contexts", "moe_autograd.errors"),
    "moe_autograd._threads": (
        "moe_autograd._frames",
        "moe_autograd._interrupts",
        "moe_autograd._intraop",
        "moe_autograd._switching",
    ),
    "moe_autograd._toml": ("moe_autograd.errors",),
    "moe_autograd._lookout": ("moe_autograd._threads",),
    "moe_autograd._progress": ("moe_autograd._lookout", "moe_autograd._threads"),
    "moe_autograd._crew": (
        "moe_autograd._ambient",
        "moe_autograd._habits",
        "moe_autograd._interrupts",
        "moe_autograd._intraop",
        "moe_autograd._lookout",
        "moe_autograd._progress",
        "moe_autograd._threads",
        "moe_autograd._waiting",
    ),
    "moe_autograd._workers": (
        "moe_autograd._crew",
        "moe_autograd._habits",
        "moe_autograd._interrupts",
        "moe_autograd._intraop",
    ),
    "moe_autograd.wire": ("moe_autograd._computed_once", "moe_autograd.errors"),
    "moe_autograd.autograd": (
        "moe_autograd._ambient",
        "moe_autograd._computed_once",
        "moe_autograd._contexts",
        "moe_autograd._frames",
        "moe_autograd._habits",
        "moe_autograd._imported",
        "moe_autograd._interrupts",
        "moe_autograd._intraop",
        "moe_autograd._metadata",
        "moe_autograd._random",
        "moe_autograd._signatures",
        "moe_autograd._streams",
        "moe_autograd._threads",
        "moe_autograd._waiting",
        "moe_autograd._workers",
        "moe_autograd.errors",
        "moe_autograd.timeline",
    ),
    "moe_autograd.autograd.reading": (),
    "moe_autograd.autograd.contents": (
        "moe_autograd._ambient",
        "moe_autograd._imported",
        "moe_autograd.autograd.reading",
    ),
    "moe_autograd.autograd.joining": (
        "moe_autograd._ambient",
        "moe_autograd._computed_once",
        "moe_autograd._contexts",
        "moe_autograd._streams",
        "moe_autograd.autograd.borders",
        "moe_autograd.autograd.emulated",
        "moe_autograd.autograd.grad_dtypes",
        "moe_autograd.autograd.notes",
        "moe_autograd.autograd.result_hooks",
        "moe_autograd.autograd.runs",
        "moe_autograd.autograd.sleeping_hooks",
        "moe_autograd.autograd.this_backward",
        "moe_autograd.autograd.uncompiled",
        "moe_autograd.errors",
    ),
    "moe_autograd.autograd.modules": (
        "moe_autograd._ambient",
        "moe_autograd._contexts",
        "moe_autograd._streams",
        "moe_autograd.autograd.borders",
        "moe_autograd.autograd.contents",
        "moe_autograd.autograd.deep",
        "moe_autograd.autograd.emulated",
        "moe_autograd.autograd.entry",
        "moe_autograd.autograd.grad_dtypes",
        "moe_autograd.autograd.grouping",
        "moe_autograd.autograd.hooks",
        "moe_autograd.autograd.joining",
        "moe_autograd.autograd.ordered_hooks",
        "moe_autograd.autograd.result_hooks",
        "moe_autograd.autograd.runs",
        "moe_autograd.autograd.saved_tensors",
        "moe_autograd.autograd.sleeping_hooks",
        "moe_autograd.autograd.split_backward",
        "moe_autograd.autograd.this_backward",
        "moe_autograd.autograd.turns",
        "moe_autograd.autograd.uncompiled",
        "moe_autograd.autograd.walks",
        "moe_autograd.autograd.wrapped_hooks",
    ),
    "moe_autograd.moe": (
        "moe_autograd._ambient",
        "moe_autograd._computed_once",
        "moe_autograd._contexts",
        "moe_autograd._interrupts",
        "moe_autograd.autograd",
        "moe_autograd.errors",
    ),
    "moe_autograd.remote": (
        "moe_autograd._ambient",
        "moe_autograd._contexts",
        "moe_autograd._interrupts",
        "moe_autograd._intraop",
        "moe_autograd._metadata",
        "moe_autograd._natural_order",
        "moe_autograd._random",
        "moe_autograd._streams",
        "moe_autograd._toml",
        "moe_autograd._waiting",
        "moe_autograd.autograd",
        "moe_autograd.errors",
        "moe_autograd.timeline",
        "moe_autograd.wire",
    ),
    "experts_server.budget": ("moe_autograd.errors",),
    "experts_server.locks": ("moe_autograd.autograd", "moe_autograd.errors"),
    "experts_server.spec": (
        "moe_autograd._computed_once",
        "moe_autograd.autograd",
        "moe_autograd.errors",
        "moe_autograd.moe.experts",
        "moe_autograd.wire",
    ),
    "experts_server.configuration": ("moe_autograd._toml", "moe_autograd.errors", "moe_autograd.wire"),
    "experts_server.hosting": (
        "experts_server.budget",
        "experts_server.configuration",
        "experts_server.locks",
        "experts_server.spec",
        "moe_autograd._contexts",
        "moe_autograd._metadata",
        "moe_autograd._random",
        "moe_autograd._signatures",
        "moe_autograd._streams",
        "moe_autograd.autograd",
        "moe_autograd.errors",
        "moe_autograd.moe.experts",
        "moe_autograd.wire",
    ),
    "experts_server.queues": (
        "experts_server.budget",
        "experts_server.hosting",
        "moe_autograd._ambient",
        "moe_autograd._contexts",
        "moe_autograd._intraop",
        "moe_autograd._natural_order",
        "moe_autograd._streams",
        "moe_autograd.errors",
        "moe_autograd.wire",
    ),
    "experts_server.checkpoints": (
        "experts_server.configuration",
        "experts_server.hosting",
        "experts_server.locks",
        "experts_server.queues",
        "moe_autograd._contexts",
        "moe_autograd._metadata",
        "moe_autograd.autograd",
        "moe_autograd.errors",
    ),
    "experts_server.serving": (
        "experts_server.budget",
        "experts_server.checkpoints",
        "experts_server.configuration",
        "experts_server.hosting",
        "experts_server.queues",
        "moe_autograd._ambient",
        "moe_autograd._contexts",
        "moe_autograd._interrupts",
        "moe_autograd._intraop",
        "moe_autograd._metadata",
        "moe_autograd._waiting",
        "moe_autograd.errors",
        "moe_autograd.moe.experts",
        "moe_autograd.wire",
    ),
    "experts_server.command": (
        "experts_server.configuration",
        "experts_server.serving",
        "moe_autograd._contexts",
        "moe_autograd._natural_order",
        "moe_autograd.autograd",
        "moe_autograd.errors",
        "moe_autograd.wire",
    ),
    "experts_server.__main__": ("experts_server.command",),
}
PUBLIC_ROOTS = ("moe_autograd", "experts_server")  # their __init__ collects the public names and may see all


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {
    module_name(path): path
    for package in PUBLIC_ROOTS
    for path in sorted((ROOT / package).rglob("*.py"))
    if not path.stem.endswith("_pb2")
}


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text(encoding="utf-8"))


def is_within(module: str, room: str) -> bool:
    return module == room or module.startswith(f"{room}.")


def room_of(module: str) -> str:
    rooms = [room for room in DOORS if is_within(module, room)]
    assert rooms, f"{module} belongs to no room: give it its doors in {Path(__file__).name}"
    return max(rooms, key=len)


def imports_of(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Every module that `node` imports or imports names from, with its line."""
    for child in ast.walk(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, child.lineno) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: relative import"
            base = child.module or ""
            for alias in child.names:  # `from package import module` imports the module
                name = f"{base}.{alias.name}"
                yield name if name in SOURCES else base, child.lineno


def test_a_module_imports_only_from_rooms_that_its_own_room_has_a_door_to() -> None:
    for module in SOURCES.keys() - PUBLIC_ROOTS:
        room = room_of(module)
        for imported, line in imports_of(tree_of(module)):
            if imported.split(".")[0] in PUBLIC_ROOTS:
                allowed = any(is_within(imported, door) for door in (room, *DOORS[room]))
                assert allowed, f"{SOURCES[module]}:{line}: {room} has no door to {imported}"


def test_no_module_imports_the_root_of_its_own_package() -> None:
    for module, path in SOURCES.items():
        own_root = module.split(".")[0]
        lines = [line for imported, line in imports_of(tree_of(module)) if imported == own_root]
        assert not lines, f"{path}:{lines[0]}: import from the module that defines the name"


def test_no_function_imports() -> None:
    for module, path in SOURCES.items():
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = [line for _, line in imports_of(node)]
                assert not lines, f"{path}:{lines[0]}: import at the top; a cycle is a misplaced name"


def attributes_in(module: str) -> set[str]:
    return {ast.unparse(node) for node in ast.walk(tree_of(module)) if isinstance(node, ast.Attribute)}


def packages_imported_by(module: str) -> set[str]:
    return {name.split(".")[0] for name, _ in imports_of(tree_of(module))}


def test_nothing_is_pickled() -> None:
    for module, path in SOURCES.items():
        imported = packages_imported_by(module) & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
        called = attributes_in(module) & {"torch.load", "torch.save"}
        assert not imported | called, path


def test_contexts_raise_what_their_blocks_raise() -> None:
    """Those of `contextlib` set an attribute of it, which an exception may refuse."""
    for module in SOURCES.keys() - {"moe_autograd._contexts"}:
        imported = {
            f"{node.module}.{alias.name}"
            for node in ast.walk(tree_of(module))
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        found = attributes_in(module) | imported
        assert not found & {"contextlib.contextmanager", "contextlib._GeneratorContextManager"}, module


ROOMS_WITH_A_MAP = (
    "moe_autograd.autograd",
    "moe_autograd.autograd.contents",
    "moe_autograd.autograd.joining",
    "moe_autograd.autograd.modules",
    "moe_autograd.autograd.offload",
    "moe_autograd.autograd.reading",
    "moe_autograd.remote",
    "experts_server.hosting",
    "experts_server.serving",
)


@pytest.mark.parametrize("room", ROOMS_WITH_A_MAP)
def test_the_map_of_a_room_has_all_its_files_and_no_others(room: str) -> None:
    described = ast.get_docstring(tree_of(room)) or ""
    listed = [
        name
        for line in described.splitlines()
        if (columns := re.fullmatch(r" {4}[a-z ]+? {2,}([a-z_, ]+)", line))
        for name in columns[1].split(", ")
    ]
    folder = SOURCES[room].parent
    there = [path.stem for path in folder.iterdir() if path.suffix == ".py" or path.is_dir()]
    assert sorted(listed) == sorted(set(there) - {"__init__", "__pycache__"})


def is_local(module: str) -> bool:
    remote_rooms = ("moe_autograd.remote", "moe_autograd.wire", "experts_server")
    return not any(is_within(module, room) for room in remote_rooms)


def test_only_the_remote_rooms_know_of_a_network() -> None:
    of_networks = {"grpc", "google", "xxhash", "cryptography", "socket", "asyncio"}
    for module in filter(is_local, SOURCES):
        assert not packages_imported_by(module) & of_networks, module


@pytest.mark.parametrize("module", ["autograd.emulated", "autograd.isolated", "moe.layer"])
def test_those_who_only_compose_know_no_threads(module: str) -> None:
    imported = {name for name, _ in imports_of(tree_of(f"moe_autograd.{module}"))}
    assert not imported & {"threading", "queue", "concurrent.futures", "moe_autograd._workers"}
