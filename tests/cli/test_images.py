"""`seqpar sample --image` and `--frames`: image to image, edits and videos of images, as diffusers alone makes them."""

from __future__ import annotations

import inspect
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import av
import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from seqpar.cli.args import Args, DryRun, Options
from seqpar.cli.job import checked
from seqpar.families._find import gives_sigmas
from seqpar.loading import names
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.arguments import FPS, arguments_of, check_flags, frame_rate, shown_image, sides, taking_images
from seqpar.pipelines.image_files import Picture
from seqpar.pipelines.protocol import GenerationRequest
from tests.cli.runs import SAME, parameters, pixels, shown, theirs
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


def ordered(folder: Path, tmp_path: Path, count: int = 1, **flags: Any) -> Args:
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
        truth = theirs(folder, "FluxImg2ImgPipeline", **same, strength=strength)
        assert (abs(pixels(tmp_path / "x.png") - truth).max() > SAME) == differs
    assert parameters(tmp_path / "x.png")["chosen"]["images"] == [Picture(args.image[0], picture()).facts]


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
        truth = theirs(folder, "Flux2KleinPipeline", image=given)
        assert (abs(pixels(tmp_path / "x.png") - truth).max() > SAME) == differs


UPPER = Image.fromarray(np.repeat(np.array([255, 0], np.uint8), HEIGHT // 2)[:, None].repeat(WIDTH, 1))
STARTS: dict[str, tuple[str, ...]] = {  # classes of diffusers, and the flags that need them
    "FluxInpaintPipeline": ("image", "mask"),
    "FluxControlNetPipeline": ("control_image",),
    "FluxControlNetInpaintPipeline": ("image", "mask", "control_image"),
}


@pytest.mark.parametrize("kind", STARTS)
def test_masks_and_controlnets_draw_as_in_diffusers_alone(
    ranks: Pool, folders: Callable[[str], Path], pose: Path, tmp_path: Path, kind: str
) -> None:
    folder, size = folders("flux"), {"height": 24, "width": 32}
    files = {name: str(tmp_path / f"{name}.png") for name in STARTS[kind]}
    inputs: dict[str, Image.Image] = {"image": picture(), "mask": UPPER, "control_image": picture(100)}
    for name, file in files.items():
        inputs[name].save(file)
    flags: dict[str, Any] = {**files, "size": "24x32", "steps": 4, "guidance": 3.5}
    flags["image"] = (files["image"],) if "image" in files else ()
    flags |= {"strength": 0.6} if "image" in files else {}
    flags |= {"controlnet": str(pose), "control_scale": 0.7} if "control_image" in files else {}
    args = ordered(folder, tmp_path, **flags, verify=True, out=tmp_path / "x.png")
    out, bars = ranks.run(1, shown, args)[0]
    (split, _), silent = ranks.run(2, shown, replace(args, mesh="ulysses=2", out=tmp_path / "two.png"))
    assert silent == ("", "")
    assert f"in {kind}" in out
    assert "encoding: 0picture" in bars or "encoding: 1picture" in bars  # the pipeline encodes as many as it likes
    assert "verify    every step holds\n" in split

    given = {"mask": "mask_image"}
    same: Any = {given.get(name, name): inputs[name] for name in files} | size
    same |= {"num_inference_steps": 4, "guidance_scale": 3.5} | ({"strength": 0.6} if "image" in files else {})
    if "control_image" in files:
        same["parts"] = {"controlnet": THEIRS.FluxControlNetModel.from_pretrained(pose)}
        same["controlnet_conditioning_scale"] = 0.7
    truth = theirs(folder, kind, **same)
    assert all(abs(pixels(path) - truth).max() < SAME for path in (args.out, tmp_path / "two.png"))
    last = given.get([*files][-1], [*files][-1])  # another one is a negative control
    assert abs(pixels(args.out) - theirs(folder, kind, **same | {last: inputs["image"].rotate(180)})).max() > SAME

    told = parameters(args.out)
    assert [told[name] for name in ("mask", "controlnet")] == [files.get("mask"), flags.get("controlnet")]
    if "mask" in files:
        assert told["chosen"]["mask"] == Picture(files["mask"], UPPER).facts
    if "control_image" in files:
        facts = {"name": str(pose), "scale": 0.7, "image": Picture(files["control_image"], picture(100)).facts}
        assert told["chosen"]["control"] == facts


def test_advice_about_a_budget_names_the_model_and_not_its_controlnet(
    folders: Callable[[str], Path], pose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache := tmp_path / "cache").mkdir()
    monkeypatch.setenv("SEQPAR_CACHE", str(cache))
    (cache / "budget-cache-9-4-of-another-model.json").touch()  # what a look before weights load finds
    picture().save(file := tmp_path / "in.png")
    flags: dict[str, Any] = {"image": (), "controlnet": str(pose), "control_image": str(file), "size": "24x32"}
    flags |= {"steps": 4, "cache": "dbcache:warmup=1", "min_psnr": 9.0, "out": tmp_path / "x.png"}
    args = ordered(folders("flux"), tmp_path, 0, **flags)
    with pytest.raises(ValueError, match=re.escape(f"--steps 4 --model {args.model}, with")):
        shown(0, 1, torch.device("cpu"), args)


def asked_for(rank: int, world: int, device: torch.device, args: Args, net: Path) -> tuple[str, list[list[str]]]:
    """What is wrong with flags, and the patterns of files that are downloaded. net: where they are then."""
    patterns = list[list[str]]()

    def snapshot(name: str, allow_patterns: list[str], local_files_only: bool) -> str:
        patterns.append(allow_patterns)
        return str(net)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(names.HfApi, "model_info", lambda *_, **__: None)
        patch.setattr(names, "snapshot_download", snapshot)
        try:
            checked(args, Mesh.joined(device) if world > 1 else Mesh.single())
        except ValueError as error:
            return str(error), patterns
    return "", patterns


def test_a_controlnet_is_downloaded_once_the_model_is_found_and_known_to_fit(
    ranks: Pool, folders: Callable[[str], Path], pose: Path, tmp_path: Path
) -> None:
    (net := tmp_path / "net").mkdir()
    shutil.copy(pose / "config.json", net)
    picture().save(file := tmp_path / "in.png")
    same: Any = {"image": (), "controlnet": "owner/net", "control_image": str(file), "size": "24x32", "steps": 2}
    config, whole = ["config.json"], ["config.json", "diffusion_pytorch_model*"]
    typo = ordered(Path("no-such-model"), tmp_path, 0, **same)
    other, right = (ordered(folders(name), tmp_path, 0, **same) for name in ("sd3", "flux"))
    plan = DryRun(**{field.name: getattr(right, field.name) for field in fields(Options)}, dry_run=(2,))
    for args, message, patterns in (
        (typo, "no-such-model", []),
        (other, "ControlNet owner/net does not fit", [config]),
        (right, "diffusion_pytorch_model", [config, whole]),  # which this folder lacks
        (plan, "", [config]),
    ):
        error, asked = asked_for(0, 1, torch.device("cpu"), args, net)
        assert message in error
        assert asked == patterns
        assert bool(error) == bool(message)
    for args, message in ((typo, "no-such-model"), (other, "ControlNet owner/net does not fit")):
        (one, first), (two, second) = ranks.run(2, asked_for, args, net)
        assert one == two
        assert message in one
        assert (first, second) == ([config] if args is other else [], [])


def test_an_image_that_diffusers_encodes_without_a_generator_follows_the_seed(
    ranks: Pool, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    from tests.support import pipelines

    folder, net, file = folders("sd3"), tmp_path / "net", tmp_path / "edges.png"
    kind, more = THEIRS.SD3ControlNetModel, {"num_extra_conditioning_channels": 0}
    control = kind.from_transformer(
        pipelines.sd3().transformer, num_layers=1, load_weights_from_transformer=False, **more
    )
    pipelines.random_weights(control, 6).save_pretrained(net)
    picture().save(file)
    flags: dict[str, Any] = {"image": (), "controlnet": str(net), "control_image": str(file), "size": "24x32"}
    args = ordered(folder, tmp_path, 0, **flags, steps=2, guidance=1.0, out=tmp_path / "x.png")
    same: Any = {"control_image": picture(), "guidance_scale": 1.0, "height": 24, "width": 32}

    def of_diffusers() -> np.ndarray:
        parts = {"controlnet": kind.from_pretrained(net)}
        return theirs(folder, "StableDiffusion3ControlNetPipeline", parts=parts, **same)

    torch.manual_seed(3)
    truth = of_diffusers()
    for world, mesh in ((1, "auto"), (2, "ulysses=2")):
        before = torch.get_rng_state()
        ranks.run(world, shown, replace(args, mesh=mesh))
        assert torch.equal(torch.get_rng_state(), before)
        assert abs(pixels(args.out) - truth).max() < SAME
    assert abs(of_diffusers() - truth).max() > SAME  # a negative control: numbers of the process go on


def blocks(frames_FHW3: np.ndarray) -> np.ndarray:
    """Means of 2 x 2 pixels, which share a colour in the file."""
    count, height, width, _ = frames_FHW3.shape
    return frames_FHW3.reshape(count, height // 2, 2, width // 2, 2, 3).mean((2, 4))


def test_a_picture_becomes_a_video_whose_metadata_holds_every_parameter(
    ranks: Pool, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = folders("wan_i2v")
    args = ordered(folder, tmp_path, size="32x48", steps=2, frames=5, fps=8, out=tmp_path / "x.mp4")
    (out, _), _ = ranks.run(2, of_rank_0, args)
    with av.open(str(args.out)) as file:
        told = json.loads(file.metadata["comment"])
        assert file.streams.video[0].average_rate == 8
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]) / 255
    assert f"pixels {told['pixels']}\n" in out
    assert told["chosen"]["images"] == [Picture(args.image[0], picture()).facts]
    assert (told["prompt"], told["frames"], told["seed"]) == (["a red cat"], 5, 3)
    for image, differs in ((picture(), False), (Image.new("RGB", (WIDTH, HEIGHT), "red"), True)):
        truth = theirs(folder, "WanImageToVideoPipeline", image=image, num_frames=5, height=32, width=48)
        assert (abs(blocks(frames) - blocks(truth)).mean() > BLURRED) == differs


def asked(**changes: Any) -> GenerationRequest:
    images = (Picture("p", picture()),) * changes.pop("images", 0)
    return GenerationRequest("x", torch.float32, prompts=("a",), images=images, **changes)


MASKED: dict[str, Any] = {"images": 1, "mask": Picture("m", UPPER)}


def call_of(name: str) -> Any:
    return inspect.signature(getattr(THEIRS, name).__call__).parameters


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
    kind = getattr(THEIRS, name)
    assert taking_images(asked(images=1), kind, index).__name__ == sister
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
        ("FluxFillPipeline", {"images": 1}, "--model x needs --image and --mask: FluxFillPipeline"),
        ("FluxControlNetInpaintPipeline", {}, "FluxControlNetInpaintPipeline, which takes a control image"),
        ("FluxControlInpaintPipeline", {}, "FluxControlInpaintPipeline, which takes a control image"),
        ("FluxControlNetInpaintPipeline", MASKED, "FluxControlNetInpaintPipeline, which takes a control image"),
        ("FluxControlNetPipeline", MASKED, "or use the folder of a pipeline without one, and --controlnet"),
        ("FluxControlPipeline", {**MASKED, "planned": True}, "no pipeline like FluxControlPipeline takes image and"),
        ("QwenImageEditPlusPipeline", {"images": 2, "repeat": 2}, "2 results with --image, but QwenImageEdit"),
        # flags that mean another thing to a pipeline
        ("LTXConditionPipeline", {"images": 1, "strength": 0.5}, "--strength 0.5 with --model x: for LTXCond"),
        ("ChronoEditPipeline", {"images": 1, "frames": 81}, "--frames 81 with --model x: ChronoEditPipeline generates"),
    ],
)
def test_too_few_or_too_many_pictures_and_flags_that_do_not_fit_are_refused(
    name: str, changes: dict[str, Any], message: str
) -> None:
    def work() -> None:
        taking_images(asked(**changes), getattr(THEIRS, name), {})
        check_flags(asked(**changes), name, call_of(name))

    with pytest.raises(ValueError, match=re.escape(message)):
        work()


def test_the_area_of_a_size_is_kept_where_the_pipeline_has_its_own() -> None:
    call = call_of("FluxKontextPipeline")
    assert sides(asked(images=1, size=(512, 256)), call) == {"max_area": 512 * 256}
    assert sides(asked(images=1), call) == {"height": HEIGHT, "width": WIDTH}


@pytest.mark.parametrize(("name", "own", "tells"), [("LTXPipeline", 25, True), ("WanPipeline", FPS, False)])
def test_a_model_is_told_the_frames_a_second_where_it_asks(name: str, own: int, tells: bool) -> None:
    call = call_of(name)
    assert (frame_rate(asked(), call), frame_rate(asked(fps=30), call)) == (own, 30)
    assert arguments_of(asked(fps=30), name, call, False).get("frame_rate") == (30 if tells else None)


@pytest.mark.parametrize(
    ("name", "arguments", "shows"),
    [
        ("FluxImg2ImgPipeline", {"height": 1024, "width": 1024}, "stretched to 1024x1024; --size names another size"),
        ("FluxImg2ImgPipeline", {"height": 640, "width": 800}, None),
        ("WanImageToVideoPipeline", {}, "stretched to 480x832; --size names another size"),  # its default
        ("FluxKontextPipeline", {"height": 1024, "width": 1024}, None),  # which keeps the picture's shape
        (  # whose own size the arguments do not tell
            "StableDiffusion3Img2ImgPipeline",
            {},
            "stretched if the pipeline's own size has another shape; --size names one",
        ),
    ],
)
def test_a_picture_that_is_stretched_is_told(name: str, arguments: dict[str, int], shows: str | None) -> None:
    text = shown_image(Picture("p", picture()), arguments, call_of(name))
    assert text == ", ".join(filter(None, ("p", "64x80 pixels", shows)))


def test_the_pipelines_that_pass_sigmas_are_those_of_diffusers() -> None:
    """Their code says so; a new version of diffusers may add some."""
    folder, exported = Path(diffusers.__file__).parent / "pipelines", set(dir(diffusers))
    wrong = []
    for file in folder.rglob("pipeline_*.py"):
        code = file.read_text()
        names = exported.intersection(re.findall(r"^class (\w+Pipeline)\(", code, re.MULTILINE))
        wrong += [name for name in names if gives_sigmas(name) != ("np.linspace(1.0, 1 / num_inference_steps" in code)]
    assert not wrong
