"""Spans of OpenTelemetry: a job, its time in the queue, and each picture with the parts that the ranks have timed.

When it wins: where requests pass through many services, whose traces FastAPI joins by the header `traceparent`; a job's
span is within FastAPI's of the request. It needs `opentelemetry-api`; spans go where an SDK sends them that is set up
before, as by `opentelemetry-instrument seqpar serve ...`. Without the package, or without an SDK, nothing is recorded.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NAME = "seqpar"
SECOND = 1_000_000_000  # in the unit of spans


def _module(name: str) -> Any:
    """Return a module of the API, None where it is not installed."""
    installed = importlib.util.find_spec("opentelemetry") and importlib.util.find_spec("opentelemetry.trace")
    return importlib.import_module(f"opentelemetry.{name}") if installed else None


@dataclass(frozen=True)
class Span:
    """A span that has begun; `real` is None where the API is not installed. Times are seconds of the wall clock."""

    real: Any

    @staticmethod
    def begun() -> Span:
        """Begin the span of a job, in the context of its request."""
        trace = _module("trace")
        return Span(None if trace is None else trace.get_tracer(NAME).start_span(f"{NAME}.job"))

    def part(self, name: str, start_s: float, end_s: float, **facts: object) -> Span:
        """Record a span within this one, which has ended, and return it."""
        if self.real is None:
            return self
        trace = _module("trace")
        within, begun = trace.set_span_in_context(self.real), int(start_s * SECOND)
        made = trace.get_tracer(NAME).start_span(name, within, attributes=_named(facts), start_time=begun)
        made.end(int(end_s * SECOND))
        return Span(made)

    def parts(self, start_s: float, parts_s: Mapping[str, float]) -> None:
        """Record the parts of this span, one after the other. parts_s: name -> seconds."""
        for name, seconds in parts_s.items():
            self.part(name, start_s, start_s + seconds)
            start_s += seconds

    def end(self, wrong: str | None, **facts: object) -> None:
        """End the span. wrong: the code of what went wrong, None if nothing did."""
        if self.real is None:
            return
        self.real.set_attributes(_named(facts))
        if wrong is not None:
            trace = _module("trace")
            self.real.set_status(trace.Status(trace.StatusCode.ERROR, wrong))
        self.real.end()


def _named(facts: Mapping[str, object]) -> dict[str, Any]:
    return {f"{NAME}.{name}": value for name, value in facts.items() if value is not None}
