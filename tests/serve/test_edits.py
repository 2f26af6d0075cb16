"""Edits by the real client of OpenAI: the pictures that arrive at the ranks, and what is refused before."""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import json
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from seqpar.pipelines.image_files import digest
from seqpar.serve.api import codec, jobs
from seqpar.serve.api.codec import Codec, Format, InputFiles, PixelFile, pixels_in
from seqpar.serve.api.errors import ProblemError
from seqpar.serve.api.images import MOST_WAITING, decode_inputs
from seqpar.serve.api.jobs import JobSpec, Queue, Speeds
from seqpar.serve.messages import ImageRequest, InputImage
from tests.support.front import LIMIT_S, Running, running, until

PATH = "/v1/images/edits"
PIXELS = np.random.default_rng(0).integers(0, 256, (6, 10, 3), np.uint8)


def file_of(pixels: np.ndarray = PIXELS, kind: str = "png") -> bytes:
    """Return a picture as a file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def opened(text: str) -> Image.Image:
    """Return the picture of a base64 text."""
    return Image.open(io.BytesIO(base64.b64decode(text)))


def last_order(front: Running) -> dict[str, Any]:
    """Return the last order that the ranks have heard."""
    return [each for each in front.heard if each["type"] == "request"][-1]


def test_a_picture_reaches_the_ranks_as_pixels(front: Running) -> None:
    fields: dict[str, Any] = {"seed": 3, "strength": 0.5, "guidance": 2.5, "steps": 2}
    with front.openai() as client:
        made: Any = client.images.edit(
            image=io.BytesIO(file_of()), prompt="in red", model="editor", size="32x24", n=2, extra_body=fields
        )
    results = [opened(each.b64_json) for each in made.data]
    assert [np.array_equal(np.asarray(each), PIXELS) for each in results] == [True] * 2
    order = last_order(front)
    assert {name: order[name] for name in ("prompt", "seed", "size", "strength", "guidance", "steps")} == {
        "prompt": "in red",
        "seed": 4,
        "size": [24, 32],
        "strength": 0.5,
        "guidance": 2.5,
        "steps": 2,
    }
    told = json.loads(results[0].info["seqpar"])
    assert told["images"] == [{"size": "6x10", "pixels": digest(PIXELS.tobytes())}]


def test_several_pictures_formats_and_the_first_model_that_edits(front: Running) -> None:
    files = [("a.png", file_of()), ("b.webp", file_of(PIXELS[:4], "webp")), ("../c.jpg", file_of(PIXELS[:5], "jpeg"))]
    with front.openai() as client:
        made: Any = client.images.edit(image=files, prompt="x", output_format="webp", quality="high")
    assert (opened(made.data[0].b64_json).size, opened(made.data[0].b64_json).format) == ((10, 5), "WEBP")
    order = last_order(front)
    assert (order["model"], [each["height"] for each in order["images"]]) == ("editor", [6, 4, 5])


def test_an_edit_is_streamed_by_its_own_events(front: Running) -> None:
    with front.openai() as client:
        events = client.images.edit(image=file_of(), prompt="x", model="editor", stream=True, partial_images=1)
        assert [event.type for event in events] == ["image_edit.partial_image", "image_edit.completed"]


def bomb() -> bytes:
    """Return a small PNG that says that it has 100 million pixels."""

    def part(kind: bytes, content: bytes) -> bytes:
        return len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")

    side = (10_000).to_bytes(4, "big")
    header = part(b"IHDR", side + side + bytes([8, 2, 0, 0, 0]))
    return b"\x89PNG\r\n\x1a\n" + header + part(b"IDAT", zlib.compress(bytes(1000))) + part(b"IEND", b"")


GOOD: dict[str, Any] = {"data": {"prompt": "never"}, "files": [("image", file_of())]}
WRONG: list[tuple[dict[str, Any], int, str]] = [
    ({"files": [("mask", file_of())]}, 400, "mask is not supported"),
    ({"files": [("image", b"no picture")]}, 400, "got image 1, which is none, expected a picture as PNG, JPEG or"),
    ({"files": [("image", file_of(kind="gif"))]}, 400, "got image 1, which is none"),
    ({"files": [("image", file_of()), ("image", file_of()[:-30])]}, 400, "got image 2, which is broken"),
    ({"files": [("image", bomb())]}, 400, "got image 1 of 10000x10000 pixels (height x width), expected at most"),
    ({"files": [("image", b"")]}, 400, "got image 1, which is none"),
    ({"files": [("images", file_of())]}, 400, "unknown files 'images'; send files as image or image[]"),
    ({"files": [("image", file_of())] * 18}, 400, "the request cannot be read"),
    ({"data": {"prompt": "x", "image": "/etc/passwd"}}, 400, "unknown fields image; see /openapi"),
    ({"data": {"prompt": ["x", "y"]}}, 400, "'prompt' is given twice; send it once"),
    ({"data": {}}, 400, "prompt is required"),
    ({"data": {"prompt": "x", "n": "two"}}, 400, "n 'two' should be"),
    ({"data": {"prompt": "x", "strength": "0"}}, 400, "strength '0' should be"),
    ({"data": {"prompt": "x", "strength": "nan"}}, 400, "strength 'nan' should be"),
    ({"data": {"prompt": "x", "model": "toy"}}, 400, "model toy takes no images; /v1/models lists"),
    ({"data": {"prompt": "x", "model": "movie"}}, 400, "model movie generates videos; use /v1/videos"),
    ({"data": {"prompt": "x", "model": "none"}}, 404, "model not found"),
]


@pytest.mark.parametrize(("changed", "status", "said"), WRONG, ids=[said[:40] for *_, said in WRONG])
def test_what_is_refused_before_the_ranks(front: Running, changed: dict[str, Any], status: int, said: str) -> None:
    before = len(front.heard)
    with front.http() as http:
        answer = http.post(PATH, **{**GOOD, **changed})
    assert (answer.status_code, said in answer.json()["error"]["message"]) == (status, True), answer.text
    assert "\n" not in answer.json()["error"]["message"]
    assert len(front.heard) == before


def test_bodies_and_models_that_do_not_fit(front: Running) -> None:
    with front.http() as http:
        kind = {"content-type": "multipart/form-data; boundary=x"}
        long: httpx.Response = http.post(PATH, content=bytes(50_000_001), headers=kind)
        assert (long.status_code, long.json()["error"]["code"]) == (413, "too_large")
        for content in (b"", b"--x", b"--x\r\n\r\n\r\n--x--"):
            assert http.post(PATH, content=content, headers=kind).status_code == 400
        assert http.post(PATH, **GOOD, headers={"content-type": "application/json"}).status_code == 415
        answer = http.post(PATH, data={"prompt": "x"})
        assert answer.status_code == 415  # no file, so that it is no form of several parts
        models = {each["id"]: each["seqpar"] for each in http.get("/v1/models").json()["data"]}
        assert [models[name]["edits"] for name in ("toy", "editor", "changer")] == [False, True, True]
    with front.openai() as client, pytest.raises(openai.BadRequestError, match="requires an image; use"):
        client.images.generate(prompt="x", model="changer")


def test_pixels_are_bounded_together_by_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MOST_PIXELS", 130)
    assert pixels_in([file_of()] * 2) == 120
    with pytest.raises(ValueError, match="more than 130 pixels together"):
        pixels_in([file_of()[:60]] * 3)  # headers without pixels
    assert pixels_in([file_of(), b"no picture", *[file_of()] * 3]) == 60  # `written` tells of the second one


def test_at_most_two_requests_are_decoded_at_once_and_none_that_is_refused(tmp_path: Path) -> None:
    now, most, refused = 0, 0, list[Path]()

    async def run(work: Any, files: Sequence[bytes], *more: Path) -> Any:
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        await asyncio.sleep(0.01)
        now -= 1
        refused.extend(more if files == [b""] else ())
        return work(files, *more)

    def check(count: int) -> None:
        if not count:
            raise MemoryError

    async def read() -> list[InputFiles | BaseException]:
        reader = Codec(tmp_path)
        reader._decoders.run = run  # pyright: ignore
        try:
            files = [[file_of()], [b""], [file_of(PIXELS[:4]), file_of()], [file_of()]]
            return await asyncio.gather(*(reader.decode(each, check) for each in files), return_exceptions=True)
        finally:
            reader.close()

    first, second, third, fourth = asyncio.run(read())
    assert (most, refused, type(second)) == (2, [], MemoryError)
    assert isinstance(first, InputFiles)
    assert isinstance(third, InputFiles)
    assert Path(third.path or "").read_bytes() == PIXELS[:4].tobytes() + PIXELS.tobytes()
    assert [each.nbytes for each in third.images] == [120, 180]
    assert len([*tmp_path.iterdir()]) == 3
    del first, second, third, fourth
    gc.collect()
    assert [*tmp_path.iterdir()] == []


def test_uploads_that_wait_to_be_decoded_are_bounded(tmp_path: Path) -> None:
    """The seventeenth of 16 gets 429 while the decoders are busy, and none is refused afterwards."""

    async def uploaded(folder: Path) -> tuple[int, ProblemError, int]:
        codec, free = Codec(folder), asyncio.Event()
        run = codec._decoders.run  # pyright: ignore

        async def busy(*arguments: Any) -> Any:
            await free.wait()
            return await run(*arguments)

        codec._decoders.run = busy  # pyright: ignore
        server: Any = SimpleNamespace(codec=codec, queue=Queue(99, 9.0, Speeds(), lambda job: None))
        try:
            waiting = [asyncio.create_task(decode_inputs(server, [file_of()], "image")) for _ in range(MOST_WAITING)]
            await asyncio.sleep(0)
            with pytest.raises(ProblemError, match="16 requests with images wait") as refused:
                await decode_inputs(server, [file_of()], "image")
            free.set()
            decoded = [inputs for inputs in await asyncio.gather(*waiting) if inputs.images]
            await decode_inputs(server, [file_of()], "image")
            return len(decoded), refused.value, codec.waiting
        finally:
            codec.close()

    decoded, refused, waiting = asyncio.run(uploaded(tmp_path))
    assert (decoded, waiting) == (MOST_WAITING, 0)
    assert (refused.problem.status, refused.problem.code, refused.problem.headers) == (
        429,
        "queue_full",
        {"retry-after": "1"},
    )


def test_large_pictures_neither_hold_up_a_server_nor_fill_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six of 50 MB of pixels and 50 KB each, at once. The front's own memory is that of its process."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    large = file_of(np.full((4096, 4096, 3), 7, np.uint8))
    with running(tmp_path) as front, ThreadPoolExecutor(6) as pool, front.http() as http:

        def peak() -> int:
            status = Path(f"/proc/{front.process.pid}/status").read_text()
            return 1024 * int(status.split("VmHWM:")[1].split()[0])

        def edited(number: int) -> int:
            fields = {"prompt": "drawn", "model": "editor", "size": "16x16"}
            return httpx.post(f"{front.url}{PATH}", data=fields, files={"image": large}, timeout=LIMIT_S).status_code

        before, longest = peak(), 0.0
        answers = pool.map(edited, range(6))
        waiting = [pool.submit(list, answers)]
        while not waiting[0].done():
            begun = time.monotonic()
            assert http.get("/health").status_code == 200
            longest = max(longest, time.monotonic() - begun)
            time.sleep(0.01)
        assert waiting[0].result() == [200] * 6
        assert peak() - before < 40_000_000
        assert longest < 1.0
        until(lambda: not [*tmp_path.glob("seqpar-*/pixels-*")])


def test_jobs_hold_so_many_pixels_together_and_lose_them_at_their_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "MOST_HELD", 20)
    order = ImageRequest("", "editor", "x", images=(InputImage(1, 4, "d"),))

    def wanted() -> JobSpec:
        pixels = PixelFile(tmp_path)
        pixels.path.touch()
        return JobSpec(order, 1, Format(), "normal", 1, 0.1, 9.0, pixels=pixels)

    async def added() -> JobSpec:
        queue = Queue(9, 9.0, Speeds(), lambda job: None)
        first = queue.add("1", "", wanted())
        with pytest.raises(ProblemError, match="need 12 bytes of pixels while other jobs hold 12 of 20"):
            queue.add("2", "", wanted())
        queue.end(first, "completed")
        queue.end(queue.add("3", "", wanted()), "completed")
        return first.spec

    ended = asyncio.run(added())
    gc.collect()
    assert (ended.nbytes, ended.request.images[0].digest, [*tmp_path.iterdir()]) == (0, "d", [])
