"""Numbers for Prometheus, in a registry of their own."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from seqpar.serve.messages import ImageResult, VideoResult

BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


class Metrics:
    """What is counted and measured. queued returns how many jobs wait, memory the bytes of each rank."""

    def __init__(self, queued: Callable[[], int], memory: Callable[[], tuple[int, ...]]) -> None:
        self._memory, registry = memory, CollectorRegistry()
        length = Gauge("seqpar_queue_length", "Jobs that wait for their first picture", registry=registry)
        length.set_function(queued)
        parts, name = "Seconds of the parts of a picture", "seqpar_part_seconds"
        self.ends = Counter("seqpar_jobs", "Jobs by how they ended", ["end"], registry=registry)
        self.seconds = Histogram(name, parts, ["part"], buckets=BUCKETS, registry=registry)
        self.steps = Counter("seqpar_steps", "Denoising steps", registry=registry)
        self.cancels = Counter("seqpar_cancels", "Orders that were given up while they ran", registry=registry)
        self.restarts = Counter("seqpar_restarts", "Times that the ranks were started again", registry=registry)
        self._bytes = Gauge("seqpar_memory_bytes", "Memory of a rank", ["rank"], registry=registry)
        self._registry = registry

    def made(self, made: ImageResult | VideoResult) -> None:
        """Observe the parts of a picture or video."""
        for part, seconds in made.parts_s.items():
            self.seconds.labels(part).observe(seconds)

    def text(self) -> bytes:
        """Return everything in Prometheus' format."""
        for rank, count in enumerate(self._memory()):
            self._bytes.labels(str(rank)).set(count)
        return generate_latest(self._registry)
