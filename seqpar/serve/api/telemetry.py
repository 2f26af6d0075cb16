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
    """queued, running: number of jobs that wait for their first image, and of others. memory: bytes per rank.

    models: by name whether each is loaded.
    """

    def __init__(
        self,
        queued: Callable[[], int],
        running: Callable[[], int],
        memory: Callable[[], tuple[int, ...]],
        models: Callable[[], Mapping[str, bool]],
    ) -> None:
        self._memory, self._models, self._registry = memory, models, CollectorRegistry()
        every: Any = {"registry": self._registry}
        timed: Any = {"registry": self._registry, "buckets": BUCKETS}
        Gauge("seqpar_queue_length", "Jobs that wait for their first image", **every).set_function(queued)
        Gauge("seqpar_running", "Jobs that have begun and not ended", **every).set_function(running)
        self._answers = Counter("seqpar_responses", "HTTP answers", ["method", "route", "status"], **every)
        self._ends = Counter("seqpar_jobs", "Jobs by how they ended", ["model", "end"], **every)
        self._waits = Histogram("seqpar_wait_seconds", "From arrival to the first image's begin", ["model"], **timed)
        self._latencies = Histogram("seqpar_latency_seconds", "From arrival to completion", ["model"], **timed)
        self._speeds = Histogram("seqpar_steps_per_second", "Speed of an image's steps", ["model"], **timed)
        self.seconds = Histogram("seqpar_part_seconds", "Seconds per part of an image", ["model", "part"], **timed)
        self.steps = Counter("seqpar_steps", "Denoising steps", ["model"], **every)
        self.cancels = Counter("seqpar_cancels", "Requests cancelled while they ran", ["model"], **every)
        self.restarts = Counter("seqpar_restarts", "Restarts of the ranks", **every)
        self._loads = Histogram("seqpar_load_seconds", "Seconds of loading a model at run time", ["model"], **timed)
        self._unloadable = Counter("seqpar_load_failures", "Models that did not load at run time", ["model"], **every)
        self._loaded = Gauge("seqpar_model_loaded", "1 for a model that is loaded", ["model"], **every)
        self._bytes = Gauge("seqpar_memory_bytes", "Memory of a rank: of its GPU, or of the host", ["rank"], **every)

    def answered(self, method: str, route: str, status: int) -> None:
        """Count an HTTP answer. route: "" for one that no route gave."""
        self._answers.labels(method, route, str(status)).inc()

    def observe(self, model: str, result: ImageResult | VideoResult) -> None:
        """Record the parts and the speed of a result of the ranks."""
        for part, seconds in result.parts_s.items():
            self.seconds.labels(model, part).observe(seconds)
        if stepping := result.parts_s.get("steps"):
            self._speeds.labels(model).observe(result.steps / stepping)

    def ended(self, model: str, end: str, waited_s: float | None, latency_s: float) -> None:
        """Record the end of a job. waited_s: None if it never began."""
        self._ends.labels(model, end).inc()
        if waited_s is not None:
            self._waits.labels(model).observe(waited_s)
        if end == "completed":
            self._latencies.labels(model).observe(latency_s)

    def loaded(self, model: str, seconds: float | None) -> None:
        """Record that a model was loaded at run time. seconds: None if it could not be."""
        if seconds is None:
            self._unloadable.labels(model).inc()
        else:
            self._loads.labels(model).observe(seconds)

    def text(self) -> bytes:
        for name, is_loaded in self._models().items():
            self._loaded.labels(name).set(is_loaded)
        for rank, count in enumerate(self._memory()):
            self._bytes.labels(str(rank)).set(count)
        return generate_latest(self._registry)


def _module(name: str) -> Any:
    """A module of OpenTelemetry's API, None if it is not installed."""
    installed = importlib.util.find_spec("opentelemetry") and importlib.util.find_spec("opentelemetry.trace")
    return importlib.import_module(f"opentelemetry.{name}") if installed else None


@dataclass(frozen=True)
class Span:
    """A span of the API, None where none is recorded. Times are seconds of the wall clock."""

    real: Any

    @staticmethod
    def begun() -> Span:
        """Begin the span of a job, in the context of its request."""
        trace = _module("trace")
        span = None if trace is None else trace.get_tracer(NAME).start_span(f"{NAME}.job")
        return Span(span if span is not None and span.is_recording() else None)

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
