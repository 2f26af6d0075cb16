"""The queue of jobs, bounded, fair between keys, and by priority within one.

A job is one HTTP request for one or more images, or for a video. Each image is a separate request to the ranks. The
next one belongs to the key that has had the least of the ranks for its weight (`fair`), and of this key's jobs to the
first one by priority and arrival. So jobs go between two images of another one, and nothing that runs is preempted.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Literal

import msgspec

from seqpar.serve.api.codec import Format, InputFiles, PixelFile
from seqpar.serve.api.errors import NO_RETRY, Problem, ProblemError, refused
from seqpar.serve.api.fair import FairShares
from seqpar.serve.api.keys import PRIORITIES, KeyTerms, Priority
from seqpar.serve.api.telemetry import Span
from seqpar.serve.messages import ImageRequest

State = Literal["queued", "running", "completed", "failed", "cancelled"]
MOST_ENDED = 1000  # jobs that have ended and are remembered
MOST_HELD = 1 << 30  # bytes of pixels of the input images of all jobs
MEASURED = 8  # requests of a form whose mean speed counts
MOST_FORMS = 256  # of requests whose speeds are remembered
RATE_S = 60.0  # in which a key may send all the jobs of its rate at once


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

    step_s: predicted seconds per step of the model's own size, frames and guidance; work: pixels of this request in
    those of the model; ratio: `rules.step_ratio`. fps: frames per second of a video, None for images. pixels: the file
    with the pixels of the input images, until the job has ended.
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
    work: float = 1.0
    ratio: float = 1.0

    @property
    def form(self) -> tuple[Any, ...]:
        """What the seconds of a step depend on: requests of the same form take the same time."""
        it = self.request
        negative = it.true_guidance is not None and it.true_guidance > 1, it.negative_prompt is not None
        guided = it.guidance is not None and it.guidance <= 1, self.ratio, *negative
        images = it.controlnet, *((image.height, image.width) for image in it.inputs)
        images = *images, it.latents and it.latents.shape, it.returns
        return it.model, it.size, it.frames, images, it.strength, guided, it.scheduler, it.preset

    def having(self, inputs: InputFiles) -> JobSpec:
        """The same with input images, which have been decoded."""
        named: Any = {"mask": inputs.mask, "control": inputs.control_image, "latents": inputs.latents}
        request = msgspec.structs.replace(self.request, images=inputs.images, pixels=inputs.path, **named)
        return replace(self, request=request, pixels=inputs.file)

    @property
    def nbytes(self) -> int:
        return (
            0
            if self.pixels is None
            else sum(x.nbytes for x in (*self.request.inputs, *filter(None, (self.request.latents,))))
        )


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
    step: int = 0  # of the running image, or of the last one
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
    """Durations of requests: the mean of the last ones of the same form.

    A form that has not run is in proportion to others of its model, before the first one to the prediction.
    """

    def __init__(self) -> None:
        # form, or model alone -> seconds of a step and of all else, divided by the work
        self._measured: dict[tuple[Any, ...] | str, deque[tuple[float, float]]] = {}

    def measured(self, spec: JobSpec, steps: int, parts_s: Mapping[str, float]) -> None:
        """Record the parts of a successful request; "steps" is the part of all steps."""
        if not steps:  # latents that are only decoded say nothing of a run
            return
        stepping = parts_s.get("steps", 0.0)
        rest = sum(parts_s.values()) - stepping
        for form in (spec.form, spec.request.model):
            times = self._measured.pop(form, None) or deque(maxlen=MEASURED)
            times.append((stepping / max(1, steps) / spec.work / spec.ratio, rest / spec.work))
            self._measured[form] = times
        while len(self._measured) > MOST_FORMS:
            del self._measured[next(iter(self._measured))]  # measured longest ago

    def estimate(self, spec: JobSpec, steps: int) -> float:
        """Seconds of a request with so many steps."""
        alike = self._measured.get(spec.form) or self._measured.get(spec.request.model)
        times = alike or [(spec.step_s, 0.0)]
        step_s, rest_s = spec.ratio * fmean(step for step, _ in times), fmean(rest for _, rest in times)
        return spec.work * (step_s * steps + rest_s)


@dataclass(frozen=True)
class Turn:
    """When a job is expected. ahead: jobs that run before its first image. seconds: of the ranks until its last one."""

    ahead: int
    seconds: float


class Queue:
    """All jobs. on_end is called once for each job, when it has ended. terms: of a key.

    swap_s(model): predicted seconds until a model is loaded, which the key of the job that needs it pays for.
    """

    def __init__(
        self,
        bound: int,
        keep_s: float,
        on_end: Callable[[ServerJob], None],
        terms: Callable[[str], KeyTerms],
        swap_s: Callable[[str], float] = lambda model: 0.0,
    ) -> None:
        self._bound, self._keep_s, self._on_end, self._terms = bound, keep_s, on_end, terms
        self._swap_s = swap_s
        self.speeds, self.shares = Speeds(), FairShares()
        self._turns: dict[ServerJob, Turn] | None = None  # of jobs that wait, until the queue changes
        self._paced: dict[str, float] = {}  # key with a rate -> when its jobs so far are within it
        self._active = dict[str, ServerJob]()  # by id, in order of arrival
        self._ended = dict[str, ServerJob]()  # ended lately, the first one first: most calls need not visit them
        self._number = 0
        self.current: ServerJob | None = None  # whose request the ranks run
        self.some = asyncio.Event()  # set while images remain to be made
        self.closed: Problem | None = None  # set when no job is accepted any more

    def add(self, id_: str, key: str, spec: JobSpec) -> ServerJob:
        """Accept a job; ProblemError if the queue is full or closed, or the key's terms do not allow the job."""
        terms, loop = self._terms(key), asyncio.get_running_loop()
        if PRIORITIES[spec.priority] < PRIORITIES[terms.priority]:
            text = f"priority {spec.priority} is above the highest of this API key; use {terms.priority}"
            raise refused(403, "forbidden", text, "priority")
        self.check(key, spec.nbytes)
        if terms.rate is not None:
            self._paced[key] = self._pace(key, terms.rate)
        self._forget_old()
        self._number += 1
        job = ServerJob(id_, key, self._number, spec, loop.time() + spec.deadline_s)
        job.timer = loop.call_at(job.deadline, self._expire, job)
        self._active[id_] = job
        self._changed()
        return job

    def check(self, key: str, nbytes: int) -> None:
        """Raise ProblemError if the queue is closed, or has no place for a job of a key or for its input images.

        nbytes: of their pixels. A key gets no more than are free at the moment, unless the keys file has its number of
        places: so no key fills the queue.
        """
        if self.closed is not None:
            raise ProblemError(self.closed)
        terms, own = self._terms(key), [job for job in self.active if job.key == key]
        if terms.rate is not None:
            early_s = self._pace(key, terms.rate) - asyncio.get_running_loop().time() - RATE_S
            if early_s > 0:
                text = f"this API key may send {terms.rate} jobs per minute"
                raise _too_many("rate_limit_exceeded", text, early_s)
        waiting, free = sum(job.state == "queued" for job in own), self._bound - self.length
        held, own_held = (sum(job.spec.nbytes for job in jobs) for jobs in (self.active, own))
        text = None
        if nbytes and nbytes + (own_held if terms.places is None else 0) > MOST_HELD - held:
            text = f"input images need {nbytes} bytes of pixels while jobs hold {held} of {MOST_HELD}, yours {own_held}"
        if waiting >= (free if terms.places is None else terms.places):
            text = f"{waiting} of your jobs wait, the most that may while {free} places are free"
        if free <= 0:
            text = f"queue is full ({self._bound} requests)"
        if text is not None:
            raise _too_many("queue_full", text, self._running_s())

    @property
    def length(self) -> int:
        """Jobs that wait for their first image."""
        return sum(job.state == "queued" for job in self._active.values())

    @property
    def active(self) -> list[ServerJob]:
        """Jobs that have not ended, in order of arrival."""
        return list(self._active.values())

    def of_key(self, key: str) -> list[ServerJob]:
        """Jobs of a key that run, wait, or have ended lately, in order of arrival."""
        self._forget_old()
        jobs = [job for job in (*self._ended.values(), *self._active.values()) if job.key == key]
        return sorted(jobs, key=lambda job: job.number)

    def find(self, id_: str) -> ServerJob | None:
        """A job, whose key the caller checks."""
        self._forget_old()
        return self._active.get(id_) or self._ended.get(id_)

    def begin(self) -> ServerJob | None:
        """Start the next image; return its job, or None."""
        heads = {key: jobs[0] for key, jobs in self._unfinished().items()}
        job = min(heads.values(), key=lambda job: (self.shares.tag(job.key), job.number), default=None)
        self.current, self._turns = job, None
        if job is not None:
            self.shares.begin(job.key, self._cost(job, self._swap_s(job.spec.request.model)))
            if job.state == "queued":
                job.state, job.started = "running", time.time()
                job.span.part("queue", job.arrived, job.started)
        return job

    def ran(self, job: ServerJob, seconds: float) -> None:
        """The ranks are free again, after so many seconds with an image of a job."""
        self.shares.end(job.key, seconds / self._terms(job.key).weight)
        self.current, self._turns = None, None
        if not self._unfinished():
            self.shares.rest()

    def image_done(self, job: ServerJob) -> None:
        job.done_count, job.attempts = job.done_count + 1, 0
        job.step = 0 if job.done_count < job.spec.count else job.spec.steps
        self._changed()

    def end(self, job: ServerJob, state: State, problem: Problem | None = None) -> None:
        """End a job, unless it has ended already."""
        if job.ended is None:
            job.state, job.problem, job.ended = state, problem, time.time()
            self._ended[job.id] = self._active.pop(job.id)
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
        """Drop a job that has ended."""
        self._ended.pop(id_, None)

    def close(self, problem: Problem, also_running: bool) -> None:
        """Accept no more jobs, and end those that wait (and those that run, if `also_running`)."""
        self.closed = problem
        for job in self.active:
            if also_running or job.state == "queued":
                self.end(job, "failed", problem)

    def ahead(self, job: ServerJob) -> int | None:
        """Jobs that run before a job: 0 if it runs, None if it has ended."""
        if job.ended is not None:
            return None
        return 0 if job.state == "running" else self._turn(job).ahead

    def estimate_s(self, job: ServerJob) -> float | None:
        """Seconds until a job will have ended; None if it has."""
        if job.ended is not None:
            return None
        return self._running_s() + self._turn(job).seconds

    def _turn(self, job: ServerJob) -> Turn:
        """When a job's turn comes if no other job arrives."""
        if self._turns is None:
            self._turns = self._forecast()
        return self._turns.get(job, Turn(0, 0.0))

    def _forecast(self) -> dict[ServerJob, Turn]:
        """The turns of all jobs with images that wait, in the order in which `begin` would start them."""
        shares, turns, seconds = self.shares.copy(), dict[ServerJob, Turn](), 0.0
        begun = {self.current} if self.current is not None else set[ServerJob]()
        swapped = set[str]()  # models that an earlier job loads
        left, waiting, order = dict[ServerJob, int](), dict[str, deque[ServerJob]](), list[tuple[float, int, str]]()
        for key, jobs in self._unfinished().items():
            left |= {job: job.spec.count - job.done_count - (job is self.current) for job in jobs}
            if some := deque(job for job in jobs if left[job]):
                waiting[key] = some
                order.append((shares.tag(key), some[0].number, key))
        heapq.heapify(order)
        while order:
            key = heapq.heappop(order)[-1]
            jobs = waiting[key]
            job = jobs[0]
            model = job.spec.request.model
            swap_s = 0.0 if model in swapped else self._swap_s(model)
            swapped.add(model)
            shares.begin(key, self._cost(job, swap_s))
            seconds += self._image_s(job) + swap_s
            turns[job] = Turn(turns[job].ahead if job in turns else len(begun), seconds)
            begun.add(job)
            left[job] -= 1
            if not left[job]:
                jobs.popleft()
            if jobs:
                heapq.heappush(order, (shares.tag(key), jobs[0].number, key))
        return turns

    def _image_s(self, job: ServerJob) -> float:
        return self.speeds.estimate(job.spec, job.spec.steps)

    def _cost(self, job: ServerJob, swap_s: float) -> float:
        return (self._image_s(job) + swap_s) / self._terms(job.key).weight

    def _running_s(self) -> float:
        """Seconds until the ranks have made the image that they are at."""
        job = self.current
        if job is None:
            return 0.0
        swap_s = self._swap_s(job.spec.request.model)  # 0 when it is loaded
        return swap_s + self.speeds.estimate(job.spec, max(0, job.spec.steps - job.step))

    def _unfinished(self) -> dict[str, list[ServerJob]]:
        """The jobs of each key with images that the ranks have not finished, the next one first."""
        jobs = dict[str, list[ServerJob]]()
        for job in sorted(self.active, key=lambda job: job.place):
            if job.done_count < job.spec.count:
                jobs.setdefault(job.key, []).append(job)
        return jobs

    def _pace(self, key: str, rate: int) -> float:
        """When the jobs of a key, with one more, are within its rate, if it never sent several at once."""
        return max(asyncio.get_running_loop().time(), self._paced.get(key, 0.0)) + RATE_S / rate

    def _changed(self) -> None:
        self._turns = None
        if self._unfinished():
            self.some.set()
        else:
            self.some.clear()
            if self.current is None:
                self.shares.rest()
        for job in self.active:
            if job.state == "queued":
                job.notify("moved")

    def _expire(self, job: ServerJob) -> None:
        text = f"no result within {job.spec.deadline_s:g} s; use a longer deadline_s or fewer steps"
        self.end(job, "failed", Problem(504, "deadline", text, "deadline_s", NO_RETRY))

    def _forget_old(self) -> None:
        """Drop ended jobs that are too old, and the oldest ones beyond the greatest number kept."""
        oldest = time.time() - self._keep_s
        while (job := next(iter(self._ended.values()), None)) is not None:
            if len(self._ended) <= MOST_ENDED and (job.ended or oldest) >= oldest:
                return
            del self._ended[job.id]


def _too_many(code: str, text: str, after_s: float) -> ProblemError:
    retry_s = str(max(1, math.ceil(after_s)))
    return refused(429, code, f"{text}; retry after {retry_s} s", retry_after=retry_s)
