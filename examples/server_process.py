"""`experts-server serve` as a process of its own, for the demo."""

from __future__ import annotations

import signal
import subprocess
import sys


class ServerProcess:
    """A server that starts at once and serves while you do something else; stopped at the end of a `with` block.

    Args:
        flags: of `experts-server serve`.
    """

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-m", "experts_server", "serve", "--listen", "127.0.0.1:0", *flags]
        # A session of its own: Ctrl-C reaches us alone, and we stop it.
        self._process = subprocess.Popen(
            [*command, "--log-level", "warning"], stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def wait_until_it_serves(self) -> str:
        """Return its address: the last word of the line that it prints then."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"demo: the server ended with code {self._process.wait()} before it served.")
        return line.split()[-1]

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Ask it to drain and end, and see that it does, unless there is an error to tell of already."""
        self._process.send_signal(signal.SIGTERM)
        self._process.communicate(timeout=60)
        if kind is None and self._process.returncode != 0:
            raise SystemExit(f"demo: expected the server to end with code 0, got {self._process.returncode}.")
