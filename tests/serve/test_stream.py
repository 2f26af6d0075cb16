"""Streams by the real client of OpenAI: which events come, in which order, with which pictures, and how they end."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import ImageGenCompletedEvent, ImageGenPartialImageEvent
from PIL import Image

from seqpar.serve.api.codec import Format
from seqpar.serve.api.images import COMMENT, events, listen
from seqpar.serve.api.jobs import JobSpec, Queue, Speeds
from seqpar.serve.messages import ImageRequest
from tests.support.fake_replica import SHRINK, partial_seed, pixels_of
from tests.support.front import Running, running, until

PATH = "/v1/images/generations"


def opened(text: str) -> Image.Image:
    """Return the picture of a base64 text."""
    return Image.open(io.BytesIO(base64.b64decode(text)))


def enlarged(seed: int, index: int, size: tuple[int, int]) -> bytes:
    """Return the pixels of a partial picture of the fake ranks in its full size, (height, width)."""
    height, width = size[0] // SHRINK, size[1] // SHRINK
    image = Image.frombytes("RGB", (width, height), pixels_of(partial_seed(seed, index), height, width))
    return image.resize((size[1], size[0]), Image.Resampling.BICUBIC).tobytes()


def told(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield the events of an answer as they come; each names its type twice."""
    kind = None
    for line in answer.iter_lines():
        name, _, text = line.partition(": ")
        if name == "event":
            kind = text
        if name == "data":
            event = json.loads(text)
            assert event["type"] == kind
            yield event


def test_the_client_of_openai_reads_partial_pictures_and_the_last_one(front: Running) -> None:
    with front.openai() as client:
        stream = client.images.generate(
            model="toy", prompt="a cat", size="40x24", stream=True, partial_images=2, extra_body={"seed": 5}
        )
        first, second, last = stream
    assert isinstance(first, ImageGenPartialImageEvent)
    assert isinstance(second, ImageGenPartialImageEvent)
    assert isinstance(last, ImageGenCompletedEvent)
    for event in (first, second, last):  # strictly what the client's own types say
        type(event).model_validate(event.model_dump(warnings="error"), strict=True)
        assert (event.size, event.output_format, event.quality, event.background) == ("40x24", "png", "auto", "opaque")
    assert [first.partial_image_index, second.partial_image_index] == [0, 1]
    assert [opened(each.b64_json).tobytes() for each in (first, second)] == [enlarged(5, i, (24, 40)) for i in (0, 1)]
    assert last.usage.total_tokens == 0
    with front.openai() as client:
        plain: Any = client.images.generate(model="toy", prompt="a cat", size="40x24", extra_body={"seed": 5})  # pyright: ignore
    assert last.b64_json == plain.data[0].b64_json  # the file's parameters, too
    assert opened(last.b64_json).tobytes() == pixels_of(5, 24, 40)


def test_steps_and_pictures_come_in_order(front: Running) -> None:
    body = {"prompt": "cats", "n": 2, "seed": 7, "steps": 2, "stream": True, "partial_images": 1, "stream_steps": True}
    with front.http() as http, http.stream("POST", PATH, json=body) as answer:
        assert answer.headers["content-type"].partition(";")[0] == "text/event-stream"
        found = list(told(answer))
        job = answer.headers["x-request-id"]
    steps = [(each["picture"], each["step"], each["steps"]) for each in found if each["type"] == "seqpar.step"]
    assert steps == [(0, 1, 2), (0, 2, 2), (1, 1, 2), (1, 2, 2)]
    pictures = [each for each in found if each["type"].startswith("image_generation")]
    kinds = [(each["type"].rpartition(".")[2], each["seqpar"]["picture"]) for each in pictures]
    assert sorted(kinds, key=lambda each: each[1]) == [
        ("partial_image", 0),
        ("completed", 0),
        ("partial_image", 1),
        ("completed", 1),
    ]
    assert [each[1] for each in kinds if each[0] == "completed"] == [0, 1]
    assert [each["seqpar"]["seed"] for each in pictures if "usage" in each] == [7, 8]
    assert pictures[-1]["seqpar"]["id"] == job
    assert pictures[-1]["seqpar"]["seconds"]["steps"] == 16.0


def test_a_stream_without_more_is_one_event(front: Running) -> None:
    with front.openai() as client:
        (event,) = client.images.generate(prompt="x", stream=True, output_format="jpeg")
    assert (event.type, event.output_format, opened(event.b64_json).format) == (
        "image_generation.completed",
        "jpeg",
        "JPEG",
    )


def test_partial_pictures_come_before_the_picture_is_made_and_the_queue_moves(tmp_path: Path) -> None:
    body = {"prompt": "hold end", "stream": True, "partial_images": 3}
    with running(tmp_path) as front, front.http() as http, http.stream("POST", PATH, json=body) as answer:
        events_of_first = told(answer)
        assert [next(events_of_first)["partial_image_index"] for _ in range(3)] == [0, 1, 2]
        waiting = {"prompt": "x", "stream": True, "stream_steps": True, "priority": "low"}
        with http.stream("POST", PATH, json=waiting) as second:
            queue = told(second)
            assert next(queue)["position"] == 1
            with ThreadPoolExecutor(1) as pool:
                urgent = pool.submit(http.post, PATH, json={"prompt": "urgent"})
                assert next(queue)["position"] == 2
                (tmp_path / "end").touch()
                assert [each["type"] for each in events_of_first] == ["image_generation.completed"]
                assert urgent.result().status_code == 200
            rest = list(queue)
        positions = [each["position"] for each in rest if each["type"] == "seqpar.queued"]
        assert positions in ([1, 0], [1], [0], [])  # one that is over before it is sent is not told
        assert rest[-1]["type"] == "image_generation.completed"


@pytest.mark.parametrize(
    ("prompt", "code", "said"), [("mistake", "mistake", "got a prompt"), ("short", "failure", "the ranks sent 5 bytes")]
)
def test_a_failure_in_a_stream_is_an_error_event(front: Running, prompt: str, code: str, said: str) -> None:
    with front.openai() as client, pytest.raises(openai.APIError, match=said) as error:
        list(client.images.generate(prompt=prompt, stream=True))
    assert (error.value.code, type(error.value)) == (code, openai.APIError)


def test_what_is_refused_before_the_queue_has_its_status(front: Running) -> None:
    with front.openai() as client, pytest.raises(openai.NotFoundError):
        client.images.generate(prompt="x", model="none", stream=True)


def test_a_cancelled_job_ends_its_stream(front: Running) -> None:
    with (
        front.http() as http,
        http.stream("POST", PATH, json={"prompt": "wait", "stream": True, "stream_steps": True}) as answer,
    ):
        found = told(answer)
        until(lambda: next(found)["type"] == "seqpar.step")
        with front.http() as other:
            other.delete(f"/v1/jobs/{answer.headers['x-request-id']}")
        *_, last = found
    assert last["type"] == "error"
    assert (set(last["error"]), last["error"]["code"]) == ({"message", "type", "param", "code"}, "cancelled")


def test_a_client_that_leaves_cancels_its_job(front: Running) -> None:
    with front.http() as http:
        with http.stream("POST", PATH, json={"prompt": "wait", "stream": True, "partial_images": 1}) as answer:
            id_ = answer.headers["x-request-id"]
            assert next(told(answer))["type"] == "image_generation.partial_image"
        until(lambda: http.get(f"/v1/jobs/{id_}").json()["state"] == "cancelled")
        assert "client disconnected" in http.get(f"/v1/jobs/{id_}").json()["error"]["message"]
        assert http.post(PATH, json={"prompt": "a cat"}).status_code == 200


def test_ranks_that_die_send_no_partial_picture_twice(tmp_path: Path) -> None:
    with running(tmp_path) as front, front.http() as http:
        body = {"prompt": "die-once first", "stream": True, "partial_images": 2, "stream_steps": True}
        with http.stream("POST", PATH, json=body) as answer:
            found = list(told(answer))
    kinds = [
        each.get("partial_image_index", each.get("step", each["type"]))
        for each in found
        if each["type"] != "seqpar.queued"
    ]
    assert front.prompts == ["die-once first"] * 2
    assert [each["partial_image_index"] for each in found if "partial_image_index" in each] == [0, 1]
    assert kinds[-1] == "image_generation.completed"
    assert [each["step"] for each in found if "step" in each] == [1, 1, 2, 3, 4]


def test_a_quiet_stream_has_comments() -> None:
    """Which the client's parser and ours pass over."""

    async def first_bytes() -> list[bytes]:
        queue = Queue(1, 1.0, Speeds(), lambda job: None)
        wanted = JobSpec(ImageRequest("", "toy", "x"), 1, Format(), "normal", 4, 0.5, 100.0)
        job = queue.add("id", "", wanted)
        stream = events(queue, job, listen(job), "image_edit", with_steps=True, quiet_s=0.001)
        found = [await anext(stream) for _ in range(3)]
        queue.cancel(job, "enough")
        return [*found, *[each async for each in stream]]

    queued, *comments, error = asyncio.run(first_bytes())
    assert queued.startswith(b'event: seqpar.queued\ndata: {"type":"seqpar.queued","position":0')
    assert set(comments) == {COMMENT}
    assert COMMENT.startswith(b":")
    assert COMMENT.endswith(b"\n\n")
    assert error.startswith(b"event: error\n")
