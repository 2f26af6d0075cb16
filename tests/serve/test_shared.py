"""Two fronts on one folder (--jobs): each answers for the jobs of both, also when one is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from seqpar.serve.front.files import FolderStore
from seqpar.serve.front.folder import LOST_S, JobFolder, JobRecord
from tests.serve.test_videos import create, ended
from tests.support.fake_replica import pixels_of
from tests.support.front import Running, running, until

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API")
KEYS = "ada:key-of-ada\nbob:key-of-bob\n"


@contextmanager
def fronts(folder: Path, *words: str) -> Iterator[tuple[Running, Running, openai.OpenAI, openai.OpenAI]]:
    """Yield two fronts with the same keys and the same folder, and a client of each with the same key."""
    keys = folder / "keys"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    with ExitStack() as stack:
        flags = "--keys", str(keys), "--jobs", str(folder / "jobs"), *words
        (folder / "a").mkdir()
        (folder / "b").mkdir()
        both = [stack.enter_context(running(folder / name, *flags)) for name in ("a", "b")]
        one, other = (stack.enter_context(front.openai("key-of-ada")) for front in both)
        yield both[0], both[1], one, other


def test_each_front_answers_for_the_videos_of_both(tmp_path: Path) -> None:
    with fronts(tmp_path) as (first, second, one, other), second.openai("key-of-bob") as bob:
        video = create(one, "hold video", size="40x24", seed=5, steps=3)
        assert other.videos.retrieve(video.id).prompt == video.prompt
        until(lambda: other.videos.retrieve(video.id).progress == 33)
        with pytest.raises(openai.ConflictError, match="got a video that is in_progress"):
            other.videos.download_content(video.id)
        mine = create(other, "x")
        assert [each.id for each in one.videos.list()] == [mine.id, video.id]
        (first.folder / "video").touch()
        done = ended(other, video.id)
        assert done == one.videos.retrieve(video.id)
        assert other.videos.download_content(video.id).content == pixels_of(5, 24, 40)
        for ask in (bob.videos.retrieve, bob.videos.download_content, bob.videos.delete):
            with pytest.raises(openai.NotFoundError):
                ask(video.id)
        assert other.videos.delete(video.id).deleted
        for client in (other, one):
            until(lambda client=client: [each.id for each in client.videos.list()] == [mine.id])
        assert len([*tmp_path.glob("jobs/owners/*/*.mp4")]) == 1
        assert second.end() == 0
        assert ended(one, mine.id).status == "completed"


def test_what_runs_at_one_front_is_ended_by_the_other(tmp_path: Path) -> None:
    with fronts(tmp_path) as (first, second, one, other), second.http("key-of-ada") as http:
        video = create(one, "wait")
        until(lambda: other.videos.retrieve(video.id).status == "in_progress")
        assert other.videos.delete(video.id).deleted
        with pytest.raises(openai.NotFoundError):
            other.videos.retrieve(video.id)
        until(lambda: first.heard[-1]["type"] == "cancel")
        with ThreadPoolExecutor(1) as pool:
            pictures = pool.submit(one.images.generate, prompt="wait")
            (job,) = until(lambda: [each for each in http.get("/v1/jobs").json()["data"] if each["step"]])
            assert http.delete(f"/v1/jobs/{job['id']}").status_code == 200
            with pytest.raises(openai.APIStatusError, match="ended by DELETE"):
                pictures.result()
        assert until(lambda: http.get(f"/v1/jobs/{job['id']}").json()["state"] == "cancelled")
        assert ended(other, create(one, "x").id).status == "completed"
        assert until(lambda: not [*tmp_path.glob("jobs/marks/*")])


def test_jobs_of_a_front_that_was_killed_have_failed_and_its_files_are_there(tmp_path: Path) -> None:
    with fronts(tmp_path) as (first, _, one, other):
        made = ended(other, create(one, "x", seed=3).id)
        runs = create(one, "wait")
        until(lambda: other.videos.retrieve(runs.id).status == "in_progress")
        first.end(signal.SIGKILL)
        assert other.videos.retrieve(runs.id).status == "in_progress"
        for beat in (tmp_path / "jobs" / "fronts").iterdir():  # that of the other front is touched again
            os.utime(beat, (0, 0))
        lost: Any = ended(other, runs.id)
        assert (lost.status, lost.error.code) == ("failed", "server_ended")
        assert "ended without it" in lost.error.message
        assert other.videos.download_content(made.id).content == pixels_of(3, 24, 16)
        assert other.videos.delete(runs.id).deleted
        assert [each.id for each in other.videos.list()] == [made.id]


def test_links_lead_to_pictures_at_each_front_and_names_to_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("{}")
    with (
        fronts(tmp_path) as (first, second, one, _),
        second.http("key-of-ada") as ada,
        second.http("key-of-bob") as bob,
    ):
        data: Any = one.images.generate(prompt="x", response_format="url").data
        path = data[0].url.removeprefix(first.url)
        assert (ada.get(path).status_code, bob.get(path).status_code) == (200, 404)
        assert ada.get(path).headers["cache-control"] == "private, no-store"
        (owner,) = (tmp_path / "jobs" / "owners").iterdir()
        (owner / "broken.json").write_text('{"id": 5}')
        for name in ("..%2F..%2F..%2Fsecret", "%2E%2E%2Fsecret", "broken", "a" * 200):
            assert ada.get(f"/v1/videos/{name}").status_code == 404
        assert ada.get("/v1/files/broken.json").status_code == 404
        assert second.event("a file of --jobs tells of no job")["file"].endswith("broken.json")


def aged(path: Path, seconds: float, beat: Path) -> None:
    """Make a file so many seconds older than a front's last beat."""
    at = beat.stat().st_mtime - seconds
    os.utime(path, (at, at))


def test_what_has_expired_is_dropped_and_nothing_else(tmp_path: Path) -> None:
    folder, other = JobFolder(tmp_path), JobFolder(tmp_path)
    folder.open()
    other.open()
    beat, owner = tmp_path / "fronts" / folder.front, folder.of_key("ada")
    records = {"old": (True, other.front), "runs": (False, other.front), "lost": (False, "gone"), "new": (True, "gone")}
    for id_, (has_ended, front) in records.items():
        folder.keep("ada", JobRecord(id_, front, 0.0, {}, has_ended))
    foreign = [owner / "a file of a user", tmp_path / "notes.txt", tmp_path / "owners" / "notes.txt"]
    for path in (*foreign, owner / f"{'n' * 32}.mp4"):
        path.touch()
    for path in (*foreign, *(path for path in owner.iterdir() if path.stem != "new")):
        aged(path, 100, beat)
    aged(tmp_path / "fronts" / other.front, LOST_S - 5, beat)
    folder.sweep(50)
    assert {path.name for path in owner.iterdir()} == {"new.json", "runs.json", foreign[0].name}
    assert all(path.exists() for path in foreign)
    aged(tmp_path / "fronts" / other.front, LOST_S + 5, beat)
    folder.sweep(50)
    assert {path.stem for path in owner.glob("*.json")} == {"new"}


def test_files_of_a_folder_are_bounded_together(tmp_path: Path) -> None:
    async def kept() -> list[bool]:
        folders = JobFolder(tmp_path), JobFolder(tmp_path)
        stores = [FolderStore(folder, 10, 10) for folder in folders if folder.open() is None]
        first, second = await stores[0].keep("a", "png", [b"1234", b"5678"])
        beat = tmp_path / "fronts" / folders[1].front
        aged(folders[0].of_key("a") / first, 2, beat)
        aged(folders[0].of_key("a") / second, 1, beat)
        (third,) = await stores[1].keep("b", "png", [b"90123"])
        aged(folders[0].of_key("b") / third, 11, beat)
        asked = [("a", first), ("a", second), ("b", second), ("b", third)]
        return [await stores[1].get(*each) is not None for each in asked]

    assert asyncio.run(kept()) == [False, True, False, False]
