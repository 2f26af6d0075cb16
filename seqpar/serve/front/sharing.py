"""Keeps the folder that fronts share in step with the jobs of this one, and does what others ask of these."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from seqpar.serve.front import log, records
from seqpar.serve.front.folder import JobFolder, JobRecord
from seqpar.serve.front.state import Front

POLL_S, SWEEP_S = 0.25, 60.0  # between looks at the folder, and between removals of what has expired


@asynccontextmanager
async def shared(front: Front) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Yield the task that shares a front's jobs, if it has a folder for it; at the end the folder has their ends."""
    if front.folder is None:
        yield []
        return
    sharing = Sharing(front, front.folder)
    task = asyncio.create_task(sharing.forever())
    try:
        yield [task]
    finally:
        task.cancel()
        await asyncio.wait([task])
        await sharing.leave()
    if not task.cancelled():
        task.result()  # raises what ended it: a bug, whose traceback ends this process


@dataclass(frozen=True)
class Sharing:
    """A front and its folder. written: what the folder has of this front's jobs, by their key and id."""

    front: Front
    folder: JobFolder
    written: dict[tuple[str, str], JobRecord] = field(default_factory=dict[tuple[str, str], JobRecord])

    async def forever(self) -> None:
        """Look again and again, as long as this task lives. A folder that fails for a while is named in the log."""
        loop = asyncio.get_running_loop()
        swept = loop.time()
        while True:
            try:
                await self.look()
                if loop.time() > swept + SWEEP_S:
                    swept = loop.time()
                    await asyncio.to_thread(self.folder.sweep, self.front.keep_s)
            except OSError as error:
                log.event("the folder of --jobs failed", level=40, error=str(error))
            await asyncio.sleep(POLL_S)

    async def look(self) -> None:
        """Do what other fronts ask for, and write what has changed."""
        await asyncio.to_thread(self.folder.beat)
        for id_, wish in await asyncio.to_thread(self.folder.marks):
            if (job := self.front.queue.find(id_)) is not None:
                await records.end(self.front, job.key, records.of(self.front, job), wish)
                await asyncio.to_thread(self.folder.unmark, id_)
        jobs = {(job.key, job.id): job for job in self.front.queue.remembered}
        for key, id_ in self.written.keys() - jobs.keys():
            await asyncio.to_thread(self.folder.forget, key, id_)
            del self.written[key, id_]
        for (key, id_), job in jobs.items():
            async with self.folder.writing:
                record = records.of(self.front, job)
                if self.written.get((key, id_)) != record:
                    await asyncio.to_thread(self.folder.keep, key, record)
                    self.written[key, id_] = record

    async def leave(self) -> None:
        """Write how the last jobs ended, and tell the others that this front has."""
        try:
            await self.look()
            await asyncio.to_thread(self.folder.leave)
        except OSError as error:
            log.event("the folder of --jobs failed", level=40, error=str(error))
