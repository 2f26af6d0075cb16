"""Pictures by the real client of OpenAI: the right pixels, sizes and seeds, in each format, inside and as links."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image

from seqpar.serve.api.codec import Format, encoded
from seqpar.serve.api.errors import ProblemError
from seqpar.serve.api.files import MemoryStore
from seqpar.serve.api.jobs import Speeds
from tests.support.fake_replica import pixels_of
from tests.support.front import Running, running


def opened(text: str | None) -> Image.Image:
    """Return the picture of a base64 text."""
    return Image.open(io.BytesIO(base64.b64decode(text or "")))


def test_sizes_are_width_by_height_and_pixels_are_of_the_seed(front: Running) -> None:
    with front.openai() as client:
        made = client.images.generate(model="toy", prompt="a cat", size="40x24", extra_body={"seed": 5, "steps": 3})  # pyright: ignore
    picture = opened(made.data[0].b64_json)  # pyright: ignore
    assert (picture.format, picture.size, made.size, made.output_format) == ("PNG", (40, 24), "40x24", "png")
    assert picture.tobytes() == pixels_of(5, 24, 40) != pixels_of(6, 24, 40)
    parameters = {"model": "toy", "prompt": "a cat", "seed": 5, "size": [24, 40], "steps": 3}
    assert json.loads(picture.info["seqpar"]) == parameters
    assert made.usage is not None
    assert made.usage.total_tokens == 0
    about: Any = made.model_extra
    assert about["seqpar"]["seconds"]["steps"] == 8.0


def test_pictures_of_one_request_have_seeds_in_a_row(front: Running) -> None:
    with front.openai() as client:
        made = client.images.generate(model="toy", prompt="cats", n=3, extra_body={"seed": 7})
    data: Any = made.data
    assert [each.seed for each in data] == [7, 8, 9]
    assert [opened(each.b64_json).tobytes() for each in data] == [pixels_of(seed, 24, 16) for seed in (7, 8, 9)]


def test_a_seed_that_nobody_named_is_told(front: Running) -> None:
    with front.openai() as client:
        data: Any = client.images.generate(prompt="a dog").data  # of the first model
    assert opened(data[0].b64_json).tobytes() == pixels_of(data[0].seed, 24, 16)


def test_loras_go_to_the_ranks_with_their_scales_and_into_files_as_a_command_names_them(front: Running) -> None:
    files = list[Any]()
    for lora in ("style", [{"name": "lines", "scale": 0.5}, {"name": "style"}], None):
        with front.openai() as client:
            made: Any = client.images.generate(prompt="with loras", extra_body={"lora": lora})
            files.append(json.loads(opened(made.data[0].b64_json).info["seqpar"]).get("lora"))
    assert files == [["style:1"], ["lines:0.5", "style:1"], None]
    heard = [each["loras"] for each in front.heard if each.get("prompt") == "with loras"]
    assert heard == [[["style", 1.0]], [["lines", 0.5], ["style", 1.0]], []]


@pytest.mark.parametrize("kind", ["jpeg", "webp"])
def test_formats(front: Running, kind: Any) -> None:
    with front.openai() as client:
        made: Any = client.images.generate(model="toy", prompt="x", output_format=kind, output_compression=50)
    assert (opened(made.data[0].b64_json).format, made.output_format) == (kind.upper(), kind)


def test_a_link_leads_to_the_file(front: Running) -> None:
    with front.openai() as client, front.http() as http:
        data: Any = client.images.generate(model="toy", prompt="x", n=2, response_format="url").data
        answers = [http.get(each.url) for each in data]
        assert [answer.headers["content-type"] for answer in answers] == ["image/png"] * 2
        pictures = [Image.open(io.BytesIO(answer.content)).tobytes() for answer in answers]
        assert pictures == [pixels_of(each.seed, 24, 16) for each in data]
        assert http.get("/v1/files/nothing.png").status_code == 404


def test_links_expire(tmp_path: Path) -> None:
    with running(tmp_path, "--keep-s", "0", "--keep-bytes", "1000") as front, front.openai() as client:
        data: Any = client.images.generate(prompt="x", response_format="url").data
        with front.http() as http:
            assert http.get(data[0].url).status_code == 404
        with pytest.raises(openai.BadRequestError, match="request b64_json"):
            client.images.generate(prompt="x", size="900x900", response_format="url")


def test_old_files_go_first_and_other_keys_have_none() -> None:
    now = [0.0]
    files = MemoryStore(keep_s=10, keep_bytes=10, now=lambda: now[0])

    async def kept(*asked: tuple[str, str]) -> list[bool]:
        return [await files.get(*each) is not None for each in asked]

    async def both() -> None:
        first, second = await files.keep("a", "png", [b"1234", b"5678"])
        assert await kept(("b", first)) == [False]
        now[0] = 5.0
        (third,) = await files.keep("a", "png", [b"90123"])
        assert await kept(("a", first), ("a", second), ("a", third)) == [False, True, True]
        now[0] = 10.0
        assert await kept(("a", second), ("a", third)) == [False, True]
        with pytest.raises(ProblemError, match="keeps at most 10"):
            await files.keep("a", "png", [b"12345678901"])

    asyncio.run(both())


def test_quality_counts() -> None:
    pixels = pixels_of(1, 64, 64)
    small, large = (len(encoded((64, 64), pixels, Format("jpeg", quality), {})) for quality in (10, 95))
    assert small < large


def test_estimates_are_of_measured_steps() -> None:
    speeds = Speeds()
    assert speeds.estimate("toy", 4, 0.5) == 2
    speeds.measured("toy", 4, {"steps": 8.0, "decode": 1.0})
    speeds.measured("toy", 2, {"encode": 1.0, "steps": 8.0, "decode": 2.0})
    assert speeds.estimate("toy", 10, 0.5) == 3 * 10 + 2
    assert speeds.estimate("other", 4, 0.25) == 1


def test_models_and_documentation(front: Running) -> None:
    with front.openai() as client, front.http() as http:
        assert [model.id for model in client.models.list()] == ["toy", "other", "editor", "changer", "movie", "clip"]
        about = http.get("/openapi.json").json()["components"]["schemas"]["Generation"]["properties"]
        assert "ignored" in about["quality"]["description"]
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/ready").json()["ranks"] == 2
        answer = http.post("/v1/images/generations", json={"prompt": "x", "quality": "hd", "user": "me", "seed": None})
        assert (answer.status_code, answer.headers["x-ignored"]) == (200, "user, quality")
        numbers = http.get("/metrics").text
    for line in (
        'seqpar_jobs_total{end="completed"}',
        "seqpar_queue_length 0.0",
        'seqpar_memory_bytes{rank="1"} 2000.0',
    ):
        assert line in numbers
