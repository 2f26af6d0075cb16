"""Result files and records, in a folder that every server reads (--jobs) or of one server."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.types import Message

from seqpar.serve.api.errors import ProblemError
from seqpar.serve.api.files import JobFolder, JobRecord
from tests.serve.test_videos import create, ended
from tests.support.fake_replica import pixels_of
from tests.support.front import Running, keys_in, running, until

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API")


def test_finished_jobs_are_read_by_every_server_and_running_ones_name_theirs(tmp_path: Path) -> None:
    flags = "--keys", keys_in(tmp_path), "--jobs", str(tmp_path / "jobs")
    (tmp_path / "secret.json").write_text("{}")
    with ExitStack() as stack:
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
        first, second = (
            stack.enter_context(running(tmp_path / name, *flags, "--name", name)) for name in ("first", "second")
        )
        one, other = (stack.enter_context(server.openai("key-of-ada")) for server in (first, second))
        ada, bob = (stack.enter_context(second.client(f"key-of-{name}")) for name in ("ada", "bob"))

        # a running video is known to its server alone
        video = create(one, "hold video", size="40x24", seed=5, steps=3)
        assert video.id.startswith("first-")
        with pytest.raises(openai.NotFoundError, match="until it ends, only server first has it"):
            other.videos.retrieve(video.id)
        assert list(other.videos.list()) == []
        first.release("video")
        done = ended(one, video.id)

        # a finished one to all, with its key
        until(lambda: [listed.id for listed in other.videos.list()] == [video.id])
        assert other.videos.retrieve(video.id) == done
        assert other.videos.download_content(video.id).content == pixels_of(5, 24, 40)
        data: Any = one.images.generate(prompt="x", response_format="url").data
        path = data[0].url.removeprefix(first.url)
        assert (ada.get(path).status_code, bob.get(path).status_code) == (200, 404)
        assert ada.get(path).headers["cache-control"] == "private, no-store"
        for send in (bob.get, bob.delete):
            assert send(f"/v1/videos/{video.id}").status_code == 404

        # names lead to nothing else
        (owner,) = (path for path in (tmp_path / "jobs").iterdir() if path.is_dir())
        (owner / "broken.json").write_text('{"id": 5}')
        for name in ("..%2F..%2F..%2Fsecret", "%2E%2E%2Fsecret", "broken", "a" * 200):
            assert ada.get(f"/v1/videos/{name}").status_code == 404
        assert ada.get("/v1/files/broken.json").status_code == 404
        assert second.event("a file of --jobs is no job record")["file"].endswith("broken.json")

        # after the end of its server, a finished video stays, and a running one is gone
        runs = create(one, "wait")
        until(lambda: one.videos.retrieve(runs.id).status == "in_progress")
        first.end(signal.SIGKILL)
        with pytest.raises(openai.NotFoundError):
            other.videos.retrieve(runs.id)
        assert other.videos.delete(video.id).deleted
        assert list(other.videos.list()) == []
        assert not [*tmp_path.glob("jobs/*/*.mp4")]


def test_a_clip_survives_a_rolling_restart(tmp_path: Path) -> None:
    """It is made while its server ends, and then read at the other one, and at the new one of the same name."""

    def server(name: str) -> AbstractContextManager[Running]:
        (tmp_path / name).mkdir(exist_ok=True)
        return running(tmp_path / name, "--jobs", str(tmp_path / "jobs"), "--name", name)

    with server("b") as other:
        with server("a") as old:
            video = create(old.ai, "hold end", size="40x24", seed=5, steps=3)
            until(lambda: old.ai.videos.retrieve(video.id).status == "in_progress")
            old.process.send_signal(signal.SIGTERM)
            old.event("ending")
            assert old.ai.videos.retrieve(video.id).status == "in_progress"
            old.release("end")
            assert old.wait() == 0
        with server("a") as new:
            for each in (other, new):
                assert each.ai.videos.retrieve(video.id).status == "completed"
                assert each.ai.videos.download_content(video.id).content == pixels_of(5, 24, 40)


def test_a_deleted_video_leaves_nothing_and_the_last_records_are_written(tmp_path: Path) -> None:
    with running(tmp_path, "--jobs", str(tmp_path / "jobs")) as server:
        for is_last in (False, True):
            video = create(server.ai, "wait", deadline_s=100)
            until(lambda video=video: server.ai.videos.retrieve(video.id).status == "in_progress")
            if is_last:
                server.process.send_signal(signal.SIGTERM)
            assert server.ai.videos.delete(video.id).deleted
        assert server.wait() == 0
    assert [*tmp_path.glob("jobs/*/*")] == []


def test_a_file_that_is_deleted_before_it_is_sent_is_not_found(tmp_path: Path) -> None:
    sent = list[Message]()

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return await asyncio.Future[Message]()

    async def download() -> None:
        folder = JobFolder(tmp_path, keep_s=50, keep_bytes=10)
        (name,) = await folder.keep("ada", "png", [b"1234"])
        response = await folder.get("ada", name)
        assert response is not None
        await folder.forget("ada", name)
        await response({"type": "http", "method": "GET", "headers": []}, receive, send)

    with pytest.raises(ProblemError, match="not found or expired; request it again") as error:
        asyncio.run(download())
    assert (error.value.problem.status, sent) == (404, [])


def test_expired_files_are_deleted_and_nothing_else(tmp_path: Path) -> None:
    def age(path: Path, seconds: float) -> None:
        at = time.time() - seconds
        os.utime(path, (at, at))

    async def kept() -> list[bool]:
        folder = JobFolder(tmp_path, keep_s=50, keep_bytes=10)
        first, second = await folder.keep("ada", "png", [b"1234", b"5678"])
        (owner,) = tmp_path.iterdir()
        age(owner / first, 3)
        age(owner / second, 2)
        (third,) = await JobFolder(tmp_path, 50, 10).keep("bob", "png", [b"90123"])  # of another server
        for id_ in ("old", "new"):
            folder.keep_record("ada", JobRecord(id_, 0.0, {}))
        foreign = [owner / "a file of a user", tmp_path / "notes.txt", tmp_path / "notes" / "old.json"]
        foreign[-1].parent.mkdir()
        for path in (*foreign, owner / "old.json", owner / f".{'0' * 16}", owner / second):
            path.touch()
            age(path, 60)
        assert await folder.get("ada", second) is None
        assert (folder.record("ada", "old"), [record.id for record in folder.records("ada")]) == (None, ["new"])
        folder.sweep()
        assert {path.name for path in owner.iterdir()} == {"new.json", foreign[0].name}
        assert all(path.exists() for path in foreign)
        with pytest.raises(ProblemError, match="keeps at most 10"):
            await folder.keep("ada", "png", [b"12345678901"])
        places = ("ada", first), ("ada", third), ("bob", third)
        return [await folder.get(*place) is not None for place in places]

    assert asyncio.run(kept()) == [False, False, True]
