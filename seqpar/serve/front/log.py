"""The front's log: one JSON object a line on stderr, with the time, the level, the request's id and what happened."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

LOGGER = "seqpar.serve"


class Lines(logging.Formatter):
    """Writes a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; a traceback, which only a bug has, becomes a field of it."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "request": getattr(record, "request", None),
            "event": record.getMessage(),
        }
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def start() -> None:
    """Send all records of this process, uvicorn's too, to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def event(name: str, request: str | None = None, level: int = logging.INFO, **facts: object) -> None:
    """Log what happened, of which request, and facts about it."""
    logging.getLogger(LOGGER).log(level, name, extra={"request": request, "facts": facts})
