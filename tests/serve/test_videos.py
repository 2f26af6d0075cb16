"""Videos by the real client of OpenAI: jobs that are polled until their file exists."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import openai
import pytest

from seqpar.serve.api.gate import GENERATIONS, VIDEOS
from seqpar.serve.messages import ImageRequest
from tests.support.fake_replica import pixels_of
from tests.support.front import PIXELS, Running, file_of, until

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API")


def ended(client: openai.OpenAI, id_: str) -> Any:
    """A video, as soon as it has ended."""
    return until(lambda: (video := client.videos.retrieve(id_)).status in ("completed", "failed") and video)


def create(client: openai.OpenAI, prompt: str, **fields: Any) -> Any:
    """Request a video of the first model that generates videos."""
    typed = {name: fields.pop(name) for name in ("model", "size", "seconds", "input_reference") if name in fields}
    return client.videos.create(prompt=prompt, **typed, extra_body=fields)


def test_a_video_is_made_without_a_waiting_client_and_fetched_as_a_file(front: Running) -> None:
    videos = front.ai.videos
    begun = create(front.ai, "hold video", size="40x24", seconds="4", seed=5, steps=3)
    assert (begun.object, begun.size, begun.model, begun.prompt) == ("video", "40x24", "movie", "hold video")
    assert begun.seconds == "4.125"  # 33 frames at 8 per second: the number nearest to 32 that the model makes
    until(lambda: videos.retrieve(begun.id).progress == 33)
    runs: Any = videos.retrieve(begun.id)
    assert (runs.status, runs.completed_at, runs.seqpar["position"]) == ("in_progress", None, 0)
    with pytest.raises(openai.ConflictError, match="the status of the video is in_progress, not comp"):
        videos.download_content(begun.id)
    front.release("video")
    done = ended(front.ai, begun.id)
    assert (done.status, done.progress, done.error) == ("completed", 100, None)
    assert (done.seqpar["step"], done.seqpar["steps"]) == (3, 3)
    assert done.expires_at == done.completed_at + 3600
    assert videos.download_content(begun.id).content == pixels_of(5, 24, 40)
    order = front.orders[-1]
    assert (order["frames"], order["fps"], order["seed"], order["steps"]) == (33, None, 5, 3)
    assert videos.delete(begun.id).deleted
    with pytest.raises(openai.NotFoundError, match="video not found or expired"):
        videos.retrieve(begun.id)


def test_an_input_image_json_and_the_frames_that_fit(front: Running) -> None:
    clip = ended(front.ai, create(front.ai, "x", model="clip", input_reference=file_of(), fps=24, seconds="2").id)
    assert (clip.status, clip.seconds, clip.size) == ("completed", f"{49 / 24:g}", "16x24")
    order = front.orders[-1]
    assert (order["fps"], order["images"][0]["height"]) == (24, PIXELS.shape[0])
    url = f"data:image/png;base64,{b64encode(file_of()).decode()}"
    for field, file in (("image", url), ("input_reference", url), ("input_reference", {"image_url": url})):
        answer = front.http.post(VIDEOS, json={"prompt": "x", "model": "clip", field: file})
        assert ended(front.ai, answer.json()["id"]).status == "completed"
        assert front.orders[-1]["images"] == order["images"]
    sent = front.http.post(VIDEOS, data={"prompt": "x", "model": "clip"}, files={"image": file_of()})
    assert ended(front.ai, sent.json()["id"]).status == "completed"
    assert front.orders[-1]["images"] == order["images"]
    cases: list[tuple[dict[str, Any], int]] = [({"seconds": "0.1"}, 1), ({"frames": 13, "user": "me"}, 13), ({}, 9)]
    for fields, frames in cases:
        answer = front.http.post(VIDEOS, json={"prompt": "x", **fields})
        assert (answer.status_code, answer.json()["seqpar"]["frames"]) == (200, frames)
        assert answer.json()["id"] == answer.headers["x-request-id"]
        assert answer.headers.get("x-ignored") == ("user" if "user" in fields else None)
        video: Any = ended(front.ai, answer.json()["id"])
        assert (video.status, video.seqpar["steps_computed"][0]) == ("completed", 3)


def test_a_lora_goes_to_the_transformer_that_it_fits(front: Running) -> None:
    """Or to the one of several that the request names."""
    high, low = ["high@transformer", 1.0], ["low@transformer_2", 0.8]
    cases: list[tuple[Any, list[list[Any]]]] = [
        ("high", [high]),
        ([{"name": "low@transformer_2", "scale": 0.8}, {"name": "high", "transformer": "transformer"}], [low, high]),
        (
            [{"name": "style", "transformer": "transformer_2"}, {"name": "style@transformer", "transformer": None}],
            [["style@transformer_2", 1.0], ["style@transformer", 1.0]],
        ),
    ]
    for lora, sent in cases:
        ended(front.ai, front.http.post(VIDEOS, json={"prompt": "x", "lora": lora}).json()["id"])
        assert front.orders[-1]["loras"] == sent
    ended(front.ai, create(front.ai, "x", lora="low@transformer_2").id)  # a form
    assert front.orders[-1]["loras"] == [["low@transformer_2", 1.0]]
    made = front.http.post(GENERATIONS, json={"prompt": "x", "lora": "style@transformer"}).json()
    assert made["data"]  # of a model with one transformer
    assert front.orders[-1]["loras"] == [["style", 1.0]]
    order = ImageRequest("", "movie", "x", loras=(("low@transformer_2", 0.8),))
    assert order.parameters(1, (8, 8))["lora"] == ["low:0.8@transformer_2"]  # as the command takes it


def test_lists_are_of_videos_alone_and_have_pages(front: Running) -> None:
    ids = [create(front.ai, "x").id for _ in range(3)]
    image = front.ai.images.generate(prompt="an image")
    assert [video.id for video in front.ai.videos.list(limit=2)][:3] == ids[::-1]  # the client fetches all pages
    assert [video.id for video in front.ai.videos.list(order="asc", after=ids[0])] == ids[1:]
    with pytest.raises(openai.NotFoundError):
        front.ai.videos.retrieve(image._request_id or "")


def test_running_videos_are_cancelled_and_failed_ones_say_why(front: Running) -> None:
    videos = front.ai.videos
    runs, cancelled = create(front.ai, "wait"), create(front.ai, "wait")
    until(lambda: videos.retrieve(runs.id).status == "in_progress")
    front.http.delete(f"/v1/jobs/{cancelled.id}")
    error: Any = videos.retrieve(cancelled.id)
    assert (error.status, error.error.code) == ("failed", "cancelled")
    assert videos.delete(runs.id).deleted
    failed = ended(front.ai, create(front.ai, "mistake").id)
    assert (failed.status, failed.error.code) == ("failed", "mistake")
    assert "got a prompt that asks for a mistake" in failed.error.message
    late = ended(front.ai, create(front.ai, "wait", deadline_s=0.05).id)
    assert late.error.code == "deadline"
    assert any(x["type"] == "cancel" and x["id"].startswith(runs.id) for x in front.heard)
