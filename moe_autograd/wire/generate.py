"""Write the Python code of `experts.proto`, or check that what is committed is fresh.

python -m moe_autograd.wire.generate            # write
python -m moe_autograd.wire.generate --check    # exit 1 if it would write something else
"""

from __future__ import annotations

import sys
import tempfile
from importlib import metadata
from pathlib import Path

from grpc_tools import protoc  # type: ignore[import-untyped]  # it ships none

_FOLDER = Path(__file__).parent
_ROOT = _FOLDER.parent.parent
_PROTO = "moe_autograd/wire/experts.proto"
_GENERATED = ("experts_pb2.py", "experts_pb2.pyi")


def generate(target: Path) -> None:
    """Write the generated files below `target`, in the folder that `experts.proto` has in the repository."""
    arguments = ["protoc", f"-I{_ROOT}", f"--python_out={target}", f"--pyi_out={target}", _PROTO]
    if protoc.main(arguments) != 0:
        raise SystemExit(f"{_PROTO}: protoc failed. Its complaint is above.")


def stale_files() -> list[str]:
    """Return the names of generated files that differ from what `experts.proto` gives now."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = Path(folder, _PROTO).parent
        return [name for name in _GENERATED if not _same_text(_FOLDER / name, fresh / name)]


def _same_text(one: Path, other: Path) -> bool:
    return one.is_file() and one.read_bytes() == other.read_bytes()


def main(arguments: list[str]) -> int:
    """Run as a command; return its exit status."""
    if arguments not in ([], ["--check"]):
        print(f"generate: expected no argument or --check, got {arguments}.", file=sys.stderr)
        return 2
    if not arguments:
        generate(_ROOT)
        return 0
    if stale := stale_files():
        version = metadata.version("grpcio-tools")
        print(
            f"{', '.join(stale)}: not what {_PROTO} gives with grpcio-tools {version}. "
            "Run `make proto` and commit the result (constraints.txt names the version).",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
