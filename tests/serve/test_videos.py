"""Videos by the real client of OpenAI: jobs that are asked for until their file is there, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from seqpar.serve.messages import ImageRequest
from tests.serve.test_edits import PIXELS, file_of
from tests.support.fake_replica import pixels_of
from tests.support.front import Running, running, until

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API")
PATH = "/v1/videos"


def ended(client: openai.OpenAI, id_: str) -> Any:
    """Return a video as soon as it has ended."""
    return until(lambda: (video := client.videos.retrieve(id_)).status in ("completed", "failed") and video)


def create(client: openai.OpenAI, prompt: str, **fields: Any) -> Any:
    """Ask for a video of the first model that makes videos."""
    named = {name: fields.pop(name) for name in ("model", "size", "seconds", "input_reference") if name in fields}
    return client.videos.create(prompt=prompt, **named, extra_body=fields)


def test_a_video_is_made_while_nobody_waits_and_is_fetched_as_a_file(front: Running) -> None:
    with front.openai() as client:
        told = create(client, "hold video", size="40x24", seconds="4", seed=5, steps=3)
        assert (told.object, told.size, told.model, told.prompt) == ("video", "40x24", "movie", "hold video")
        assert told.seconds == "4.125"  # 33 frames at 8 a second: the number nearest to 32 that the model makes
        until(lambda: client.videos.retrieve(told.id).progress == 33)
        runs: Any = client.videos.retrieve(told.id)
        assert (runs.status, runs.completed_at, runs.seqpar["position"]) == ("in_progress", None, 0)
        with pytest.raises(openai.ConflictError, match="the status of the video is in_progress, not comp"):
            client.videos.download_content(told.id)
        (front.folder / "video").touch()
        done = ended(client, told.id)
        assert (done.status, done.progress, done.error) == ("completed", 100, None)
        assert done.expires_at == done.completed_at + 3600
        assert client.videos.download_content(told.id).content == pixels_of(5, 24, 40)
        order = [each for each in front.heard if each["type"] == "request"][-1]
        assert (order["frames"], order["fps"], order["seed"], order["steps"]) == (33, None, 5, 3)
        assert client.videos.delete(told.id).deleted
        with pytest.raises(openai.NotFoundError, match="video not found or expired"):
            client.videos.retrieve(told.id)


def test_a_picture_json_and_the_frames_that_fit(front: Running) -> None:
    with front.openai() as client, front.http() as http:
        clip = ended(client, create(client, "x", model="clip", input_reference=file_of(), fps=24, seconds="2").id)
        assert (clip.status, clip.seconds, clip.size) == ("completed", f"{49 / 24:g}", "16x24")
        order = [each for each in front.heard if each["type"] == "request"][-1]
        assert (order["fps"], order["images"][0]["height"]) == (24, PIXELS.shape[0])
        for fields, frames in (
            ({}, 9),
            ({"seconds": 1}, 9),
            ({"seconds": "0.1"}, 1),
            ({"frames": 13, "user": "me"}, 13),
        ):
            answer = http.post(PATH, json={"prompt": "x", **fields})
            assert (answer.status_code, answer.json()["seqpar"]["frames"]) == (200, frames)
            assert answer.json()["id"] == answer.headers["x-request-id"]
            assert ended(client, answer.json()["id"]).status == "completed"
        assert answer.headers["x-ignored"] == "user"


def test_a_lora_goes_to_the_transformer_that_is_named_or_that_it_says_itself(front: Running) -> None:
    asked: list[Any] = [
        "high",
        [{"name": "low@transformer_2", "scale": 0.8}, {"name": "high", "transformer": "transformer"}],
        [{"name": "style", "transformer": "transformer_2"}, {"name": "style@transformer", "transformer": None}],
    ]
    expected = [
        [["high@transformer", 1.0]],
        [["low@transformer_2", 0.8], ["high@transformer", 1.0]],
        [["style@transformer_2", 1.0], ["style@transformer", 1.0]],
        [["low@transformer_2", 1.0]],
    ]
    with front.openai() as client, front.http() as http:
        for lora in asked:
            ended(client, http.post(PATH, json={"prompt": "loras of two", "lora": lora}).json()["id"])
        ended(client, create(client, "loras of two", lora="low@transformer_2").id)  # a form
        made = http.post("/v1/images/generations", json={"prompt": "x", "lora": "style@transformer", "steps": 3}).json()
    heard = [each["loras"] for each in front.heard if each.get("prompt") == "loras of two"]
    assert heard == expected
    assert made["data"]  # of a model of one transformer
    assert [each["loras"] for each in front.heard if each.get("steps") == 3][-1] == [["style", 1.0]]
    order = ImageRequest("", "movie", "x", loras=(("low@transformer_2", 0.8),))
    assert order.parameters(1, (8, 8))["lora"] == ["low:0.8@transformer_2"]  # as the command takes it


def test_lists_are_of_videos_alone_and_have_pages(front: Running) -> None:
    with front.openai() as client:
        ids = [create(client, "x").id for _ in range(3)]
        client.images.generate(prompt="a picture")
        assert [each.id for each in client.videos.list(limit=2)][:3] == ids[::-1]  # the client asks for all pages
        assert [each.id for each in client.videos.list(order="asc", after=ids[0])] == ids[1:]
        with pytest.raises(openai.NotFoundError):
            client.videos.retrieve(client.images.generate(prompt="x")._request_id or "")


def test_what_runs_is_cancelled_and_what_fails_says_why(front: Running) -> None:
    with front.openai() as client, front.http() as http:
        runs, cancelled = create(client, "wait"), create(client, "wait")
        until(lambda: client.videos.retrieve(runs.id).status == "in_progress")
        http.delete(f"/v1/jobs/{cancelled.id}")
        assert client.videos.retrieve(cancelled.id).status == "failed"
        error: Any = client.videos.retrieve(cancelled.id).error
        assert error.code == "cancelled"
        assert client.videos.delete(runs.id).deleted
        failed = ended(client, create(client, "mistake").id)
        assert (failed.status, failed.error.code) == ("failed", "mistake")
        assert "got a prompt that asks for a mistake" in failed.error.message
        late = ended(client, create(client, "wait", deadline_s=0.05).id)
        assert late.error.code == "deadline"
    assert [each["type"] for each in front.heard].count("cancel") >= 1


WRONG: list[tuple[dict[str, Any], int, str]] = [
    ({"prompt": None}, 400, "prompt is required"),
    ({"seconds": "long"}, 400, "seconds 'long' should be"),
    ({"seconds": 0}, 400, "seconds 0 should be"),
    ({"seconds": "nan"}, 400, "seconds 'nan' should be"),
    ({"seconds": 600}, 400, "seconds 600 at 8 frames per second exceed 4096 frames"),
    ({"seconds": 1, "frames": 9}, 400, "seconds and frames exclude each other"),
    ({"frames": 10}, 400, "got frames 10, expected 1 more than a multiple of 4, such as 9"),
    ({"frames": 0}, 400, "frames 0 should be"),
    ({"fps": 1001}, 400, "fps 1001 should be"),
    ({"n": 2}, 400, "unknown fields n; see"),
    ({"input_reference": "/etc/passwd"}, 400, "unknown fields input_reference; see"),
    *(
        (
            {"lora": lora},
            400,
            "unknown or repeated lora; use some of high@transformer, low@transformer_2, style@transformer,",
        )
        for lora in ("style", "high@transformer_2", [{"name": "high"}, {"name": "high@transformer"}], "high@unet")
    ),
    ({"model": "toy"}, 400, "model toy generates images; /v1/models lists"),
    ({"model": "clip"}, 400, "model clip requires a file input_reference"),
    ({"deadline_s": 4000}, 400, "got deadline_s 4000, expected at most 3600"),
]


def test_what_is_refused_before_the_ranks(front: Running) -> None:
    with front.http() as http:
        for fields, status, said in WRONG:
            answer = http.post(PATH, json={"prompt": "never", **fields})
            assert (answer.status_code, said in answer.json()["error"]["message"]) == (status, True), answer.text
        for files, said in (
            ([("input_reference", b"no picture")], "got image 1, which is none"),
            ([("input_reference", file_of())] * 2, "model clip takes one file input_reference, got 2"),
            ([("image", file_of())], "unknown files 'image'; send files as input_reference"),
        ):
            answer = http.post(PATH, data={"prompt": "never", "model": "clip"}, files=files)
            assert (answer.status_code, said in answer.json()["error"]["message"]) == (400, True), answer.text
        answer = http.post(PATH, data={"prompt": "never"}, files=[("input_reference", file_of())])
        assert "model movie takes no file input_reference" in answer.json()["error"]["message"]
        for path in ("?limit=0", "?limit=101", "?order=up"):
            assert http.get(f"{PATH}{path}").status_code == 400
        assert http.get(f"{PATH}?after=nothing").status_code == 404
        assert http.post(PATH, content=b"{", headers={"content-type": "application/json"}).status_code == 400
    with front.openai() as client, pytest.raises(openai.BadRequestError, match="generates videos; use /v1/videos"):
        client.images.generate(prompt="never", model="movie")
    assert "never" not in front.prompts


def test_videos_are_of_one_key_and_of_bounded_bytes(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ada:key-of-ada\nbob:key-of-bob\n")
    keys.chmod(0o600)
    words = "--keys", str(keys), "--keep-bytes", "2000"
    with running(tmp_path, *words) as front, front.openai("key-of-ada") as ada, front.openai("key-of-bob") as bob:
        first = ended(ada, create(ada, "x").id)
        assert list(bob.videos.list()) == []
        for ask in (bob.videos.retrieve, bob.videos.download_content, bob.videos.delete):
            with pytest.raises(openai.NotFoundError):
                ask(first.id)
        second = ended(ada, create(ada, "x").id)
        with pytest.raises(openai.NotFoundError, match="the file of the video has expired"):
            ada.videos.download_content(first.id)
        assert len(ada.videos.download_content(second.id).content) == 3 * 24 * 16
        large = ended(ada, create(ada, "x", size="40x40").id)
        assert large.error.code == "too_large"
