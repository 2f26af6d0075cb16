"""Job records for API responses: of this server's jobs, and of ended jobs of all servers that mount --jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

from seqpar.serve.api import log
from seqpar.serve.api.errors import refused
from seqpar.serve.api.files import ID, JobRecord
from seqpar.serve.api.jobs import ServerJob, State
from seqpar.serve.api.state import ApiServer

SWEEP_S = 60.0  # between deletions of what has expired
STATUS: dict[State, str] = {
    "queued": "queued",
    "running": "in_progress",
    "completed": "completed",
    "failed": "failed",
    "cancelled": "failed",
}


class RecordWriter:
    """Writes the records of ended jobs into the folder, and deletes expired files, as long as its task runs."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server
        self._ended = asyncio.Queue[ServerJob | None]()

    def ended(self, job: ServerJob) -> None:
        self._ended.put_nowait(job)

    def close(self) -> None:
        """End the task when all queued records are written."""
        self._ended.put_nowait(None)

    async def run(self) -> None:
        """Write and delete. A folder that fails for a time is logged."""
        while True:
            try:
                async with asyncio.timeout(SWEEP_S):
                    job = await self._ended.get()
                if job is None:
                    return
                if self._server.queue.find(job.id) is not None:  # else deleted meanwhile
                    await self._write(job)
            except TimeoutError:
                await self._logged(self._server.files.sweep)

    async def _write(self, job: ServerJob) -> None:
        files = self._server.files
        await self._logged(files.keep_record, job.key, of(self._server, job))
        if self._server.queue.find(job.id) is None:  # deleted while it was written
            await self._logged(files.forget_record, job.key, job.id)

    async def _logged(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            await asyncio.to_thread(work, *arguments)
        except OSError as error:
            log.event("the folder of results failed", level=40, error=str(error))


def of(server: ApiServer, job: ServerJob) -> JobRecord:
    video = None if job.spec.fps is None else _video(server, job, job.spec.fps)
    return JobRecord(job.id, job.arrived, _job(server, job), job.stored, video)


async def of_key(server: ApiServer, key: str) -> list[JobRecord]:
    """The records of a key's jobs, in order of arrival."""
    records = {job.id: of(server, job) for job in server.queue.of_key(key)}
    if server.keeps_records:
        records = {record.id: record for record in await asyncio.to_thread(server.files.records, key)} | records
    return sorted(records.values(), key=lambda record: record.arrived)


async def get(server: ApiServer, key: str, id_: str, kind: Literal["job", "video"] = "job") -> JobRecord:
    """The record of a key's job; ProblemError if there is none, or it is no video's."""
    job = server.queue.find(id_)
    if job is not None:
        record = of(server, job) if job.key == key else None
    else:
        record = await asyncio.to_thread(server.files.record, key, id_) if server.keeps_records else None
    if record is not None and (kind == "job" or record.video is not None):
        return record
    text, (name, dash, _) = f"{kind} not found or expired", id_.partition("-")
    if ID.fullmatch(id_) and dash and name != server.name:
        text += f"; until it ends, only server {name} has it"
    raise refused(404, f"unknown_{kind}", text)


def cancel(server: ApiServer, record: JobRecord) -> None:
    if (job := server.queue.find(record.id)) is not None:
        server.queue.cancel(job, f"the {'job' if record.video is None else 'video'} was cancelled by DELETE")


async def delete(server: ApiServer, key: str, record: JobRecord) -> None:
    """Cancel a job, and delete its record and file."""
    job = server.queue.find(record.id)
    cancel(server, record)
    server.queue.forget(record.id)
    stored = record.stored if job is None else job.stored
    if stored is not None:
        await server.files.forget(key, stored)
    await asyncio.to_thread(server.files.forget_record, key, record.id)


def _job(server: ApiServer, job: ServerJob) -> dict[str, Any]:
    """A job as JSON. step: of the running image, or of the last one. Times are Unix seconds."""
    return {
        "id": job.id,
        "object": "job",
        "state": job.state,
        "model": job.spec.request.model,
        "priority": job.spec.priority,
        "pictures": job.done_count,
        "of_pictures": job.spec.count,
        "position": server.queue.ahead(job),
        "step": job.step,
        "steps": job.spec.steps,
        **job.computed,
        "estimated_s": server.queue.estimate_s(job),
        "arrived": job.arrived,
        "started": job.started,
        "ended": job.ended,
        "error": _error(job),
    }


def _video(server: ApiServer, job: ServerJob, fps: float) -> dict[str, Any]:
    """A video as OpenAI's object, with our fields in `seqpar`. Times are Unix seconds."""
    request, spec = job.spec.request, job.spec
    size, frames = job.size or request.size, request.frames or 0
    ended = None if job.ended is None else int(job.ended)
    failed = job.problem is not None
    return {
        "id": job.id,
        "object": "video",
        "status": STATUS[job.state],
        "progress": 100 if job.state == "completed" else min(99, 100 * job.step // max(1, spec.steps)),
        "created_at": int(job.arrived),
        "completed_at": None if failed else ended,
        "expires_at": None if failed or ended is None else ended + int(server.args.keep_s),
        "model": request.model,
        "prompt": request.prompt,
        "seconds": f"{frames / fps:g}",
        "size": "auto" if size is None else f"{size[1]}x{size[0]}",
        "error": _error(job),
        "remixed_from_video_id": None,
        "seqpar": {
            "frames": frames,
            "fps": fps,
            "seed": request.seed,
            "step": job.step,
            "steps": spec.steps,
            "position": server.queue.ahead(job),
            "estimated_s": server.queue.estimate_s(job),
            "seconds": job.parts_s,
            **job.computed,
        },
    }


def _error(job: ServerJob) -> dict[str, str] | None:
    return None if job.problem is None else {"code": job.problem.code, "message": job.problem.text}
