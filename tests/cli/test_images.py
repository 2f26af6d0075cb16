"""`seqpar sample --image` and `--frames`: pictures drawn anew, edited, and made videos of, as diffusers alone does."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from seqpar.cli.args import Args
from seqpar.pipelines.arguments import (
    FPS,
    arguments_of,
    check_flags,
    frame_rate,
    gives_sigmas,
    shown_image,
    sides,
    taking_images,
)
from seqpar.pipelines.image_files import Picture
from seqpar.pipelines.request import GenerationRequest
from tests.cli.test_prompts import SAME, pixels, shown
from tests.cli.test_sample import parameters
from tests.support.pool import Pool

THEIRS: Any = diffusers  # pyright does not see what it imports lazily
HEIGHT, WIDTH = 64, 80
BLURRED = 0.03  # of 1; the mean error of blocks that a codec makes of noise


def picture(shift: int = 0) -> Image.Image:
    rows, columns = np.mgrid[0:HEIGHT, 0:WIDTH]
    return Image.fromarray(np.stack([3 * rows, 3 * columns, (rows + columns + shift) % 256], -1).astype(np.uint8))


def of_rank_0(rank: int, world: int, device: torch.device, args: Args) -> tuple[str, str]:
    """What a run prints, where the other ranks have no file of the pictures' names."""
    return shown(rank, world, device, args if rank == 0 else replace(args, image=("not there",) * len(args.image)))


def theirs(kind: str, folder: Path, **arguments: Any) -> np.ndarray:
    """The picture or video that a class of diffusers alone makes."""
    pipe = getattr(THEIRS, kind).from_pretrained(folder, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    made = pipe(prompt="a red cat", generator=torch.Generator().manual_seed(3), output_type="np", **arguments)
    return np.asarray(made.images[0] if hasattr(made, "images") else made.frames[0])


def ordered(folder: Path, tmp_path: Path, count: int = 1, **flags: Any) -> Args:
    """The flags of a run that begins with pictures, which are written."""
    paths = [tmp_path / f"in-{number}.png" for number in range(count)]
    for number, path in enumerate(paths):
        picture(100 * number).save(path)
    same = {"prompt": ("a red cat",), "seed": 3, "dtype": "fp32", "image": tuple(map(str, paths))}
    return Args(str(folder), **{**same, **flags})


def test_a_model_of_texts_draws_the_picture_of_rank_0_anew(
    ranks: Pool, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, size = folders("flux"), {"height": 24, "width": 32}
    flags: dict[str, Any] = {"size": "24x32", "steps": 4, "strength": 0.6, "guidance": 3.5, "mesh": "ulysses=2"}
    args = ordered(folder, tmp_path, **flags, verify=True, out=tmp_path / "x.png")
    (out, bars), silent = ranks.run(2, of_rank_0, args)
    assert "verify    every step holds\n" in out
    assert "3 steps of FlowMatchEulerDiscreteScheduler in FluxImg2ImgPipeline" in out
    assert f"image     {args.image[0]}, 64x80 pixels, stretched to 24x32; --size names another size\n" in out
    assert all(bar in bars for bar in ("encoding: 100%", "prompt/s]", "picture/s]", "3/3", "decoding: 100%"))
    assert bars.index("prompt/s]") < bars.index("picture/s]") < bars.index("denoising: ") < bars.index("decoding: ")
    assert silent == ("", "")
    same = {"image": picture(), "num_inference_steps": 4, "guidance_scale": 3.5, **size}
    for strength, differs in ((0.6, False), (0.9, True)):  # the second is a negative control
        truth = theirs("FluxImg2ImgPipeline", folder, **same, strength=strength)
        assert (abs(pixels(tmp_path / "x.png") / 255 - truth).max() > (SAME + 0.5) / 255) == differs
    (image,) = parameters(tmp_path / "x.png")["chosen"]["images"]
    assert image == Picture(args.image[0], picture()).facts


def test_several_pictures_are_edited_at_the_size_of_the_first(
    ranks: Pool, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = folders("flux2_klein")
    args = ordered(folder, tmp_path, 2, steps=2, mesh="ulysses=2", out=tmp_path / "x.png")
    (out, bars), _ = ranks.run(2, of_rank_0, args)
    assert "in Flux2KleinPipeline, guidance 1\n" in out  # which is distilled: one branch
    assert "2/2 [" in bars
    assert pixels(tmp_path / "x.png").shape == (HEIGHT, WIDTH, 3)
    images = [picture(), picture(100)]
    for given, differs in ((images, False), (images[:1], True)):
        truth = theirs("Flux2KleinPipeline", folder, image=given, num_inference_steps=2)
        assert (abs(pixels(tmp_path / "x.png") / 255 - truth).max() > (SAME + 0.5) / 255) == differs


def frames(path: Path) -> np.ndarray:
    """The frames of a video, from 0 to 1."""
    with av.open(str(path)) as file:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]) / 255


def blocks(frames_FHW3: np.ndarray) -> np.ndarray:
    """Means of 2 x 2 pixels, which share a colour in the file."""
    count, height, width, _ = frames_FHW3.shape
    return frames_FHW3.reshape(count, height // 2, 2, width // 2, 2, 3).mean((2, 4))


@pytest.mark.parametrize("world", [1, 2])
def test_a_picture_becomes_a_video_whose_metadata_holds_every_parameter(
    ranks: Pool, folders: Callable[[str], Path], tmp_path: Path, world: int
) -> None:
    folder = folders("wan_i2v")
    args = ordered(folder, tmp_path, size="32x48", steps=2, frames=5, fps=8, out=tmp_path / "x.mp4")
    (out, _), *_ = ranks.run(world, of_rank_0, args)
    with av.open(str(args.out)) as file:
        told = json.loads(file.metadata["comment"])
        assert file.streams.video[0].average_rate == 8
    assert f"pixels {told['pixels']}\n" in out
    assert told["chosen"]["images"] == [Picture(args.image[0], picture()).facts]
    assert (told["prompt"], told["frames"], told["seed"]) == (["a red cat"], 5, 3)
    same = {"num_frames": 5, "num_inference_steps": 2, "height": 32, "width": 48}
    for image, differs in ((picture(), False), (Image.new("RGB", (WIDTH, HEIGHT), "red"), True)):
        truth = theirs("WanImageToVideoPipeline", folder, image=image, **same)
        assert (abs(blocks(frames(args.out)) - blocks(truth)).mean() > BLURRED) == differs


def asked(**changes: Any) -> GenerationRequest:
    return GenerationRequest("x", torch.float32, prompts=("a",), **changes)


@pytest.mark.parametrize(
    ("name", "index", "sister"),
    [
        ("QwenImagePipeline", {}, "QwenImageImg2ImgPipeline"),
        ("StableDiffusion3Pipeline", {}, "StableDiffusion3Img2ImgPipeline"),
        ("ZImagePipeline", {}, "ZImageImg2ImgPipeline"),
        ("FluxKontextPipeline", {}, "FluxKontextPipeline"),
        ("LTXPipeline", {}, "LTXImageToVideoPipeline"),
        ("WanPipeline", {"expand_timesteps": True}, "WanImageToVideoPipeline"),
    ],
)
def test_the_class_that_takes_a_picture(name: str, index: dict[str, Any], sister: str) -> None:
    kind, images = getattr(THEIRS, name), (Picture("p", picture()),)
    assert taking_images(asked(images=images), kind, index).__name__ == sister
    assert taking_images(asked(), kind, index) is kind


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("WanPipeline", {"images": 1}, "--image p with --model x: WanPipeline takes no input image"),
        ("PixArtAlphaPipeline", {"images": 1}, "PixArtAlphaPipeline takes no input image"),
        ("QwenImageEditPipeline", {}, "--model x needs --image: QwenImageEditPipeline starts from"),
        ("WanImageToVideoPipeline", {}, "--model x needs --image"),
        ("QwenImageEditPipeline", {"images": 2}, "--image p p with --model x: QwenImageEditPipeline takes one input"),
        ("FluxPipeline", {"strength": 0.5}, "--strength 0.5 with --model x: it changes an input image; add --image"),
        ("FluxFillPipeline", {"images": 1}, "got a FluxFillPipeline, which takes a mask"),
        ("QwenImageEditPlusPipeline", {"images": 2, "repeat": 2}, "2 results with --image, but QwenImageEdit"),
    ],
)
def test_a_picture_too_few_or_too_many_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    changes = {**changes, "images": (Picture("p", picture()),) * changes.get("images", 0)}
    with pytest.raises(ValueError, match=re.escape(message)):
        taking_images(asked(**changes), getattr(THEIRS, name), {})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("LTXConditionPipeline", {"strength": 0.5}, "--strength 0.5 with --model x: for LTXCond"),
        ("ChronoEditPipeline", {"frames": 81}, "--frames 81 with --model x: ChronoEditPipeline generates"),
    ],
)
def test_a_flag_that_means_another_thing_to_a_pipeline_is_refused(
    name: str, changes: dict[str, Any], message: str
) -> None:
    parameters = inspect.signature(getattr(THEIRS, name).__call__).parameters
    with pytest.raises(ValueError, match=re.escape(message)):
        check_flags(asked(images=(Picture("p", picture()),), **changes), name, parameters)


def test_the_area_of_a_size_is_kept_where_the_pipeline_has_its_own() -> None:
    parameters = inspect.signature(THEIRS.FluxKontextPipeline.__call__).parameters
    image = (Picture("p", picture()),)
    height, width = image[0].size
    assert sides(asked(images=image, size=(512, 256)), parameters) == {"max_area": 512 * 256}
    assert sides(asked(images=image), parameters) == {"height": height, "width": width}


@pytest.mark.parametrize(("name", "own", "tells"), [("LTXPipeline", 25, True), ("WanPipeline", FPS, False)])
def test_a_model_is_told_the_frames_a_second_where_it_asks(name: str, own: int, tells: bool) -> None:
    call = inspect.signature(getattr(THEIRS, name).__call__).parameters
    assert (frame_rate(asked(), call), frame_rate(asked(fps=30), call)) == (own, 30)
    assert arguments_of(asked(fps=30), name, call, False).get("frame_rate") == (30 if tells else None)


@pytest.mark.parametrize(
    ("name", "arguments", "stretched"),
    [
        ("FluxImg2ImgPipeline", {"height": 1024, "width": 1024}, "1024x1024"),
        ("FluxImg2ImgPipeline", {"height": 640, "width": 800}, None),
        ("WanImageToVideoPipeline", {}, "480x832"),  # its default
        ("FluxKontextPipeline", {"height": 1024, "width": 1024}, None),  # which keeps the picture's shape
        ("StableDiffusion3Img2ImgPipeline", {}, ""),  # whose own size the arguments do not tell
    ],
)
def test_a_picture_that_is_stretched_is_told(name: str, arguments: dict[str, int], stretched: str | None) -> None:
    call = inspect.signature(getattr(THEIRS, name).__call__).parameters
    text = shown_image(Picture("p", picture()), arguments, call)
    told = {"": ", stretched if the pipeline's own size has another shape; --size names one", None: ""}
    assert text == "p, 64x80 pixels" + told.get(stretched, f", stretched to {stretched}; --size names another size")


def test_the_pipelines_that_pass_sigmas_are_those_of_diffusers() -> None:
    """Their code says so; a new version of diffusers may add some."""
    folder, exported = Path(diffusers.__file__).parent / "pipelines", set(dir(diffusers))
    wrong = []
    for file in folder.rglob("pipeline_*.py"):
        code = file.read_text()
        names = exported.intersection(re.findall(r"^class (\w+Pipeline)\(", code, re.MULTILINE))
        wrong += [name for name in names if gives_sigmas(name) != ("np.linspace(1.0, 1 / num_inference_steps" in code)]
    assert not wrong
