"""Metrics for Prometheus, and spans for OpenTelemetry.

Spans need `opentelemetry-api`, and an SDK that is set up before, as by `opentelemetry-instrument seqpar serve ...`;
otherwise nothing is recorded. A job's span is within FastAPI's span of the request, and so in the trace that its
`traceparent` header names.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from seqpar.serve.messages import ImageResult, VideoResult

BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
NAME = "seqpar"
SECOND = 1_000_000_000  # in the unit of spans


class Metrics:
    """queued: number of waiting jobs. memory: bytes per rank."""

    def __init__(self, queued: Callable[[], int], memory: Callable[[], tuple[int, ...]]) -> None:
        self._memory, registry = memory, CollectorRegistry()
        length = Gauge("seqpar_queue_length", "Jobs that wait for their first image", registry=registry)
        length.set_function(queued)
        parts, name = "Seconds per part of an image", "seqpar_part_seconds"
        self.ends = Counter("seqpar_jobs", "Jobs by how they ended", ["end"], registry=registry)
        self.seconds = Histogram(name, parts, ["part"], buckets=BUCKETS, registry=registry)
        self.steps = Counter("seqpar_steps", "Denoising steps", registry=registry)
        self.cancels = Counter("seqpar_cancels", "Requests cancelled while they ran", registry=registry)
        self.restarts = Counter("seqpar_restarts", "Restarts of the ranks", registry=registry)
        self._bytes = Gauge("seqpar_memory_bytes", "Memory of a rank", ["rank"], registry=registry)
        self._registry = registry

    def observe(self, result: ImageResult | VideoResult) -> None:
        for part, seconds in result.parts_s.items():
            self.seconds.labels(part).observe(seconds)

    def text(self) -> bytes:
        for rank, count in enumerate(self._memory()):
            self._bytes.labels(str(rank)).set(count)
        return generate_latest(self._registry)


def _module(name: str) -> Any:
    """A module of OpenTelemetry's API, None if it is not installed."""
    installed = importlib.util.find_spec("opentelemetry") and importlib.util.find_spec("opentelemetry.trace")
    return importlib.import_module(f"opentelemetry.{name}") if installed else None


@dataclass(frozen=True)
class Span:
    """A span of the API, None where it is not installed. Times are seconds of the wall clock."""

    real: Any

    @staticmethod
    def begun() -> Span:
        """Begin the span of a job, in the context of its request."""
        trace = _module("trace")
        return Span(None if trace is None else trace.get_tracer(NAME).start_span(f"{NAME}.job"))

    def part(self, name: str, start_s: float, end_s: float, **facts: object) -> Span:
        """Record a finished span within this one, and return it."""
        if self.real is None:
            return self
        trace = _module("trace")
        context, start = trace.set_span_in_context(self.real), int(start_s * SECOND)
        child = trace.get_tracer(NAME).start_span(name, context, attributes=_attributes(facts), start_time=start)
        child.end(int(end_s * SECOND))
        return Span(child)

    def parts(self, start_s: float, parts_s: Mapping[str, float]) -> None:
        """Record the parts of this span, one after another. parts_s: name -> seconds."""
        for name, seconds in parts_s.items():
            self.part(name, start_s, start_s + seconds)
            start_s += seconds

    def end(self, problem: str | None, **facts: object) -> None:
        """End the span. problem: an error code, None for success."""
        if self.real is None:
            return
        self.real.set_attributes(_attributes(facts))
        if problem is not None:
            trace = _module("trace")
            self.real.set_status(trace.Status(trace.StatusCode.ERROR, problem))
        self.real.end()


def _attributes(facts: Mapping[str, object]) -> dict[str, Any]:
    return {f"{NAME}.{name}": value for name, value in facts.items() if value is not None}
