"""Edits and videos by real ranks: what a server makes has the bits that `seqpar sample` writes with the same flags."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import msgspec
import numpy as np
import pytest
from PIL import Image

from seqpar.pipelines.image_files import digest
from seqpar.serve.messages import Failed, ImageRequest, ImageResult, InputImage, VideoFacts, VideoResult
from tests.cli.processes import seqpar
from tests.support.driver import Driver, replica

pytestmark = [pytest.mark.slow, pytest.mark.whole]
ROWS, COLUMNS = np.mgrid[0:64, 0:80]
INPUT = np.stack([3 * ROWS, 3 * COLUMNS, (ROWS + COLUMNS) % 256], -1).astype(np.uint8)
MODELS = ("flux", "flux2_klein", "ltx", "wan_i2v")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of tiny pipelines."""
    from tests.support import pipelines  # loads diffusers, after TRITON_INTERPRET is set

    found = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    for name, folder in found.items():
        getattr(pipelines, name)().save_pretrained(folder)
    Image.fromarray(INPUT).save(found["flux"] / "input.png")
    return found


@pytest.fixture(scope="module")
def driver(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """Return two ranks with all models, pictures and videos together."""
    with replica(tmp_path_factory.mktemp("serve"), 2, *map(str, folders.values())) as made:
        yield made
        assert made.finish() == 0


def order(folder: Path, *pictures: np.ndarray, **fields: Any) -> ImageRequest:
    """Return an order of one prompt, which begins with pictures."""
    images = [InputImage(x.shape[0], x.shape[1], digest(x.tobytes())) for x in pictures]
    file = folder / "pixels"
    file.write_bytes(b"".join(x.tobytes() for x in pictures))
    return ImageRequest("id", str(folder), "a red cat", seed=3, images=tuple(images), pixels=str(file), **fields)


def sampled(folder: Path, out: Path, *words: object) -> Path:
    """Return the file that the command writes for the same order."""
    flags = ["--model", folder, "--prompt", "a red cat", "--seed", 3, "--ranks", 2, "--dtype", "fp32", "--out", out]
    done = seqpar("sample", *flags, *words)
    assert done.returncode == 0, done.stderr
    return out


def frames(video: str | io.BytesIO) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the frames of an mp4, and its parameters."""
    with av.open(video, "r") as file:
        told = json.loads(file.metadata["comment"]) | {"rate": file.streams.video[0].average_rate}
        return np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]).astype(int), told


def test_what_each_model_makes_is_told(driver: Driver) -> None:
    told = [(model.edits, model.needs_picture, model.video) for model in driver.ready.models]
    assert told[:2] == [(True, False, None), (True, False, None)]
    assert told[2:] == [(True, False, VideoFacts(25.0, 161, 2)), (True, True, VideoFacts(16.0, 81, 4))]


def pixels(made: object) -> np.ndarray:
    """Return the pixels of an answer."""
    assert isinstance(made, ImageResult), made
    return np.frombuffer(made.pixels, np.uint8).reshape(made.height, made.width, 3)


@pytest.mark.parametrize(
    ("name", "fields", "flags"),
    [
        ("flux", {"strength": 0.6, "size": (24, 32), "steps": 4}, ["--strength", 0.6, "--size", "24x32", "--steps", 4]),
        ("flux2_klein", {"steps": 2}, ["--steps", 2]),
    ],
)
def test_an_edit_has_the_bits_of_the_command(
    driver: Driver, folders: dict[str, Path], tmp_path: Path, name: str, fields: dict[str, Any], flags: list[object]
) -> None:
    folder, text = folders[name], {key: value for key, value in fields.items() if key != "strength"}
    before = pixels(driver.ask(order(folder, **{"size": (24, 32), **text})))
    mine = pixels(driver.ask(order(folder, INPUT, **fields)))
    written = sampled(folder, tmp_path / "x.png", "--image", folders["flux"] / "input.png", *flags)
    assert np.array_equal(mine, np.asarray(Image.open(written)))
    assert not np.array_equal(mine, pixels(driver.ask(order(folder, INPUT[::-1].copy(), **fields))))
    # pictures of texts are as before, though the other class of diffusers ran with the same parts
    assert np.array_equal(before, pixels(driver.ask(order(folder, **{"size": (24, 32), **text}))))


@pytest.mark.parametrize("name", ["ltx", "wan_i2v"])
def test_a_video_has_the_frames_of_the_command(
    driver: Driver, folders: dict[str, Path], tmp_path: Path, name: str
) -> None:
    images, words = ([INPUT], ["--image", folders["flux"] / "input.png"]) if name == "wan_i2v" else ([], [])
    asked = order(folders[name], *images, size=(32, 64), steps=2, frames=5, fps=8)
    made = driver.ask(asked)
    assert isinstance(made, VideoResult), made
    assert (made.height, made.width, made.frames, made.fps, made.steps) == (32, 64, 5, 8, 2)
    flags = ["--size", "32x64", "--steps", 2, "--frames", 5, "--fps", 8]
    written = sampled(folders[name], tmp_path / "x.mp4", *flags, *words)
    (theirs, asked_for), (mine, told) = frames(str(written)), frames(io.BytesIO(made.file))
    assert mine.shape == theirs.shape == (5, 32, 64, 3)
    assert told["pixels"] == asked_for["pixels"]  # before the encoder, which has other bits once in a thousand times
    assert abs(mine - theirs).mean() < 4, abs(mine - theirs).mean()
    other = driver.ask(msgspec.structs.replace(asked, seed=4))
    assert isinstance(other, VideoResult), other
    another, changed = frames(io.BytesIO(other.file))
    assert changed["pixels"] != told["pixels"]
    assert abs(mine - another).mean() > 4
    values = told["prompt"], told["frames"], told["seed"], told["rate"], len(told.get("images", ()))
    assert values == ("a red cat", 5, 3, 8, len(images))


@pytest.mark.parametrize(
    ("name", "pictures", "fields", "text"),
    [
        ("flux", 2, {}, "FluxImg2ImgPipeline takes one input image, for all prompts"),
        ("flux2_klein", 1, {"strength": 0.5}, "Flux2KleinPipeline takes no strength"),
        ("wan_i2v", 0, {}, "needs image: "),
        ("wan_i2v", 1, {"frames": 6}, "got frames 6, expected 1 more than a multiple of 4"),
        ("flux", 0, {"frames": 5}, "generates images, no videos"),
    ],
)
def test_a_mistake_is_the_answer(
    driver: Driver, folders: dict[str, Path], name: str, pictures: int, fields: dict[str, Any], text: str
) -> None:
    answer = driver.ask(order(folders[name], *[INPUT] * pictures, steps=2, **fields))
    assert isinstance(answer, Failed)
    assert (answer.why, text in answer.text) == ("mistake", True), answer.text


def test_a_picture_of_another_length_and_a_cancelled_video(driver: Driver, folders: dict[str, Path]) -> None:
    short = folders["flux"] / "short"
    short.write_bytes(b"123")
    answer = driver.ask(msgspec.structs.replace(order(folders["flux"], INPUT), pixels=str(short)))
    assert isinstance(answer, Failed)
    assert answer.why == "mistake"
    long = order(folders["ltx"], size=(32, 64), steps=900, frames=5)
    given_up = driver.cancel_at(long, 1)
    assert isinstance(given_up, Failed)
    assert given_up.why == "cancelled"


def test_the_loras_of_both_transformers_give_the_frames_of_the_command(tmp_path: Path) -> None:
    from tests.cli.loras import of_wan, written
    from tests.support import pipelines

    folder, loras = tmp_path / "wan22", tmp_path / "loras"
    pipelines.wan(2).save_pretrained(folder)
    loras.mkdir()
    files = written(
        loras, {"high": of_wan("lightning", 1), "low": of_wan("lightning", 2), "style": of_wan("trained", 3)}
    )
    fields: dict[str, Any] = {"size": (32, 32), "steps": 2, "frames": 5}
    sets = ((), (("high@transformer", 1.0), ("style@transformer_2", 0.5)), ())
    with replica(tmp_path, 2, str(folder), "--loras", str(loras)) as made:
        assert made.ready.models[0].loras == (
            "high@transformer",
            "low@transformer_2",
            "style@transformer",
            "style@transformer_2",
        )
        videos = [made.ask(msgspec.structs.replace(order(folder, **fields), loras=each)) for each in sets]
        assert f"LoRA {files['low']} changes transformer_2" in made.errors.with_name("output").read_text()
        assert made.finish() == 0
    words = ["--lora", files["high"], f"{files['style']}:0.5@transformer_2"]
    flags = ["--steps", 2, "--size", "32x32", "--frames", 5]
    digests = list[str]()
    for video, more in zip(videos, ([], words, []), strict=True):
        assert isinstance(video, VideoResult), video
        digests.append(frames(io.BytesIO(video.file))[1]["pixels"])
        assert frames(str(sampled(folder, tmp_path / "x.mp4", *flags, *more)))[1]["pixels"] == digests[-1]
    assert digests[0] == digests[2] != digests[1]
