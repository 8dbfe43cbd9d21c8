"""Files that are replaced while a server runs, looked at again from time to time: tokens and certificates.

They may be on a disk of the network. While that hangs, whoever reads them hangs: so a thread of its own does.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from moe_autograd.errors import ConfigError

PATIENCE_S = 1.0
logger = logging.getLogger(__name__)


class Looks:
    """Looks at files; nobody waits for long.

    Args:
        look: reads them and takes what is new.

    Threads: any.
    """

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look
        self._change = threading.Condition()
        # a look has begun after all those were asked for that count as ended with it
        self._num_asked = self._num_ended = 0
        self._is_looking = self._is_late = False

    def now(self) -> None:
        """Return when a look that begins now has ended; at the latest when one has taken too long."""
        with self._change:
            self._num_asked += 1
            number = self._num_asked
            if not self._is_looking:
                try:
                    threading.Thread(target=self._look_on, name="experts-server-files", daemon=True).start()
                except RuntimeError:  # the system has no thread left to give: another time
                    return
                self._is_looking = True
            if not self._is_late:
                has_ended = self._change.wait_for(
                    lambda: self._num_ended >= number or self._is_late, PATIENCE_S
                )
                self._is_late = not has_ended or self._is_late

    def _look_on(self) -> None:
        """Look until nobody has asked for another look since the last one began."""
        while True:
            with self._change:
                number = self._num_asked
                if number == self._num_ended:
                    self._is_looking = False
                    return
            try:
                self._look()
            except Exception:  # a bug of ours; whoever waits goes on with what there was
                logger.exception("a look at files failed, and the next one may not")
            with self._change:
                self._num_ended, self._is_late = number, False
                self._change.notify_all()


def refuse_pipes(*files: Path | None) -> None:
    """Raise `ConfigError` unless all are files in the narrow sense: of others a read may not end."""
    for file in files:
        try:
            is_none = file is not None and file.exists() and not file.is_file()
        except OSError as error:
            raise ConfigError(f"expected a file, got {str(file)!r} ({error.strerror}).") from error
        if is_none:
            raise ConfigError(f"expected a file, got {str(file)!r}, which is none. Put one there again.")
