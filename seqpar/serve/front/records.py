"""What answers tell of jobs: of those of this front, and of those of others that share its folder (--jobs)."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from seqpar.serve.front import schema
from seqpar.serve.front.errors import Problem, ProblemError
from seqpar.serve.front.folder import JobFolder, JobRecord, Wish
from seqpar.serve.front.jobs import ServedJob, State
from seqpar.serve.front.state import Front

LOST = {"code": "server_ended", "message": "the server that had the job has ended without it; ask again"}
STATUS: dict[State, str] = {
    "queued": "queued",
    "running": "in_progress",
    "completed": "completed",
    "failed": "failed",
    "cancelled": "failed",
}


def of(front: Front, job: ServedJob) -> JobRecord:
    """Return what is known of a job of this front."""
    name = "" if front.folder is None else front.folder.front
    video = None if job.wanted.fps is None else _video(front, job, job.wanted.fps)
    told = schema.of_job(job, front.queue)
    return JobRecord(job.id, name, job.arrived, told, job.ended is not None, job.stored, video)


async def of_key(front: Front, key: str) -> list[JobRecord]:
    """Return what is known of the jobs of a key, in order of arrival."""
    records = [of(front, job) for job in front.queue.of_key(key)]
    if front.folder is not None:
        records += await asyncio.to_thread(_others, front.folder, key)
        records.sort(key=lambda record: record.arrived)
    return records


async def get(front: Front, key: str, id_: str) -> JobRecord | None:
    """Return what is known of a job of a key, or None if the key has none of that id."""
    job = front.queue.find(id_)
    if job is not None:
        return of(front, job) if job.key == key else None
    return None if front.folder is None else await asyncio.to_thread(_other, front.folder, key, id_)


async def announce(front: Front, job: ServedJob) -> None:
    """Let other fronts know of a job before its client does; ProblemError, and no job, if that cannot be."""
    if front.folder is None:
        return
    try:
        async with front.folder.writing:
            await asyncio.to_thread(front.folder.keep, job.key, of(front, job))
    except OSError as error:
        front.queue.cancel(job, "the job could not be written into --jobs")
        text = f"got a job that was not written into --jobs: {error.strerror}; tell who runs the server"
        raise ProblemError(Problem(500, "failure", text)) from error


async def end(front: Front, key: str, record: JobRecord, wish: Wish) -> None:
    """Cancel a job, which another front may have; for "delete" also forget it and its file."""
    job, folder = front.queue.find(record.id), front.folder
    if job is not None:
        front.queue.cancel(job, f"the {'job' if record.video is None else 'video'} was ended by DELETE")
        record = of(front, job)
    elif folder is not None and await asyncio.to_thread(folder.lives, record.front):
        await asyncio.to_thread(folder.mark, record.id, wish)
        return
    if wish == "delete":
        await _forget(front, key, record)


async def _forget(front: Front, key: str, record: JobRecord) -> None:
    front.queue.forget(record.id)
    if record.stored is not None:
        await front.files.forget(key, record.stored)
    if front.folder is not None:
        await asyncio.to_thread(front.folder.forget, key, record.id)


def _others(folder: JobFolder, key: str) -> list[JobRecord]:
    """Return what is known of the jobs of other fronts."""
    return [_seen(folder, record) for record in folder.records(key) if record.front != folder.front]


def _other(folder: JobFolder, key: str, id_: str) -> JobRecord | None:
    record = folder.get(key, id_)
    return None if record is None or record.front == folder.front else _seen(folder, record)


def _seen(folder: JobFolder, record: JobRecord) -> JobRecord:
    """Return what is known of a job of another front, which has failed if that front has ended without it."""
    if record.ended or folder.lives(record.front):
        return record
    job = {**record.job, "state": "failed", "position": None, "estimated_s": None, "error": LOST}
    video = None if record.video is None else {**record.video, "status": "failed", "error": LOST}
    return msgspec.structs.replace(record, ended=True, job=job, video=video)


def _video(front: Front, job: ServedJob, fps: float) -> dict[str, Any]:
    """Return a video as OpenAI's object, with what is known of it here. Times are Unix seconds."""
    order, wanted = job.wanted.order, job.wanted
    size, frames = job.size or order.size, order.frames or 0
    ended = None if job.ended is None else int(job.ended)
    failed = job.problem is not None
    return {
        "id": job.id,
        "object": "video",
        "status": STATUS[job.state],
        "progress": 100 if job.state == "completed" else min(99, 100 * job.step // max(1, wanted.steps)),
        "created_at": int(job.arrived),
        "completed_at": None if failed else ended,
        "expires_at": None if failed or ended is None else ended + int(front.keep_s),
        "model": order.model,
        "prompt": order.prompt,
        "seconds": f"{frames / fps:g}",
        "size": "auto" if size is None else f"{size[1]}x{size[0]}",
        "error": None if job.problem is None else {"code": job.problem.code, "message": job.problem.text},
        "remixed_from_video_id": None,
        "seqpar": {"frames": frames, "fps": fps, **_ours(front, job)},
    }


def _ours(front: Front, job: ServedJob) -> dict[str, Any]:
    waits = {"position": front.queue.ahead(job), "estimated_s": front.queue.estimate_s(job)}
    return {"seed": job.wanted.order.seed, "step": job.step, "steps": job.wanted.steps, **waits, "seconds": job.parts_s}
