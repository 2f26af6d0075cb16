"""Streams by the real client of OpenAI: which events arrive, in which order, with which images, and how they end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from openai.types import ImageGenCompletedEvent, ImageGenPartialImageEvent
from PIL import Image

from seqpar.serve.api import images
from seqpar.serve.api.gate import GENERATIONS
from seqpar.serve.api.images import COMMENT, events, listen
from seqpar.serve.api.jobs import JobSpec, Queue
from seqpar.serve.api.keys import KeyTerms
from seqpar.serve.api.requests import Generation
from seqpar.serve.messages import ImageRequest
from tests.support.fake_replica import pixels_of, preview_of
from tests.support.front import Running, file_of, opened, until


def enlarged(seed: int, index: int, size: tuple[int, int]) -> bytes:
    """The pixels of a preview of the fake ranks in its full size, (height, width)."""
    height, width, pixels = preview_of(seed, index, *size)
    image = Image.frombytes("RGB", (width, height), pixels)
    return image.resize((size[1], size[0]), Image.Resampling.BICUBIC).tobytes()


def received(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of an answer as they arrive; each has its type twice."""
    kind = None
    for line in answer.iter_lines():
        name, _, text = line.partition(": ")
        if name == "event":
            kind = text
        if name == "data":
            event = json.loads(text)
            assert event["type"] == kind
            yield event


def test_the_client_of_openai_reads_previews_and_the_image(front: Running) -> None:
    fields: Any = {"model": "toy", "prompt": "a cat", "size": "40x24", "extra_body": {"seed": 5}}
    first, second, last = front.ai.images.generate(**fields, stream=True, partial_images=2)
    assert isinstance(first, ImageGenPartialImageEvent)
    assert isinstance(second, ImageGenPartialImageEvent)
    assert isinstance(last, ImageGenCompletedEvent)
    for event in (first, second, last):  # strictly what the client's own types say
        type(event).model_validate(event.model_dump(warnings="error"), strict=True)
        assert (event.size, event.output_format, event.quality, event.background) == ("40x24", "png", "auto", "opaque")
    assert [first.partial_image_index, second.partial_image_index] == [0, 1]
    assert [opened(x.b64_json).tobytes() for x in (first, second)] == [enlarged(5, i, (24, 40)) for i in (0, 1)]
    assert last.usage.total_tokens == 0
    assert last.b64_json == front.ai.images.generate(**fields).data[0].b64_json  # the file's parameters, too
    assert opened(last.b64_json).tobytes() == pixels_of(5, 24, 40)
    # without more fields a stream is one event; edits have their own names
    (event,) = front.ai.images.generate(prompt="x", stream=True, output_format="jpeg")
    assert (event.type, event.output_format) == ("image_generation.completed", "jpeg")
    assert opened(event.b64_json).format == "JPEG"
    edited = front.ai.images.edit(image=file_of(), prompt="x", model="editor", stream=True, partial_images=1)
    assert [event.type for event in edited] == ["image_edit.partial_image", "image_edit.completed"]


def test_a_stream_reports_the_queue_and_every_step(front: Running) -> None:
    body = {"prompt": "cats", "n": 2, "seed": 7, "steps": 2, "stream": True, "partial_images": 1, "stream_steps": True}
    with front.http.stream("POST", GENERATIONS, json=body) as answer:
        assert answer.headers["content-type"].partition(";")[0] == "text/event-stream"
        all_events = list(received(answer))
    steps = [(event["picture"], event["step"], event["steps"]) for event in all_events if "step" in event]
    assert steps == [(0, 1, 2), (0, 2, 2), (1, 1, 2), (1, 2, 2)]
    images = [event for event in all_events if event["type"].startswith("image_generation")]
    kinds = [(event["seqpar"]["picture"], event["type"].rpartition(".")[2]) for event in images]
    assert sorted(kinds, key=lambda kind: kind[0]) == [
        (image, kind) for image in (0, 1) for kind in ("partial_image", "completed")
    ]
    assert [event["seqpar"]["seed"] for event in images if "usage" in event] == [7, 8]
    assert images[-1]["seqpar"]["id"] == answer.headers["x-request-id"]
    assert images[-1]["seqpar"]["seconds"]["steps"] == 16.0
    assert images[-1]["seqpar"]["steps_computed"] == [2, 4]


def test_previews_arrive_before_the_image_is_made_and_the_queue_moves(front: Running) -> None:
    body = {"prompt": "hold previews", "stream": True, "partial_images": 3}
    with front.http.stream("POST", GENERATIONS, json=body) as answer, ThreadPoolExecutor(1) as pool:
        events_of_first = received(answer)
        assert [next(events_of_first)["partial_image_index"] for _ in range(3)] == [0, 1, 2]
        waiting = {"prompt": "x", "stream": True, "stream_steps": True, "priority": "low"}
        with front.http.stream("POST", GENERATIONS, json=waiting) as second:
            queue = received(second)
            assert next(queue)["position"] == 1
            urgent = pool.submit(front.http.post, GENERATIONS, json={"prompt": "urgent"})
            assert next(queue)["position"] == 2
            front.release("previews")
            assert [event["type"] for event in events_of_first] == ["image_generation.completed"]
            assert urgent.result().status_code == 200
            rest = list(queue)
    positions = [event["position"] for event in rest if event["type"] == "seqpar.queued"]
    assert positions in ([1, 0], [1], [0], [])  # a position that has changed before it is sent is skipped
    assert rest[-1]["type"] == "image_generation.completed"


def test_failed_and_cancelled_jobs_end_their_streams_with_an_error(front: Running) -> None:
    for prompt, code, said in (("mistake", "mistake", "got a prompt"), ("short", "failure", "the ranks sent 5 bytes")):
        with pytest.raises(openai.APIError, match=said) as error:
            list(front.ai.images.generate(prompt=prompt, stream=True))
        assert (error.value.code, type(error.value)) == (code, openai.APIError)
    body = {"prompt": "wait", "stream": True, "stream_steps": True}
    with front.http.stream("POST", GENERATIONS, json=body) as answer:
        arriving = received(answer)
        until(lambda: next(arriving)["type"] == "seqpar.step")
        front.http.delete(f"/v1/jobs/{answer.headers['x-request-id']}")
        *_, last = arriving
    assert (last["type"], last["error"]["code"]) == ("error", "cancelled")
    assert set(last["error"]) == {"message", "type", "param", "code"}


def test_a_client_that_disconnects_cancels_its_job(front: Running) -> None:
    body = {"prompt": "wait", "stream": True, "partial_images": 1}
    with front.http.stream("POST", GENERATIONS, json=body) as answer:
        job = f"/v1/jobs/{answer.headers['x-request-id']}"
        assert next(received(answer))["type"] == "image_generation.partial_image"
    until(lambda: front.http.get(job).json()["state"] == "cancelled")
    assert "client disconnected" in front.http.get(job).json()["error"]["message"]
    assert front.http.post(GENERATIONS, json={"prompt": "a cat"}).status_code == 200


def test_a_quiet_stream_has_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsers skip them."""
    monkeypatch.setattr(images, "QUIET_S", 0.001)

    async def first_bytes() -> list[bytes]:
        queue = Queue(1, 1.0, lambda job: None, lambda key: KeyTerms())
        spec = JobSpec(ImageRequest("", "toy", "x"), "normal", 4, 0.5, 100.0)
        job = queue.add("id", "", spec)
        stream = events(queue, job, listen(job), "image_edit", Generation(prompt="x", stream=True, stream_steps=True))
        parts = [await anext(stream) for _ in range(3)]
        queue.cancel(job, "enough")
        return [*parts, *[part async for part in stream]]

    queued, *comments, error = asyncio.run(first_bytes())
    assert queued.startswith(b'event: seqpar.queued\ndata: {"type":"seqpar.queued","position":0')
    assert set(comments) == {COMMENT}
    assert COMMENT.startswith(b":")
    assert COMMENT.endswith(b"\n\n")
    assert error.startswith(b"event: error\n")
