"""The queue of jobs, bounded and by priority.

A job is one HTTP request for one or more images, or for a video. Each image is a separate request to the ranks; the
next one always belongs to the first job by priority and arrival. So a job of high priority goes between two images of a
low one, and nothing that runs is preempted.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Literal

import msgspec

from seqpar.serve.api.codec import Format, InputFiles, PixelFile
from seqpar.serve.api.errors import NO_RETRY, Problem, ProblemError
from seqpar.serve.api.telemetry import Span
from seqpar.serve.messages import ImageRequest

State = Literal["queued", "running", "completed", "failed", "cancelled"]
Priority = Literal["high", "normal", "low"]
PRIORITIES: Mapping[Priority, int] = {"high": 0, "normal": 1, "low": 2}
MOST_ENDED = 1000  # jobs that have ended and are remembered
MOST_HELD = 1 << 30  # bytes of pixels of the input images of all jobs
MEASURED = 8  # requests of a model whose mean speed counts


@dataclass(frozen=True)
class Stepped:
    """A step of an image has been queued on the device. step: from 1 to steps."""

    image: int
    step: int
    steps: int


@dataclass(frozen=True)
class PreviewMade:
    """The file of a preview is ready. size: (height, width)."""

    image: int
    index: int
    size: tuple[int, int]
    file: bytes


@dataclass(frozen=True)
class ImageMade:
    """The file of an image is ready."""

    image: int


# events of a job, for its stream; "moved": the queue has changed while it waits; nothing follows "ended"
JobEvent = Literal["moved", "ended"] | Stepped | PreviewMade | ImageMade


@dataclass(frozen=True)
class JobSpec:
    """What a client requests. request: of the first image, without an id. steps: per image.

    step_s: predicted seconds per step. fps: frames per second of a video, None for images. pixels: the file with the
    pixels of the input images, until the job has ended.
    """

    request: ImageRequest
    priority: Priority
    steps: int
    step_s: float
    deadline_s: float
    pixels: PixelFile | None = None
    count: int = 1
    how: Format = field(default_factory=Format)
    fps: float | None = None

    def having(self, inputs: InputFiles) -> JobSpec:
        """The same with input images, which have been decoded."""
        request = msgspec.structs.replace(self.request, images=inputs.images, pixels=inputs.path)
        return replace(self, request=request, pixels=inputs.file)

    @property
    def nbytes(self) -> int:
        return 0 if self.pixels is None else sum(image.nbytes for image in self.request.images)


@dataclass(eq=False)
class ServerJob:
    """A job and its progress. number: of its arrival. Times are of the wall clock, `deadline` is of the event loop."""

    id: str
    key: str
    number: int
    spec: JobSpec
    deadline: float
    state: State = "queued"
    arrived: float = field(default_factory=time.time)
    started: float | None = None
    ended: float | None = None
    done_count: int = 0  # images that the ranks have finished
    attempts: int = 0  # of the running image, which ended all ranks
    step: int = 0  # of the running image
    files: dict[int, bytes] = field(default_factory=dict[int, bytes])
    parts_s: dict[str, float] = field(default_factory=dict[str, float])
    computed: dict[str, Any] = field(default_factory=dict[str, Any])  # with a step cache "steps_computed"
    size: tuple[int, int] | None = None
    stored: str | None = None  # the name of a video's file
    problem: Problem | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    timer: asyncio.TimerHandle | None = None
    span: Span = field(default_factory=Span.begun)
    listener: Callable[[JobEvent], None] | None = None  # a stream, while it is sent

    def count(self, computed: tuple[int, int] | None) -> None:
        """Add up how many steps of an image or video were computed, and of how many; None without a step cache."""
        if computed is not None:
            before = self.computed.get("steps_computed", (0, 0))
            self.computed["steps_computed"] = before[0] + computed[0], before[1] + computed[1]

    def notify(self, event: JobEvent) -> None:
        if self.listener is not None:
            self.listener(event)

    @property
    def place(self) -> tuple[int, int]:
        return PRIORITIES[self.spec.priority], self.number


class Speeds:
    """Durations of requests: predicted, or the mean of a model's last ones once the ranks have run some."""

    def __init__(self) -> None:
        self._measured: dict[str, deque[tuple[float, float]]] = {}

    def measured(self, model: str, steps: int, parts_s: Mapping[str, float]) -> None:
        """Record the parts of a successful request; "steps" is the part of all steps."""
        stepping = parts_s.get("steps", 0.0)
        rest = sum(parts_s.values()) - stepping
        self._measured.setdefault(model, deque(maxlen=MEASURED)).append((stepping / max(1, steps), rest))

    def estimate(self, model: str, steps: int, step_s: float) -> float:
        """Seconds of a request with so many steps. step_s: predicted, for a model without a measurement."""
        last = self._measured.get(model, [(step_s, 0.0)])
        return fmean(step for step, _ in last) * steps + fmean(rest for _, rest in last)


class Queue:
    """All jobs. on_end is called once for each job, when it has ended."""

    def __init__(self, bound: int, keep_s: float, on_end: Callable[[ServerJob], None]) -> None:
        self._bound, self._keep_s, self._on_end = bound, keep_s, on_end
        self.speeds = Speeds()
        self._jobs: dict[str, ServerJob] = {}
        self._number = 0
        self.current: ServerJob | None = None  # whose request the ranks run
        self.some = asyncio.Event()  # set while images remain to be made
        self.closed: Problem | None = None  # set when no job is accepted any more

    def add(self, id_: str, key: str, spec: JobSpec) -> ServerJob:
        """Accept a job; ProblemError if the queue is full or closed."""
        self.check(spec.nbytes)
        loop = asyncio.get_running_loop()
        self._forget_old()
        self._number += 1
        job = ServerJob(id_, key, self._number, spec, loop.time() + spec.deadline_s)
        job.timer = loop.call_at(job.deadline, self._expire, job)
        self._jobs[id_] = job
        self._changed()
        return job

    def check(self, nbytes: int) -> None:
        """Raise ProblemError if the queue is closed or full, or has no space for input images of so many bytes."""
        if self.closed is not None:
            raise ProblemError(self.closed)
        held = sum(job.spec.nbytes for job in self.active)
        text = None
        if nbytes and held + nbytes > MOST_HELD:
            text = f"input images need {nbytes} bytes of pixels while other jobs hold {held} of {MOST_HELD}"
        if self.length >= self._bound:
            text = f"queue is full ({self._bound} requests)"
        if text is not None:
            rest_s = max(1, round(0.0 if self.current is None else self._rest_s(self.current)))
            text = f"{text}; retry after {rest_s} s"
            raise ProblemError(Problem(429, "queue_full", text, headers={"retry-after": str(rest_s)}))

    @property
    def length(self) -> int:
        """Jobs that wait for their first image."""
        return sum(job.state == "queued" for job in self._jobs.values())

    @property
    def active(self) -> list[ServerJob]:
        return [job for job in self._jobs.values() if job.ended is None]

    def of_key(self, key: str) -> list[ServerJob]:
        """Jobs of a key that run, wait, or have ended lately, in order of arrival."""
        self._forget_old()
        return [job for job in self._jobs.values() if job.key == key]

    def find(self, id_: str) -> ServerJob | None:
        """A job, whose key the caller checks."""
        self._forget_old()
        return self._jobs.get(id_)

    def begin(self) -> ServerJob | None:
        """Start the next image; return its job, or None."""
        self.current = next(iter(self._unfinished()), None)
        if self.current is not None and self.current.state == "queued":
            self.current.state, self.current.started = "running", time.time()
            self.current.span.part("queue", self.current.arrived, self.current.started)
        return self.current

    def image_done(self, job: ServerJob) -> None:
        job.done_count, job.attempts, job.step = job.done_count + 1, 0, 0
        self._changed()

    def end(self, job: ServerJob, state: State, problem: Problem | None = None) -> None:
        """End a job, unless it has ended already."""
        if job.ended is None:
            job.state, job.problem, job.ended = state, problem, time.time()
            if job.timer is not None:
                job.timer.cancel()
            job.spec = replace(job.spec, pixels=None)  # a job is remembered for long
            job.done.set()
            job.notify("ended")
            self._changed()
            self._on_end(job)

    def cancel(self, job: ServerJob, text: str) -> None:
        """End a job whose result is not wanted any more."""
        self.end(job, "cancelled", Problem(499, "cancelled", text))

    def forget(self, id_: str) -> None:
        self._jobs.pop(id_, None)

    def close(self, problem: Problem, also_running: bool) -> None:
        """Accept no more jobs, and end those that wait (and those that run, if `also_running`)."""
        self.closed = problem
        for job in self.active:
            if also_running or job.state == "queued":
                self.end(job, "failed", problem)

    def ahead(self, job: ServerJob) -> int | None:
        """Jobs before a job: 0 if it runs, None if it has ended."""
        if job.ended is not None:
            return None
        return 0 if job.state == "running" else len(self._up_to(job)) - 1

    def estimate_s(self, job: ServerJob) -> float | None:
        """Seconds until a job will have ended; None if it has."""
        return sum(map(self._rest_s, self._up_to(job))) if job.ended is None else None

    def _up_to(self, job: ServerJob) -> list[ServerJob]:
        """Jobs up to and with this one; the running one comes first."""
        current = [self.current] if self.current is not None and self.current is not job else []
        waiting = [other for other in self._unfinished() if other.place < job.place and other is not self.current]
        return [*current, *waiting, job]

    def _rest_s(self, job: ServerJob) -> float:
        spec, images = job.spec, job.spec.count - job.done_count
        per_image, left = (
            self.speeds.estimate(spec.request.model, steps, spec.step_s)
            for steps in (spec.steps, spec.steps - job.step)
        )
        return per_image * max(0, images - 1) + (left if images else 0.0)

    def _unfinished(self) -> list[ServerJob]:
        """Jobs with images that the ranks have not finished, the next one first."""
        return sorted((job for job in self.active if job.done_count < job.spec.count), key=lambda job: job.place)

    def _changed(self) -> None:
        self.some.set() if self._unfinished() else self.some.clear()
        for job in self.active:
            if job.state == "queued":
                job.notify("moved")

    def _expire(self, job: ServerJob) -> None:
        text = f"no result within {job.spec.deadline_s:g} s; use a longer deadline_s or fewer steps"
        self.end(job, "failed", Problem(504, "deadline", text, "deadline_s", NO_RETRY))

    def _forget_old(self) -> None:
        """Drop jobs that ended long ago, and the oldest of too many."""
        ended, now = [job for job in self._jobs.values() if job.ended is not None], time.time()
        for index, job in enumerate(ended):
            if len(ended) - index > MOST_ENDED or (job.ended or now) + self._keep_s < now:
                del self._jobs[job.id]
