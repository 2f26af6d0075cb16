"""The queue of requests, bounded and by priority, and the ledger of all jobs.

A job is one request for one or more pictures, or for a video. Each of these is an order of its own; the next one is
always of the first job by priority and arrival, so that a high job goes between two pictures of a low one, and nothing
that runs is preempted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from seqpar.serve.front.errors import Problem, ProblemError
from seqpar.serve.front.events import JobEnded, JobEvent, Moved
from seqpar.serve.front.pictures import Format, PixelFile
from seqpar.serve.front.spans import Span
from seqpar.serve.front.speeds import Speeds
from seqpar.serve.messages import ImageRequest

State = Literal["queued", "running", "completed", "failed", "cancelled"]
Priority = Literal["high", "normal", "low"]
PRIORITIES: Mapping[Priority, int] = {"high": 0, "normal": 1, "low": 2}
ENDED = 1000  # jobs that have ended and are remembered
MOST_HELD = 1 << 30  # bytes of pixels of all pictures that jobs begin with


@dataclass(frozen=True)
class Wanted:
    """What a request asks for. order: its first picture, without an id. steps: of each picture.

    step_s: predicted seconds of a step. fps: frames a second of a video, None for pictures. pixels: the file with the
    pixels of the pictures that it begins with, until the job has ended.
    """

    order: ImageRequest
    count: int
    how: Format
    priority: Priority
    steps: int
    step_s: float
    deadline_s: float
    fps: float | None = None
    pixels: PixelFile | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of the pictures that it begins with."""
        return 0 if self.pixels is None else sum(image.nbytes for image in self.order.images)


@dataclass(eq=False)
class ServedJob:
    """A request and how far it is. number: of its arrival. Times are of the wall clock, `deadline` is of the loop."""

    id: str
    key: str
    number: int
    wanted: Wanted
    deadline: float
    state: State = "queued"
    arrived: float = field(default_factory=time.time)
    started: float | None = None
    ended: float | None = None
    ordered: int = 0  # pictures whose order has ended well
    attempts: int = 0  # of the picture that runs, which ended all ranks
    step: int = 0  # of the picture that runs
    files: dict[int, bytes] = field(default_factory=dict[int, bytes])
    parts_s: dict[str, float] = field(default_factory=dict[str, float])
    size: tuple[int, int] | None = None
    stored: str | None = None  # the name of the file of a video
    problem: Problem | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    timer: asyncio.TimerHandle | None = None
    span: Span = field(default_factory=Span.begun)
    listener: Callable[[JobEvent], None] | None = None  # a stream, for as long as it is sent

    def tell(self, event: JobEvent) -> None:
        """Tell the job's stream of an event, if it has one."""
        if self.listener is not None:
            self.listener(event)

    @property
    def place(self) -> tuple[int, int]:
        """Return what jobs are sorted by: priority, then arrival."""
        return PRIORITIES[self.wanted.priority], self.number


class Queue:
    """All jobs. on_end is called once for each job, when it has ended."""

    def __init__(self, bound: int, keep_s: float, speeds: Speeds, on_end: Callable[[ServedJob], None]) -> None:
        self._bound, self._keep_s, self._speeds, self._on_end = bound, keep_s, speeds, on_end
        self._jobs: dict[str, ServedJob] = {}
        self._number = 0
        self.current: ServedJob | None = None  # whose order is with the ranks
        self.some = asyncio.Event()  # set while there are pictures to order
        self.closed: Problem | None = None  # set when no request is taken any more

    def add(self, id_: str, key: str, wanted: Wanted) -> ServedJob:
        """Take a request; ProblemError if the queue is full or closed."""
        self.check(wanted.nbytes)
        loop = asyncio.get_running_loop()
        self._forget()
        self._number += 1
        job = ServedJob(id_, key, self._number, wanted, loop.time() + wanted.deadline_s)
        job.timer = loop.call_at(job.deadline, self._expire, job)
        self._jobs[id_] = job
        self._look()
        return job

    def check(self, nbytes: int) -> None:
        """Raise ProblemError if the queue is closed or full, or has no room for pictures of so many bytes."""
        if self.closed is not None:
            raise ProblemError(self.closed)
        held = sum(each.wanted.nbytes for each in self.active)
        if nbytes and held + nbytes > MOST_HELD:
            text = f"got {nbytes} bytes of pixels while {held} wait, expected at most {MOST_HELD} together"
            raise ProblemError(Problem(429, "queue_full", f"{text}; ask again later", headers=self._retry_after()))
        if self.length >= self._bound:
            text = f"got a request while {self.length} wait, expected at most {self._bound}; ask again later"
            raise ProblemError(Problem(429, "queue_full", text, headers=self._retry_after()))

    @property
    def length(self) -> int:
        """Return how many jobs wait for their first picture."""
        return sum(job.state == "queued" for job in self._jobs.values())

    @property
    def active(self) -> list[ServedJob]:
        """Return the jobs that have not ended."""
        return [job for job in self._jobs.values() if job.ended is None]

    @property
    def remembered(self) -> list[ServedJob]:
        """Return all jobs that run, wait, or have ended lately, in order of arrival."""
        self._forget()
        return [*self._jobs.values()]

    def of_key(self, key: str) -> Iterator[ServedJob]:
        """Return the jobs of a key, in order of arrival."""
        return (job for job in self.remembered if job.key == key)

    def find(self, id_: str) -> ServedJob | None:
        """Return a job, whose key the caller checks; None if there is none of that id."""
        self._forget()
        return self._jobs.get(id_)

    def begin(self) -> ServedJob | None:
        """Return the job whose picture is next, which now runs, or None."""
        self.current = next(iter(self._to_order()), None)
        if self.current is not None and self.current.state == "queued":
            self.current.state, self.current.started = "running", time.time()
            self.current.span.part("queue", self.current.arrived, self.current.started)
        return self.current

    def ordered(self, job: ServedJob) -> None:
        """Note that the order of a job's picture has ended well."""
        job.ordered, job.attempts, job.step = job.ordered + 1, 0, 0
        self._look()

    def end(self, job: ServedJob, state: State, problem: Problem | None = None) -> None:
        """End a job, unless it has ended already."""
        if job.ended is None:
            job.state, job.problem, job.ended = state, problem, time.time()
            if job.timer is not None:
                job.timer.cancel()
            job.wanted = replace(job.wanted, pixels=None)  # a job is remembered for long
            job.done.set()
            job.tell(JobEnded())
            self._look()
            self._on_end(job)

    def cancel(self, job: ServedJob, text: str) -> None:
        """End a job that nobody waits for any more."""
        self.end(job, "cancelled", Problem(499, "cancelled", text))

    def forget(self, id_: str) -> None:
        """Remember a job that has ended no longer."""
        self._jobs.pop(id_, None)

    def close(self, problem: Problem, also_running: bool) -> None:
        """Take no more requests, and end those that wait (and those that run, if `also_running`)."""
        self.closed = problem
        for job in self.active:
            if also_running or job.state == "queued":
                self.end(job, "failed", problem)

    def ahead(self, job: ServedJob) -> int | None:
        """Return how many jobs go before a job: 0 if it runs, None if it has ended."""
        if job.ended is not None:
            return None
        return 0 if job.state == "running" else sum(other is not job for other in self._before(job))

    def estimate_s(self, job: ServedJob) -> float | None:
        """Return in how many seconds a job will have ended; None if it has."""
        return sum(map(self._rest_s, self._before(job))) if job.ended is None else None

    def _before(self, job: ServedJob) -> list[ServedJob]:
        """Return the jobs up to and with this one. The one that runs comes first for its order that is begun."""
        current = [self.current] if self.current is not None and self.current is not job else []
        waiting = [other for other in self._to_order() if other.place < job.place and other is not self.current]
        return [*current, *waiting, job]

    def _rest_s(self, job: ServedJob) -> float:
        wanted, pictures = job.wanted, job.wanted.count - job.ordered
        one, left = (
            self._speeds.estimate(wanted.order.model, steps, wanted.step_s)
            for steps in (wanted.steps, wanted.steps - job.step)
        )
        return one * max(0, pictures - 1) + (left if pictures else 0.0)

    def _retry_after(self) -> dict[str, str]:
        rest = 0.0 if self.current is None else self._rest_s(self.current)
        return {"retry-after": str(max(1, round(rest)))}

    def _to_order(self) -> list[ServedJob]:
        jobs = (job for job in self.active if job.ordered < job.wanted.count)
        return sorted(jobs, key=lambda job: job.place)

    def _look(self) -> None:
        self.some.set() if self._to_order() else self.some.clear()
        for job in self.active:
            if job.state == "queued":
                job.tell(Moved())

    def _expire(self, job: ServedJob) -> None:
        text = f"got no result within {job.wanted.deadline_s:g} s; ask with a longer deadline_s, or for fewer steps"
        self.end(job, "failed", Problem(504, "deadline", text, "deadline_s", {"x-should-retry": "false"}))

    def _forget(self) -> None:
        """Forget jobs that ended long ago, and the oldest of too many."""
        ended, now = [job for job in self._jobs.values() if job.ended is not None], time.time()
        for index, job in enumerate(ended):
            if len(ended) - index > ENDED or (job.ended or now) + self._keep_s < now:
                del self._jobs[job.id]
