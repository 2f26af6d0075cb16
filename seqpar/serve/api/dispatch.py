"""Runs one request after another on the ranks, and encodes results while the next one runs."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace

import msgspec

from seqpar.serve.api import log
from seqpar.serve.api.admin import change, not_loaded
from seqpar.serve.api.codec import encoded
from seqpar.serve.api.errors import NO_RETRY, Problem, ProblemError, of_ranks, refused
from seqpar.serve.api.jobs import ImageMade, PreviewMade, ServerJob, Stepped
from seqpar.serve.api.replica import RanksEndedError
from seqpar.serve.api.state import ApiServer
from seqpar.serve.messages import Answer, Change, Failed, ImageRequest, ImageResult, Partial, Step, VideoResult
from seqpar.serve.rules import fills

ATTEMPTS = 2  # at an image whose request ended all ranks


@dataclass(frozen=True)
class Dispatch:
    """The loop between the queue and the ranks."""

    server: ApiServer

    async def forever(self) -> None:
        """Run requests, one at a time, until this task is cancelled."""
        async with asyncio.TaskGroup() as files:
            while True:
                await self.server.queue.some.wait()
                await self.server.replica.ready.wait()
                async with self.server.replica.turn:
                    # nothing waits between here and the request's way to the ranks, so that they are ready
                    job = self.server.queue.begin() if self.server.replica.ready.is_set() else None
                    if job is not None:
                        await self._run(job, files)

    async def _run(self, job: ServerJob, files: asyncio.TaskGroup) -> None:
        pixels = job.spec.pixels  # keeps the file until the ranks have answered, also if the job ends before
        left_s = max(0.0, job.deadline - asyncio.get_running_loop().time())
        first, id_ = job.spec.request, f"{job.id}/{job.done_count}/{job.attempts}"
        request = msgspec.structs.replace(first, id=id_, seed=first.seed + job.done_count, deadline_s=left_s)
        begun, begun_s = time.time(), time.monotonic()
        log.event("sent to ranks", job.id, attempt=request.id)
        try:
            await self._swap(job, request)
            if job.ended is not None:
                return
            answer = await self._answer(job, request, files)
        except ProblemError as error:
            self.server.queue.end(job, "failed", error.problem)
            return
        except RanksEndedError:
            self._ranks_ended(job)
            return
        finally:
            self.server.queue.ran(job, time.monotonic() - begun_s)
            del pixels
        no_image = isinstance(answer, ImageResult) and len(answer.pixels) != 3 * answer.height * answer.width
        if isinstance(answer, ImageResult) and not answer.file and (no_image or not answer.pixels):
            text = f"the ranks sent {len(answer.pixels)} bytes for an image of {answer.width}x{answer.height}"
            answer = Failed(answer.id, "failure", text)
        why = answer.why if isinstance(answer, Failed) else None
        span = job.span.part("picture", begun, time.time(), seed=request.seed, attempt=job.attempts, failed=why)
        if isinstance(answer, Failed):
            log.event("failed", job.id, why=answer.why, text=answer.text)
            state = "cancelled" if answer.why == "cancelled" else "failed"
            self.server.queue.end(job, state, of_ranks(answer.why, answer.text))
            return
        span.parts(begun, answer.parts_s)
        self.server.queue.speeds.measured(job.spec, answer.steps, answer.parts_s)
        self.server.metrics.observe(request.model, answer)
        if job.ended is None:
            index = job.done_count
            self.server.queue.image_done(job)
            if isinstance(answer, VideoResult):
                files.create_task(self._keep_video(job, answer))
            else:
                files.create_task(self._encode(job, index, request, answer))

    async def _swap(self, job: ServerJob, request: ImageRequest) -> None:
        """Load the model of a job if it is not loaded, and unload others whose memory it needs; the job waits.

        ProblemError if it is not loaded then.
        """
        begun = time.monotonic()
        while (model := self.server.replica.model(request.model)) is not None:
            others = [other.name for other in self.server.facts.models if other.loaded and other.name != model.name]
            leave = others if fills(model, request) else []  # known anew when it is loaded beside them
            if model.loaded and not leave:
                return
            if not self.server.args.swap:  # it was loaded when the job came
                raise not_loaded(self.server, model)
            failed = await change(self.server, Change(request.id, (model.name,), tuple(leave)))
            if failed is not None:
                text = (
                    f"model {model.name} did not load; use another one, or ask the operator, whose log has the reason"
                )
                raise refused(503, "model_not_loaded", text, x_should_retry="false")
            job.parts_s["swap"] = time.monotonic() - begun

    async def _answer(self, job: ServerJob, request: ImageRequest, files: asyncio.TaskGroup) -> Answer:
        """The ranks' answer to a request. If the job ends before, the request is cancelled on the ranks."""
        image = job.done_count

        def on_message(message: Step | Partial) -> None:
            if isinstance(message, Partial):
                files.create_task(self._encode_preview(job, image, message))
                return
            job.step = message.index
            self.server.metrics.steps.labels(request.model).inc()
            job.notify(Stepped(image, message.index, message.count))

        answer = asyncio.create_task(self.server.replica.run(request, on_message))
        ended = asyncio.create_task(job.done.wait())
        await asyncio.wait([answer, ended], return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if not answer.done():
            self.server.replica.cancel(request.id)
            self.server.metrics.cancels.labels(request.model).inc()
            await asyncio.wait([answer], timeout=self.server.args.stuck_s)
            if not answer.done():
                log.event("cancel timed out, terminating ranks", job.id, level=40, after_s=self.server.args.stuck_s)
                self.server.replica.terminate()
        return await answer

    def _ranks_ended(self, job: ServerJob) -> None:
        """Count a request that ended all ranks; it is retried once."""
        job.attempts, job.step = job.attempts + 1, 0
        log.event("ranks ended during a request", job.id, level=40, attempt=job.attempts)
        if job.attempts >= ATTEMPTS:
            text = f"the request ended all ranks {ATTEMPTS} times and is not retried; change it"
            self.server.queue.end(job, "failed", Problem(500, "ranks_ended", text, headers=NO_RETRY))

    async def _keep_video(self, job: ServerJob, result: VideoResult) -> None:
        try:
            kind = "mp4" if job.spec.request.returns == "file" else "safetensors"
            (name,) = await self.server.files.keep(job.key, kind, [result.file])
        except ProblemError as error:
            self.server.queue.end(job, "failed", error.problem)
            return
        if job.ended is not None:  # cancelled meanwhile
            await self.server.files.forget(job.key, name)
            return
        job.stored, job.parts_s, job.size = name, job.parts_s | result.parts_s, (result.height, result.width)
        job.count(result.computed)
        request = msgspec.structs.replace(job.spec.request, frames=result.frames)
        job.spec = replace(job.spec, request=request)
        self.server.queue.end(job, "completed")

    async def _encode(self, job: ServerJob, index: int, request: ImageRequest, result: ImageResult) -> None:
        begun, wall = time.monotonic(), time.time()
        size = result.height, result.width
        try:
            parameters = request.parameters(result.steps, size, result.computed)
            encoder = self.server.codec.encoder
            file = result.file or await encoder.run(encoded, size, result.pixels, job.spec.how, parameters)
        except (OSError, ValueError) as error:  # a process that died, or an image that Pillow does not write
            log.event("image not encoded", job.id, level=40, error=str(error))
            self.server.queue.end(job, "failed", Problem(500, "failure", f"the image cannot be encoded: {error}"))
            return
        parts_s = {**result.parts_s, "file": time.monotonic() - begun}
        job.span.part("file", wall, wall + parts_s["file"])
        self.server.metrics.seconds.labels(request.model, "file").observe(parts_s["file"])
        job.parts_s |= {name: job.parts_s.get(name, 0.0) + seconds for name, seconds in parts_s.items()}
        job.count(result.computed)
        job.files[index], job.size = file, size
        job.notify(ImageMade(index))
        if len(job.files) == job.spec.count:
            self.server.queue.end(job, "completed")

    async def _encode_preview(self, job: ServerJob, image: int, preview: Partial) -> None:
        """Make the file of a preview for the job's stream, which goes on without it on errors."""
        size = preview.height, preview.width
        try:
            file = await self.server.codec.encoder.run(encoded, size, preview.pixels, job.spec.how, {}, preview.size)
        except (OSError, ValueError) as error:
            log.event("preview not encoded", job.id, level=40, error=str(error))
            return
        job.notify(PreviewMade(image, preview.index, preview.size, file))
