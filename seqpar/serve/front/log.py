"""The front's log: one JSON object a line on stderr, with the time, the level, the request's id and what happened."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from datetime import UTC, datetime

LOGGER = "seqpar.serve"
OFTEN_S = 1.0  # between two lines of an event that clients can cause often


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


class Stderr(logging.StreamHandler):  # pyright: ignore[reportMissingTypeArgument]
    """Writes records; of each event that may be frequent one per second at most, with the number of events.

    Other packages' events are such: uvicorn and asyncio log what any client can cause. One that comes alone is written
    at once, without a number.
    """

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self._held: dict[str, tuple[int, logging.LogRecord | None]] = {}  # since the last line of an event

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or hold it back. Only the thread of the event loop can hold records back."""
        if not getattr(record, "often", record.name != LOGGER) or not _in_loop():
            super().emit(record)
            return
        kind = f"{record.name} {record.getMessage()}"
        if kind in self._held:
            self._held[kind] = self._held[kind][0] + 1, record
        else:
            self._write(kind, record)

    def _write(self, kind: str, record: logging.LogRecord) -> None:
        super().emit(record)
        self._held[kind] = 0, None
        asyncio.get_running_loop().call_later(OFTEN_S, self._look, kind)

    def _look(self, kind: str) -> None:
        """Write the last record that was held back, if there is one."""
        count, record = self._held.pop(kind)
        if record is not None:
            record.facts = {**getattr(record, "facts", {}), "count": count}
            self._write(kind, record)


def _in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def start() -> None:
    """Send all records of this process, uvicorn's too, to stderr."""
    handler = Stderr()
    handler.setFormatter(Lines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def event(name: str, request: str | None = None, level: int = logging.INFO, **facts: object) -> None:
    """Log what happened, of which request, and facts about it."""
    logging.getLogger(LOGGER).log(level, name, extra={"request": request, "facts": facts})


def often(name: str, level: int = logging.INFO, **facts: object) -> None:
    """Log what happened and facts about it, at most once per second; facts that differ do not make another event."""
    logging.getLogger(LOGGER).log(level, name, extra={"facts": facts, "often": True})
