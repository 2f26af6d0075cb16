"""Images and edits by the real client of OpenAI: pixels, sizes, seeds, formats, links and input images."""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from safetensors import deserialize

from seqpar.pipelines.image_files import digest
from seqpar.serve.api import codec, jobs
from seqpar.serve.api.accept import MOST_WAITING, decode_inputs
from seqpar.serve.api.codec import Codec, Format, InputFiles, PixelFile, encoded, pixels_in
from seqpar.serve.api.errors import ProblemError
from seqpar.serve.api.gate import EDITS, GENERATIONS
from seqpar.serve.api.jobs import JobSpec, Queue
from seqpar.serve.api.keys import KeyTerms
from seqpar.serve.messages import ImageRequest, InputImage
from tests.support.fake_replica import FACTS, pixels_of
from tests.support.front import LIMIT_S, PIXELS, Running, file_of, opened, running, until


def test_sizes_are_width_by_height_and_pixels_are_of_the_seed(front: Running) -> None:
    made: Any = front.ai.images.generate(model="toy", prompt="a cat", size="40x24", extra_body={"seed": 5, "steps": 3})  # pyright: ignore
    image = opened(made.data[0].b64_json)
    assert (image.format, image.size, made.size, made.output_format) == ("PNG", (40, 24), "40x24", "png")
    assert image.tobytes() == pixels_of(5, 24, 40) != pixels_of(6, 24, 40)
    parameters = {"model": "toy", "prompt": "a cat", "seed": 5, "size": [24, 40], "steps": 3}
    assert json.loads(image.info["seqpar"]) == parameters
    assert (made.usage.total_tokens, made.seqpar["seconds"]["steps"]) == (0, 8.0)
    # images of one request have consecutive seeds; a random one is reported
    cats: Any = front.ai.images.generate(model="toy", prompt="cats", n=3, extra_body={"seed": 7})
    data: Any = cats.data
    assert cats.seqpar["steps_computed"] == [3, 12]
    assert json.loads(opened(data[0].b64_json).info["seqpar"])["steps_computed"] == [1, 4]
    assert front.http.get(f"/v1/jobs/{cats.seqpar['id']}").json()["steps_computed"] == [3, 12]
    data += front.ai.images.generate(prompt="a dog").data
    assert [image.seed for image in data[:3]] == [7, 8, 9]
    assert [opened(image.b64_json).tobytes() for image in data] == [pixels_of(image.seed, 24, 16) for image in data]


def test_loras_go_to_the_ranks_with_their_scales_and_into_files_as_a_command_names_them(front: Running) -> None:
    cases: list[tuple[Any, Any, Any]] = [
        ("style", [["style", 1.0]], ["style:1"]),
        ([{"name": "lines", "scale": 0.5}], [["lines", 0.5]], ["lines:0.5"]),
        ([{"name": "lines"}, {"name": "style"}], [["lines", 1.0], ["style", 1.0]], ["lines:1", "style:1"]),
        (None, [], None),
    ]
    for lora, sent, written in cases:
        made: Any = front.ai.images.generate(prompt="with loras", extra_body={"lora": lora})
        assert json.loads(opened(made.data[0].b64_json).info["seqpar"]).get("lora") == written
        assert front.orders[-1]["loras"] == sent


def test_formats(front: Running) -> None:
    for kind in ("jpeg", "webp"):
        made: Any = front.ai.images.generate(model="toy", prompt="x", output_format=kind, output_compression=50)
        assert (opened(made.data[0].b64_json).format, made.output_format) == (kind.upper(), kind)
    made = front.ai.images.generate(model="toy", prompt="x", extra_body={"seed": 7, "output_format": "safetensors"})
    ((name, array),) = deserialize(base64.b64decode(made.data[0].b64_json))
    assert (name, array["dtype"], array["shape"]) == ("image", "U8", [24, 16, 3])
    assert array["data"] == pixels_of(7, 24, 16)
    pixels = pixels_of(1, 64, 64)
    small, large = (len(encoded((64, 64), pixels, Format("jpeg", quality), {})) for quality in (10, 95))
    assert small < large


def test_links_lead_to_files_until_they_expire(front: Running, tmp_path: Path) -> None:
    data: Any = front.ai.images.generate(model="toy", prompt="x", n=2, response_format="url").data
    for image in data:
        answer = front.http.get(image.url)
        assert answer.headers["content-type"] == "image/png"
        assert opened(answer.content).tobytes() == pixels_of(image.seed, 24, 16)
    assert front.http.get("/v1/files/nothing.png").status_code == 404
    assert front.http.get(data[0].url, headers={"range": "bytes=1-3"}).content == b"PNG"
    for asked, status in (("bytes=9999999-", 416), ("pages=1", 400), ("bytes=5-2", 400)):
        answer = front.http.get(data[0].url, headers={"range": asked})
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, "range")
        assert ("content-range" in answer.headers) == (status == 416)
    with running(tmp_path, "--keep-s", "0", "--keep-bytes", "1000") as other:
        data = other.ai.images.generate(prompt="x", response_format="url").data
        assert other.http.get(data[0].url).status_code == 404
        with pytest.raises(openai.BadRequestError, match="request b64_json"):
            other.ai.images.generate(prompt="x", size="900x900", response_format="url")  # pyright: ignore


def test_models_documentation_and_metrics(front: Running) -> None:
    assert [model.id for model in front.ai.models.list()] == [*FACTS]
    models = front.http.get("/v1/models").json()["data"]
    edits = [model["id"] for model in models if model["seqpar"]["edits"]]
    assert edits == ["editor", "changer", "clip", "strict", "filler"]
    about = front.http.get("/openapi.json").json()["components"]["schemas"]["Generation"]["properties"]
    assert "ignored" in about["quality"]["description"]
    assert front.http.get("/health").json() == {"status": "ok"}
    ready = front.http.get("/ready").json()
    assert (ready["ranks"], ready["precision"], models[0]["seqpar"]["precision"]) == (2, "fp8", "fp8")
    answer = front.http.post(GENERATIONS, json={"prompt": "x", "quality": "hd", "user": "me", "seed": None})
    assert (answer.status_code, answer.headers["x-ignored"]) == (200, "user, quality")
    numbers = front.http.get("/metrics").text
    for line in ('jobs_total{end="completed",model="toy"}', "queue_length 0.0", 'memory_bytes{rank="1"} 2000.0'):
        assert f"seqpar_{line}" in numbers


# edits ---------------------------------------------------------------------------------------------------------------


def test_an_input_image_reaches_the_ranks_as_pixels(front: Running) -> None:
    fields: dict[str, Any] = {"seed": 3, "strength": 0.5, "guidance": 2.5, "steps": 2}
    made: Any = front.ai.images.edit(
        image=io.BytesIO(file_of()),
        prompt="in red",
        model="editor",
        size="32x24",
        n=2,
        extra_body=fields,  # pyright: ignore
    )
    images = [opened(image.b64_json) for image in made.data]
    assert [np.array_equal(np.asarray(image), PIXELS) for image in images] == [True] * 2
    order = front.orders[-1]
    assert {**order, **fields, "seed": 4, "prompt": "in red", "size": [24, 32]} == order
    stored = json.loads(images[0].info["seqpar"])
    assert stored["images"] == [{"size": "6x10", "pixels": digest(PIXELS.tobytes())}]


def test_what_is_transparent_in_a_mask_is_white_for_the_ranks(front: Running, tmp_path: Path) -> None:
    mask = np.full((6, 10, 4), 255, np.uint8)
    mask[1:3, 4:, 3], mask[5, :, 3] = 0, 100
    made: Any = front.ai.images.edit(image=file_of(), mask=file_of(mask), prompt="x", model="editor")
    image, order = opened(made.data[0].b64_json), front.orders[-1]
    white = 255 - mask[:, :, 3]
    assert np.array_equal(np.asarray(image), PIXELS)
    assert order["mask"] == {"height": 6, "width": 10, "digest": digest(white.tobytes()), "channels": 1}
    assert json.loads(image.info["seqpar"])["mask"] == {"size": "6x10", "pixels": digest(white.tobytes())}
    images = codec.written([file_of(), file_of(mask)], tmp_path / "pixels", ("mask",))
    assert isinstance(images, tuple)
    assert (tmp_path / "pixels").read_bytes() == PIXELS.tobytes() + white.tobytes()
    assert [image.nbytes for image in images] == [180, 60]


def test_a_controlnet_is_named_with_its_image_and_scale(front: Running) -> None:
    fields = {"prompt": "x", "model": "editor", "controlnet": "pose", "control_scale": 0.5}
    url = f"data:image/png;base64,{base64.b64encode(file_of()).decode()}"
    made = front.http.post(GENERATIONS, json={**fields, "control_image": url})
    form = front.http.post(EDITS, data={**fields, "control_scale": "0.5"}, files={"control_image": file_of()})
    assert (made.status_code, form.status_code) == (200, 200)
    for order in front.orders[-2:]:
        assert (order["controlnet"], order["control_scale"], order["images"]) == ("pose", 0.5, [])
        assert order["control"] == {"height": 6, "width": 10, "digest": digest(PIXELS.tobytes()), "channels": 3}
    assert json.loads(opened(form.json()["data"][0]["b64_json"]).info["seqpar"])["controlnet"] == "pose"


def test_several_formats_and_the_first_model_that_edits(front: Running) -> None:
    files = [("a.png", file_of()), ("b.webp", file_of(PIXELS[:4], "webp")), ("../c.jpg", file_of(PIXELS[:5], "jpeg"))]
    made: Any = front.ai.images.edit(image=files, prompt="x", output_format="webp", quality="high")
    image = opened(made.data[0].b64_json)
    assert (image.size, image.format) == ((10, 5), "WEBP")
    order = front.orders[-1]
    assert (order["model"], [image["height"] for image in order["images"]]) == ("editor", [6, 4, 5])


def test_pixels_are_bounded_together_by_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MOST_PIXELS", 130)
    assert pixels_in([file_of()] * 2) == 120
    with pytest.raises(ValueError, match="more than 130 pixels together"):
        pixels_in([file_of()[:60]] * 3)  # headers without pixels
    assert pixels_in([file_of(), b"no image", *[file_of()] * 3]) == 60  # `written` refuses the second one


def test_at_most_two_requests_are_decoded_at_once_and_no_refused_one(tmp_path: Path) -> None:
    now, most, decoded = 0, 0, list[Sequence[bytes]]()

    async def run(work: Any, files: Sequence[bytes], *path: Path) -> Any:
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        await asyncio.sleep(0.01)
        now -= 1
        decoded.extend([files] if path else [])
        return work(files, *path)

    def check(count: int) -> None:
        if not count:
            raise MemoryError

    async def read() -> list[InputFiles | BaseException]:
        reader = Codec(tmp_path)
        reader._decoders.run = run  # pyright: ignore
        try:
            return await asyncio.gather(*(reader.decode(x, check) for x in requests), return_exceptions=True)
        finally:
            reader.close()

    requests = [[file_of()], [b""], [file_of(PIXELS[:4]), file_of()], [file_of()]]
    first, second, third, fourth = asyncio.run(read())
    assert (most, [b""] in decoded, type(second)) == (2, False, MemoryError)
    assert isinstance(first, InputFiles)
    assert isinstance(third, InputFiles)
    assert Path(third.path or "").read_bytes() == PIXELS[:4].tobytes() + PIXELS.tobytes()
    assert [image.nbytes for image in third.images] == [120, 180]
    assert len([*tmp_path.iterdir()]) == 3
    del first, second, third, fourth
    gc.collect()
    assert [*tmp_path.iterdir()] == []


def test_uploads_that_wait_to_be_decoded_are_bounded(tmp_path: Path) -> None:
    """The seventeenth of 16 gets 429 while the decoders are busy, and none is refused afterwards."""

    async def uploaded() -> int:
        reader, free = Codec(tmp_path), asyncio.Event()
        run = reader._decoders.run  # pyright: ignore

        async def busy(*arguments: Any) -> Any:
            await free.wait()
            return await run(*arguments)

        reader._decoders.run = busy  # pyright: ignore
        server: Any = SimpleNamespace(codec=reader, queue=Queue(99, 9.0, lambda job: None, lambda key: KeyTerms()))
        try:
            waiting = [
                asyncio.create_task(decode_inputs(server, "", [file_of()], "image")) for _ in range(MOST_WAITING)
            ]
            await asyncio.sleep(0)
            with pytest.raises(ProblemError, match="16 requests with images wait") as refused:
                await decode_inputs(server, "", [file_of()], "image")
            problem = refused.value.problem
            assert (problem.status, problem.code, problem.headers) == (429, "queue_full", {"retry-after": "1"})
            free.set()
            decoded = [*await asyncio.gather(*waiting), await decode_inputs(server, "", [file_of()], "image")]
            assert all(inputs.images for inputs in decoded)
            return reader.waiting
        finally:
            reader.close()

    assert asyncio.run(uploaded()) == 0


def test_large_images_neither_hold_up_a_server_nor_fill_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four requests with 50 MB of pixels in 50 KB each, at once; memory is of the server's process alone."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    large = file_of(np.full((4096, 4096, 3), 7, np.uint8))
    with running(tmp_path) as front, ThreadPoolExecutor(4) as pool:

        def peak() -> int:
            status = Path(f"/proc/{front.process.pid}/status").read_text()
            return 1024 * int(status.split("VmHWM:")[1].split()[0])

        def edited(number: int) -> int:
            fields = {"prompt": "drawn", "model": "editor", "size": "16x16"}
            return httpx.post(f"{front.url}{EDITS}", data=fields, files={"image": large}, timeout=LIMIT_S).status_code

        before, told = peak(), 0
        answers = [pool.submit(edited, number) for number in range(4)]
        while not all(answer.done() for answer in answers):
            assert front.http.get("/health").status_code == 200
            told += 1
            time.sleep(0.01)
        assert [answer.result() for answer in answers] == [200] * 4
        assert told > 40  # 10 by a server that decodes itself, on any machine
        assert peak() - before < 40_000_000
        until(lambda: not [*tmp_path.glob("seqpar-*/pixels-*")])


def test_jobs_hold_so_many_pixels_together_and_lose_them_at_their_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "MOST_HELD", 20)
    order = ImageRequest("", "editor", "x", images=(InputImage(1, 4, "d"),))

    def spec() -> JobSpec:
        pixels = PixelFile(tmp_path)
        pixels.path.touch()
        return JobSpec(order, "normal", 1, 0.1, 9.0, pixels)

    async def added() -> JobSpec:
        queue = Queue(9, 9.0, lambda job: None, lambda key: KeyTerms())
        first = queue.add("1", "", spec())
        with pytest.raises(ProblemError, match="need 12 bytes of pixels while jobs hold 12 of 20, yours 12"):
            queue.add("2", "", spec())
        queue.end(first, "completed")
        queue.end(queue.add("3", "", spec()), "completed")
        return first.spec

    ended = asyncio.run(added())
    gc.collect()
    assert (ended.nbytes, ended.request.images[0].digest, [*tmp_path.iterdir()]) == (0, "d", [])
