"""The server's log: one line an event, for people or for programs, on stderr. It holds no token and no tensor."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime


class JsonFormatter(logging.Formatter):
    """Writes an event as one JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        event = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event)


def start_logging(level: str, *, as_json: bool) -> None:
    """Send the log of this process to stderr, and warnings with it."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if as_json else text)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)
