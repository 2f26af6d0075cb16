"""Hands one order after the other to the ranks, and what they made to the process that writes files."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace

import msgspec

from seqpar.serve.front import log
from seqpar.serve.front.errors import NO_RETRY, Problem, ProblemError, of_ranks
from seqpar.serve.front.events import PartlyMade, PictureMade, Stepped
from seqpar.serve.front.files import KeptFiles
from seqpar.serve.front.jobs import Queue, ServedJob
from seqpar.serve.front.metrics import Metrics
from seqpar.serve.front.pictures import Pictures
from seqpar.serve.front.replica import RanksEndedError, Replica
from seqpar.serve.front.speeds import Speeds
from seqpar.serve.messages import Answer, Failed, ImageRequest, ImageResult, Partial, Step, VideoResult

ATTEMPTS = 2  # at a picture whose order ended all ranks
STUCK_S = 300.0  # ranks that do not answer for so long after their order was given up are killed


@dataclass(frozen=True)
class Dispatch:
    """What takes part in making pictures."""

    queue: Queue
    replica: Replica
    pictures: Pictures
    store: KeptFiles
    speeds: Speeds
    metrics: Metrics
    stuck_s: float = STUCK_S

    async def forever(self) -> None:
        """Order pictures, one at a time, as long as this task lives."""
        async with asyncio.TaskGroup() as files:
            while True:
                await self.queue.some.wait()
                await self.replica.ready.wait()
                # nothing waits between here and the order's way to the ranks, so that they are ready
                job = self.queue.begin() if self.replica.ready.is_set() else None
                if job is not None:
                    await self._one(job, files)

    async def _one(self, job: ServedJob, files: asyncio.TaskGroup) -> None:
        """Have one picture of a job made."""
        pixels = job.wanted.pixels  # keeps the file until the ranks have answered, also if the job ends before
        order, begun = _order_of(job), time.time()
        log.event("ordered", job.id, order=order.id)
        try:
            answer = await self._answer(job, order, files)
        except RanksEndedError:
            self._ended(job)
            return
        finally:
            self.queue.current = None
            del pixels
        answer = _checked(answer)
        why = answer.why if isinstance(answer, Failed) else None
        span = job.span.part("picture", begun, time.time(), seed=order.seed, attempt=job.attempts, failed=why)
        if isinstance(answer, Failed):
            log.event("failed", job.id, why=answer.why, text=answer.text)
            end = "cancelled" if answer.why == "cancelled" else "failed"
            self.queue.end(job, end, of_ranks(answer.why, answer.text))
            return
        span.parts(begun, answer.parts_s)
        self.speeds.measured(order.model, answer.steps, answer.parts_s)
        self.metrics.made(answer)
        if job.ended is None:
            index = job.ordered
            self.queue.ordered(job)
            if isinstance(answer, VideoResult):
                files.create_task(self._keep(job, answer))
            else:
                files.create_task(self._write(job, index, order, answer))

    async def _answer(self, job: ServedJob, order: ImageRequest, files: asyncio.TaskGroup) -> Answer:
        """Return the ranks' answer to an order. If the job ends before, they are told to give the order up."""
        picture = job.ordered

        def told(message: Step | Partial) -> None:
            if isinstance(message, Partial):
                files.create_task(self._write_partial(job, picture, message))
                return
            job.step = message.index
            self.metrics.steps.inc()
            job.tell(Stepped(picture, message.index, message.count))

        answer = asyncio.create_task(self.replica.run(order, told))
        ended = asyncio.create_task(job.done.wait())
        await asyncio.wait([answer, ended], return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if not answer.done():
            self.replica.cancel(order.id)
            self.metrics.cancels.inc()
            await asyncio.wait([answer], timeout=self.stuck_s)
            if not answer.done():
                log.event("the ranks did not give an order up, and are ended", job.id, level=40, after_s=self.stuck_s)
                self.replica.give_up()
        return await answer

    def _ended(self, job: ServedJob) -> None:
        """Count an order that ended all ranks; it is tried once more."""
        job.attempts, job.step = job.attempts + 1, 0
        log.event("the ranks ended while they made a picture", job.id, level=40, attempt=job.attempts)
        if job.attempts >= ATTEMPTS:
            text = f"got an order that ended all ranks {ATTEMPTS} times, so that it is not tried again; change it"
            self.queue.end(job, "failed", Problem(500, "ranks_ended", text, headers=NO_RETRY))

    async def _keep(self, job: ServedJob, made: VideoResult) -> None:
        """Keep the file of a video, with which its job has ended well."""
        try:
            (job.stored,) = await self.store.keep(job.key, "mp4", [made.file])
        except ProblemError as error:
            self.queue.end(job, "failed", error.problem)
            return
        job.parts_s, job.size = made.parts_s, (made.height, made.width)
        order = msgspec.structs.replace(job.wanted.order, frames=made.frames)
        job.wanted = replace(job.wanted, order=order)
        self.queue.end(job, "completed")

    async def _write(self, job: ServedJob, index: int, order: ImageRequest, made: ImageResult) -> None:
        """Make the file of a picture; the job has ended well with the last one."""
        begun, asked = time.monotonic(), time.time()
        try:
            size = made.height, made.width
            file = await self.pictures.file_of(size, made.pixels, job.wanted.how, order.parameters(made.steps, size))
        except (OSError, ValueError) as error:  # a process that died, or a file that Pillow does not write
            log.event("no file was written", job.id, level=40, error=str(error))
            self.queue.end(job, "failed", Problem(500, "failure", f"got no file of the picture: {error}"))
            return
        parts_s = {**made.parts_s, "file": time.monotonic() - begun}
        job.span.part("file", asked, asked + parts_s["file"])
        self.metrics.seconds.labels("file").observe(parts_s["file"])
        job.parts_s |= {name: job.parts_s.get(name, 0.0) + seconds for name, seconds in parts_s.items()}
        job.files[index], job.size = file, size
        job.tell(PictureMade(index))
        if len(job.files) == job.wanted.count:
            self.queue.end(job, "completed")

    async def _write_partial(self, job: ServedJob, picture: int, partial: Partial) -> None:
        """Make the file of a partial picture for the job's stream, which goes on without one that cannot be written."""
        size = partial.height, partial.width
        try:
            file = await self.pictures.file_of(size, partial.pixels, job.wanted.how, {}, enlarged=partial.size)
        except (OSError, ValueError) as error:
            log.event("no file of a partial picture was written", job.id, level=40, error=str(error))
            return
        job.tell(PartlyMade(picture, partial.index, partial.size, file))


def _order_of(job: ServedJob) -> ImageRequest:
    """Return the order of a job's next picture, whose id begins with the job's."""
    first, left = job.wanted.order, job.deadline - asyncio.get_running_loop().time()
    id_ = f"{job.id}/{job.ordered}/{job.attempts}"
    return msgspec.structs.replace(first, id=id_, seed=first.seed + job.ordered, deadline_s=max(0.0, left))


def _checked(answer: Answer) -> Answer:
    """Return an answer, or a failure in place of a picture whose bytes are not of its size."""
    if not isinstance(answer, ImageResult) or len(answer.pixels) == 3 * answer.height * answer.width > 0:
        return answer
    text = f"got {len(answer.pixels)} bytes of a picture of {answer.width}x{answer.height}, which has another number"
    return Failed(answer.id, "failure", text)
