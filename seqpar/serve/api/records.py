"""Job records for API responses: of this server's jobs, and of ended jobs of all servers that mount --jobs."""

from __future__ import annotations

import asyncio
from typing import Any

from seqpar.serve.api import log
from seqpar.serve.api.errors import ProblemError, refused
from seqpar.serve.api.files import ID, JobFolder, JobRecord
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
    """Writes the records of ended jobs into the folder, one after another, as long as its task runs."""

    def __init__(self, folder: JobFolder) -> None:
        self._folder = folder
        self._ended = asyncio.Queue[ServerJob | None]()

    def ended(self, job: ServerJob) -> None:
        """Queue the record of a job that has ended."""
        self._ended.put_nowait(job)

    def close(self) -> None:
        """End the task when all queued records are written."""
        self._ended.put_nowait(None)

    async def run(self, server: ApiServer) -> None:
        """Write records. A folder that fails for a time is logged."""
        while True:
            try:
                async with asyncio.timeout(SWEEP_S):
                    job = await self._ended.get()
            except TimeoutError:
                await self._try(server, None)
                continue
            if job is None:
                return
            if server.queue.find(job.id) is not None:  # else deleted meanwhile
                await self._try(server, job)

    async def _try(self, server: ApiServer, job: ServerJob | None) -> None:
        try:
            if job is None:
                await asyncio.to_thread(self._folder.sweep)
                return
            await asyncio.to_thread(self._folder.keep_record, job.key, of(server, job))
            if server.queue.find(job.id) is None:  # deleted while it was written
                await asyncio.to_thread(self._folder.forget_record, job.key, job.id)
        except OSError as error:
            log.event("the folder of --jobs failed", level=40, error=str(error))


def of(server: ApiServer, job: ServerJob) -> JobRecord:
    """The record of a job of this server."""
    video = None if job.spec.fps is None else _video(server, job, job.spec.fps)
    return JobRecord(job.id, job.arrived, _job(server, job), job.stored, video)


async def of_key(server: ApiServer, key: str) -> list[JobRecord]:
    """The records of a key's jobs, in order of arrival."""
    records = {job.id: of(server, job) for job in server.queue.of_key(key)}
    if server.folder is not None:
        records = {record.id: record for record in await asyncio.to_thread(server.folder.records, key)} | records
    return sorted(records.values(), key=lambda record: record.arrived)


async def get(server: ApiServer, key: str, id_: str) -> JobRecord | None:
    """The record of a key's job, or None."""
    job = server.queue.find(id_)
    if job is not None:
        return of(server, job) if job.key == key else None
    return None if server.folder is None else await asyncio.to_thread(server.folder.record, key, id_)


def not_found(server: ApiServer, kind: str, id_: str) -> ProblemError:
    """The error for an id without a record. kind: "job" or "video"."""
    text, (name, dash, _) = f"{kind} not found or expired", id_.partition("-")
    if ID.fullmatch(id_) and dash and name != server.name:
        text += f"; until it ends, only server {name} has it"
    return refused(404, f"unknown_{kind}", text)


def cancel(server: ApiServer, record: JobRecord) -> None:
    """Cancel a job, unless it has ended."""
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
    if server.folder is not None:
        await asyncio.to_thread(server.folder.forget_record, key, record.id)


def _job(server: ApiServer, job: ServerJob) -> dict[str, Any]:
    """A job as JSON. step: of the running image. Times are Unix seconds."""
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
        "expires_at": None if failed or ended is None else ended + int(server.keep_s),
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
        },
    }


def _error(job: ServerJob) -> dict[str, str] | None:
    return None if job.problem is None else {"code": job.problem.code, "message": job.problem.text}
