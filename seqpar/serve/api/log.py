"""The log of the API server: one JSON object per line on stderr, with time, level, request id and event."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from datetime import UTC, datetime

LOGGER = "seqpar.serve"
OFTEN_S = 1.0  # between two lines of an event that clients can cause often


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON; a traceback, which only a bug has, becomes a field."""

    def format(self, record: logging.LogRecord) -> str:
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


class RateLimited(logging.StreamHandler):  # pyright: ignore[reportMissingTypeArgument]
    """Writes to stderr; frequent events once in a while, the last one with the number of events as `count`.

    Events of other packages count as frequent: uvicorn and asyncio log what any client can cause. A single event is
    written immediately, without a count.
    """

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self._held: dict[str, tuple[int, logging.LogRecord | None]] = {}  # since the last line of an event

    def emit(self, record: logging.LogRecord) -> None:
        # only the thread of the event loop can hold records back
        if _every_s(record) is None or not _in_loop():
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
        asyncio.get_running_loop().call_later(_every_s(record) or OFTEN_S, self._write_held, kind)

    def _write_held(self, kind: str) -> None:
        count, record = self._held.pop(kind)
        if record is not None:
            record.facts = {**getattr(record, "facts", {}), "count": count}
            self._write(kind, record)


def _every_s(record: logging.LogRecord) -> float | None:
    """Seconds between two lines of a frequent event, None for another one."""
    return getattr(record, "every_s", None if record.name == LOGGER else OFTEN_S)


def _in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def start() -> None:
    """Send all records of this process, uvicorn's too, to stderr."""
    handler = RateLimited()
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def event(name: str, request: str | None = None, level: int = logging.INFO, **facts: object) -> None:
    """Log an event of a request, with facts about it."""
    logging.getLogger(LOGGER).log(level, name, extra={"request": request, "facts": facts})


def often(
    name: str, request: str | None = None, level: int = logging.INFO, every_s: float | None = None, **facts: object
) -> None:
    """Log an event at most once in `every_s`, by default OFTEN_S, whatever its facts."""
    extra = {"request": request, "facts": facts, "every_s": every_s or OFTEN_S}
    logging.getLogger(LOGGER).log(level, name, extra=extra)
