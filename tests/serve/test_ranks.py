"""The ranks of a server: real processes with many models at once, whose server is the test.

Images, edits and videos have the bits that `seqpar sample` writes with the same flags.
"""

from __future__ import annotations

import io
import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from PIL import Image
from safetensors.torch import load as load_tensors
from safetensors.torch import load_file, save_file
from torch import Tensor

import seqpar as package
from seqpar.loading.names import LORAS
from seqpar.mesh.boundary import CancelledError, StepBoundary
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.image_files import digest
from seqpar.pipelines.pictures import grid
from seqpar.serve.messages import (
    Failed,
    ImageRequest,
    ImageResult,
    InputImage,
    InputLatents,
    Partial,
    VideoFacts,
    VideoResult,
)
from seqpar.serve.ranks.checked import CheckedModel, sizes_near, unit_of
from seqpar.serve.ranks.loop import SOCKET, LoadedModel, Output
from seqpar.serve.rules import why_not
from seqpar.transformer.step_cache import StepCaching, _Branch
from tests.cli.processes import seqpar
from tests.support.driver import Driver, replica
from tests.support.meshes import random
from tests.support.pool import Pool

pytestmark = [pytest.mark.slow, pytest.mark.whole]
CAT = ImageRequest("cat", "builtin", "cat", seed=3, steps=6)
FROG = ImageRequest("frog", "builtin-text", "a green frog", seed=3, steps=6)
MANY = 900  # steps, which take many seconds
MODELS = ("flux", "flux2_klein", "ltx", "wan_i2v", "ltx2_ordinary", "minimax_h3")
SETS = {"none": (), "one": (("outline", 1.0),), "weak": (("outline", 0.5),), "two": (("other", 0.7), ("outline", 1.0))}
ROWS, COLUMNS = np.mgrid[0:64, 0:80]
INPUT = np.stack([3 * ROWS, 3 * COLUMNS, (ROWS + COLUMNS) % 256], -1).astype(np.uint8)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny pipelines by name, an input image, and the folders "loras" for builtin-text and "others" for them."""
    from tests.cli.loras import write  # these load diffusers, after TRITON_INTERPRET is set
    from tests.support import modular, pipelines

    folders = {name: tmp_path_factory.mktemp(name) for name in (*MODELS, "loras", "others", "pose")}
    for name in MODELS[:-1]:
        getattr(pipelines if hasattr(pipelines, name) else modular, name)().save_pretrained(folders[name])
    modular.saved(modular.minimax_h3(), folders["minimax_h3"])
    transformer = pipelines.flux().transformer
    net = pipelines.THEIRS.FluxControlNetModel.from_transformer(
        transformer, 1, 1, pipelines.HEAD_DIM, pipelines.HEADS, load_weights_from_transformer=False
    )
    pipelines.random_weights(net, 6).save_pretrained(folders["pose"])
    Image.fromarray(INPUT).save(folders["flux"] / "input.png")

    loras = folders["loras"]
    shutil.copy(LORAS["outline"], loras / "outline.safetensors")
    tensors = load_file(LORAS["outline"])
    paths = sorted({key.partition(".lora_")[0] for key in tensors})[::2]
    half = {key: x for key, x in sorted(tensors.items()) if key.partition(".lora_")[0] in paths}
    other = {key: 0.1 * random(tuple(x.shape), seed).float() for seed, (key, x) in enumerate(half.items())}
    save_file(other, loras / "other.safetensors")
    # also weights that lie in one matrix
    write(
        folders["others"] / "style.safetensors", "flux", ("to_q", "to_out.0", "proj_mlp", "add_k_proj", "x_embedder"), 1
    )
    return folders


@pytest.fixture(scope="module")
def driver(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """Two ranks with the built-in models and LoRAs, which have run two sizes before they were ready."""
    words = ("builtin", "builtin-text", "--loras", str(folders["loras"]), "--warm", "auto", "48x64")
    with replica(tmp_path_factory.mktemp("serve"), 2, *words) as started:
        yield started
        assert started.finish() == 0


@pytest.fixture(scope="module")
def others(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """Two ranks with tiny pipelines of diffusers for images and videos, and their LoRAs."""
    models = (str(folders[name]) for name in MODELS)
    words = ("--loras", str(folders["others"]), "--controlnet", f"pose={folders['pose']}")
    with replica(tmp_path_factory.mktemp("others"), 2, *models, *words) as started:
        yield started
        assert started.finish() == 0


def of(folder: Path, *images: np.ndarray, **fields: Any) -> ImageRequest:
    """A request to the model in a folder, with input images."""
    inputs = [InputImage(x.shape[0], x.shape[1], digest(x.tobytes())) for x in images]
    file = folder / "pixels"
    file.write_bytes(b"".join(x.tobytes() for x in images))
    return ImageRequest("id", str(folder), "a red cat", seed=3, images=tuple(inputs), pixels=str(file), **fields)


def image(answer: object) -> np.ndarray:
    """The pixels of an answer, (height, width, 3)."""
    assert isinstance(answer, ImageResult), answer
    return np.frombuffer(answer.pixels, np.uint8).reshape(answer.height, answer.width, 3)


def frames(video: object) -> tuple[np.ndarray, dict[str, Any]]:
    """The frames of a video's answer or file, and its parameters."""
    assert isinstance(video, VideoResult | Path), video
    with av.open(str(video) if isinstance(video, Path) else io.BytesIO(video.file), "r") as file:
        stored = json.loads(file.metadata["comment"]) | {"rate": file.streams.video[0].average_rate}
        return np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]).astype(int), stored


def failed(answer: object, why: str, said: str = "") -> None:
    assert isinstance(answer, Failed), answer
    assert (answer.why, said in answer.text, "\n" in answer.text) == (why, True, False), answer.text


def sampled(out: Path, *words: object, prompt: str = "a red cat") -> Path:
    """The file that the command writes with the same seed."""
    done = seqpar("sample", "--prompt", prompt, "--seed", 3, "--ranks", 2, "--dtype", "fp32", "--out", out, *words)
    assert done.returncode == 0, done.stderr
    return out


def test_ready_ranks_report_their_models_and_have_warmed_up(driver: Driver) -> None:
    classes, texts = driver.ready.models
    assert (classes.name, classes.kind, classes.size) == ("builtin", "classes", (64, 64))
    assert "cat" in classes.classes
    assert [names[0] for _, names in sorted(classes.labels.items())] == [*classes.classes]
    assert (texts.name, texts.kind, texts.size) == ("builtin-text", "texts", (64, 64))
    assert classes.sizes[:3] == texts.sizes[:3] == ((64, 64), (56, 72), (72, 56))
    assert driver.ready.ranks == 2
    assert (classes.unit, texts.unit, "DDIMScheduler" in classes.schedulers) == (8, 8, True)
    assert (classes.loras, texts.loras) == ((), ("other", "outline"))
    output = driver.output
    warm = [line.partition(" after")[0] for line in output.splitlines() if "is warm for" in line]
    models = ("builtin", "builtin-text")
    assert warm == [f"seqpar: {name} is warm for {size}" for name in models for size in ("auto", "48x64")]
    for name, channels in zip(models, (4, 16), strict=True):
        assert output.count(f"seqpar: previews of {name}: linear map of {channels} channels") == 1
    assert not driver.partial
    assert not driver.steps


def test_other_sizes_have_as_many_pixels_as_the_models_own() -> None:
    def even(size: tuple[int, int]) -> bool:
        return size[0] % 128 == size[1] % 8 == 0

    assert (sizes_near((0, 0), even), unit_of((0, 0), even)) == ((), 1)
    large = ((1024, 1024), (896, 1152), (1152, 896), (832, 1280), (1280, 832), (768, 1344), (1344, 768))
    assert sizes_near((1024, 1024), lambda size: True) == large
    assert sizes_near((1000, 1000), even) == ((1000, 1000), (1152, 864))
    assert [unit_of((1024, 1024), fits) for fits in (even, lambda size: True, lambda size: False)] == [128, 1, 1]


@pytest.mark.parametrize("order", [FROG, CAT], ids=["a pipeline of diffusers", "our loop"])
def test_a_cancel_ends_a_run_and_the_next_has_the_same_bits(driver: Driver, order: ImageRequest) -> None:
    """The model, and a scheduler of another name that was used for a time, stay as they were.

    tests/graphs/test_boundary.py tests the step after which a run ends: here the cancel takes its time to arrive.
    """
    first = image(driver.ask(order))
    scheduler = "FlowMatchEulerDiscreteScheduler" if order is FROG else None
    for at in (1, 7):
        id_ = f"{order.id} {at}"
        failed(driver.cancel_at(replace(order, id=id_, steps=MANY, scheduler=scheduler), at), "cancelled")
        assert at <= driver.steps[id_][-1] < MANY
        assert np.array_equal(first, image(driver.ask(order)))


def test_latents_leave_and_return_without_loss(driver: Driver, tmp_path: Path) -> None:
    def starting(latents: Tensor, **fields: Any) -> ImageRequest:
        content = latents.numpy().tobytes()
        (tmp_path / "latents").write_bytes(content)
        given = InputLatents(tuple(latents.shape), digest(content))
        return replace(order, latents=given, pixels=str(tmp_path / "latents"), **fields)

    order = replace(FROG, steps=4)
    want = image(driver.ask(order))
    assert np.array_equal(want, image(driver.ask(replace(order, steps=None, sigmas=(1.0, 0.75, 0.5, 0.25)))))
    assert not np.array_equal(want, image(driver.ask(replace(order, steps=None, sigmas=(1.0, 0.9, 0.8, 0.5)))))
    answer = driver.ask(replace(order, returns="latents"))
    assert isinstance(answer, ImageResult)
    assert (answer.height, answer.width, answer.pixels) == (*want.shape[:2], b"")
    latents = load_tensors(answer.file)["latents"]
    assert np.array_equal(want, image(driver.ask(starting(latents, steps=0))))
    # a little noise keeps the image, as an image of the same pixels does
    near, far = (image(driver.ask(starting(latents, seed=9, steps=10, strength=much))) for much in (0.2, 1.0))
    assert np.abs(near.astype(float) - want).mean() < np.abs(far.astype(float) - want).mean() / 2
    failed(driver.ask(starting(latents[:, :3], steps=0)), "mistake")
    failed(driver.ask(starting(latents[:, :, None], steps=0)), "mistake", "a dimension of frames")
    assert isinstance(driver.ask(starting(latents[..., :1, :1].contiguous(), steps=0)), ImageResult)
    failed(driver.ask(starting(latents * math.nan, steps=0)), "mistake")
    assert np.array_equal(want, image(driver.ask(order)))


def test_a_deadline_ends_one_request(driver: Driver) -> None:
    failed(driver.ask(replace(CAT, steps=1000, deadline_s=0.3)), "deadline")
    assert image(driver.ask(replace(CAT, deadline_s=60.0))).any()


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("builtin", {"prompt": "no such thing"}, "got class 'no such thing', expected one of cat, dog"),
    ("builtin", {"steps": 0}, "got steps 0, expected 1 to 1000 with model builtin"),
    ("builtin", {"steps": 51, "scheduler": "LCMScheduler"}, "got steps 51, expected 1 to 50 with LCMScheduler"),
    ("builtin", {"negative_prompt": "a dog"}, "model builtin takes no negative_prompt: this model generates images of"),
    ("builtin", {"strength": 0.5}, "model builtin takes no strength: this model takes no input image; leave it out"),
    ("builtin", {"scheduler": "NoScheduler"}, "scheduler 'NoScheduler' does not fit model builtin; use "),
    ("builtin", {"scheduler": "FlowMatchEulerDiscreteScheduler"}, "does not fit model builtin; use Euler"),
    ("builtin", {"guidance": float("nan")}, "guidance"),
    ("builtin", {"size": (8192, 8192), "deadline_s": 100.0}, "one step is predicted to take"),
    ("builtin", {"loras": SETS["one"]}, "unknown or repeated lora; builtin has none"),
    ("none", {}, "model none is not served; use one of builtin, builtin-text"),
    ("builtin-text", {"size": (63, 63)}, "size 63x63 is not divisible by 8; nearest: 56x56, 64x64"),
    ("builtin-text", {"size": (65536, 65536)}, "the request needs more memory than the server has for model builtin-t"),
    (
        "builtin-text",
        {"negative_prompt": "a"},
        "negative_prompt has no effect on model builtin-text without true_guida",
    ),
    (
        "builtin-text",
        {"loras": (("../outline", 1.0),)},
        "unknown or repeated lora; use some of other, outline, each once",
    ),
]


@pytest.mark.parametrize(("model", "fields", "said"), WRONG)
def test_an_invalid_request_gets_the_reason(driver: Driver, model: str, fields: dict[str, Any], said: str) -> None:
    """By the rules that the ranks have sent, as the API server does before; no request that they refuse runs."""
    order = replace(CAT, model=model, **fields)
    failed(driver.ask(order), "mistake", said)
    facts = {facts.name: facts for facts in driver.ready.models}
    if model in facts and fields.keys() != {"guidance"}:  # whose value the API server's types refuse
        refusal = why_not(facts[model], order)
        assert refusal is not None
        assert said in refusal.text


# edits and videos ----------------------------------------------------------------------------------------------------


def test_pipelines_report_what_they_take_and_refuse_the_rest(others: Driver, folders: dict[str, Path]) -> None:
    models, image_model = others.ready.models, (True, False, None)
    facts = [(model.edits, model.needs_picture, model.video) for model in models]
    videos = [
        (True, False, VideoFacts(25.0, 161, 2)),
        (True, True, VideoFacts(16.0, 81, 4)),
        (False, False, VideoFacts(24.0, 121, 2)),
        (True, False, VideoFacts(24.0, 124, 17, 120, 360)),
    ]
    assert facts == [image_model, image_model, *videos]
    assert models[0].loras == ("style",)
    assert [(model.unit, model.own[0]) for model in models] == [(4, 1), (4, 1), (32, 1), (16, 1), (32, 1), (1, 2)]
    masked = [model.takes.keys() >= {"image+mask"} for model in models]
    assert masked == [True, True, False, False, False, False]
    rows: list[tuple[str, int, dict[str, Any], str]] = [
        ("flux", 2, {}, "takes one image, got 2; send one"),
        ("flux", 0, {"frames": 5}, "generates images, no videos"),
        ("flux2_klein", 1, {"strength": 0.5}, "takes no strength; leave it out"),
        (
            "flux2_klein",
            0,
            {"guidance": 2.0},
            "takes no guidance: this model is distilled: it has one branch; leave it",
        ),
        ("wan_i2v", 0, {}, "requires an image"),
        ("wan_i2v", 1, {"frames": 6}, "got frames 6, expected 1 more than a multiple of 4"),
        ("wan_i2v", 1, {"size": (40, 64)}, "size 64x40 is not divisible by 16; nearest: 64x32, 64x48"),
        ("minimax_h3", 0, {"frames": 100}, "got frames 100, expected 120 to 360"),
        ("minimax_h3", 0, {"steps": 1}, "got steps 1, expected 2 to 1000 with model"),
        ("minimax_h3", 0, {"guidance": 3.0}, "takes no guidance; leave it out"),
    ]
    for name, images, fields, said in rows:
        failed(others.ask(of(folders[name], *[INPUT] * images, **{"steps": 2, **fields})), "mistake", said)
    short = folders["flux"] / "short"
    short.write_bytes(b"123")
    failed(others.ask(replace(of(folders["flux"], INPUT), pixels=str(short))), "mistake")
    for name, count in (("ltx", 5), ("minimax_h3", 124)):
        failed(others.cancel_at(of(folders[name], size=(32, 64), steps=900, frames=count), 1), "cancelled")


@pytest.mark.parametrize(
    ("name", "fields", "flags"),
    [
        ("flux", {"strength": 0.6, "size": (24, 32), "steps": 4}, ["--strength", 0.6, "--size", "24x32", "--steps", 4]),
        ("flux2_klein", {"steps": 2}, ["--steps", 2]),
    ],
)
def test_an_edit_has_the_bits_of_the_command(
    others: Driver, folders: dict[str, Path], tmp_path: Path, name: str, fields: dict[str, Any], flags: list[object]
) -> None:
    folder = folders[name]
    text = of(folder, size=(24, 32), steps=fields["steps"])
    before, edited = image(others.ask(text)), image(others.ask(of(folder, INPUT, **fields)))
    inputs = "--model", folder, "--image", folders["flux"] / "input.png"
    assert np.array_equal(edited, np.asarray(Image.open(sampled(tmp_path / "x.png", *inputs, *flags))))
    assert not np.array_equal(edited, image(others.ask(of(folder, INPUT[::-1].copy(), **fields))))
    # images of prompts are as before, though another class of diffusers ran with the same parts
    assert np.array_equal(before, image(others.ask(of(folder, size=(24, 32), steps=fields["steps"]))))


@pytest.mark.parametrize(
    ("name", "preset"),
    [("ltx", None), ("ltx", "distilled"), ("wan_i2v", None), ("ltx2_ordinary", None), ("minimax_h3", None)],
)
def test_a_video_has_the_frames_of_the_command(
    others: Driver, folders: dict[str, Path], tmp_path: Path, name: str, preset: str | None
) -> None:
    images, words = ([], []) if name.startswith("ltx") else ([INPUT], ["--image", folders["flux"] / "input.png"])
    fixed, sounds = name == "minimax_h3", name in ("minimax_h3", "ltx2_ordinary")
    count, rate = (124, 24) if fixed else (5, 24) if sounds else (5, 8)
    asked = 9 if name == "ltx2_ordinary" else count  # whose tiny decoder makes five of them
    # whose frames per second are fixed, and whose steps count the end
    sampling: dict[str, Any] = {"steps": 2 + fixed} if preset is None else {"preset": preset}
    order = of(folders[name], *images, size=(32, 64), **sampling, frames=asked, fps=None if fixed else rate)
    made = others.ask(order)
    assert isinstance(made, VideoResult), made
    size = made.height, made.width, made.frames, made.fps
    assert (*size, made.steps) == (32, 64, count, rate, 2 if preset is None else 7)
    words += [text for name, value in sampling.items() for text in (f"--{name}", value)]
    flags = ["--model", folders[name], "--size", "32x64", "--frames", asked, *([] if fixed else ["--fps", rate])]
    with av.open(io.BytesIO(made.file), "r") as file:
        assert len(file.streams.audio) == sounds
    (theirs, expected), (ours, stored) = frames(sampled(tmp_path / "x.mp4", *flags, *words)), frames(made)
    assert ours.shape == theirs.shape == (count, 32, 64, 3)
    assert stored["pixels"] == expected["pixels"]  # before the encoder, which has other bits once in a thousand times
    assert abs(ours - theirs).mean() < 4
    other, changed = frames(others.ask(replace(order, seed=4)))
    assert changed["pixels"] != stored["pixels"]
    assert abs(ours - other).mean() > 4
    values = stored["prompt"], stored["frames"], stored["seed"], stored["rate"], len(stored.get("images", ()))
    assert values == ("a red cat", count, 3, rate, len(images))


SMALL = Image.fromarray(INPUT).resize((32, 24), Image.Resampling.LANCZOS)
UPPER = np.zeros(INPUT.shape[:2], np.uint8)
UPPER[:32] = 255
STARTS: dict[str, list[str]] = {  # classes of diffusers, and what their call takes besides
    "FluxInpaintPipeline": ["image", "mask_image"],
    "FluxControlNetPipeline": ["control_image"],
    "FluxControlNetImg2ImgPipeline": ["image", "control_image"],
    "FluxControlNetInpaintPipeline": ["image", "mask_image", "control_image"],
}


def of_diffusers(rank: int, world: int, device: torch.device, folder: str, net: str) -> list[np.ndarray]:
    """What these pipelines of diffusers make with the parts that `seqpar.load` returns."""
    import diffusers  # after TRITON_INTERPRET is set

    theirs: Any = diffusers
    pipe = package.load(folder, dtype=torch.float32)
    control = theirs.FluxControlNetModel.from_pretrained(net, torch_dtype=torch.float32)
    inputs = {"image": SMALL, "mask_image": Image.fromarray(UPPER), "control_image": Image.fromarray(INPUT)}
    made = list[np.ndarray]()
    for name, takes in STARTS.items():
        more = {"controlnet": control} if "control_image" in takes else {}
        parts = {part: x for part, x in pipe.components.items() if x is not None}
        other = getattr(theirs, name)(**parts, **more)
        other.set_progress_bar_config(disable=True)
        how: dict[str, Any] = {"prompt": "a red cat", "height": 24, "width": 32, "num_inference_steps": 4}
        how |= {"controlnet_conditioning_scale": 0.7} if more else {}
        how |= {"strength": 0.6} if "image" in takes else {}
        how |= {name: inputs[name] for name in takes}
        made.append(np.asarray(other(**how, generator=torch.Generator().manual_seed(3)).images[0]))
    return made


def test_masks_and_controlnets_have_the_bits_of_the_pipelines_of_diffusers(
    others: Driver, folders: dict[str, Path], ranks: Pool, tmp_path: Path
) -> None:
    folder = folders["flux"]
    facts = others.ready.models[0]
    assert facts.controlnets == ("pose",)
    assert {*facts.takes} == {"text", "image", "image+mask", "control", "image+control", "image+mask+control"}
    assert others.ready.models[1].controlnets == ()

    def asked(takes: list[str], input: np.ndarray = INPUT, mask: np.ndarray = UPPER) -> np.ndarray:
        pixels = {"image": INPUT, "mask_image": mask, "control_image": input}
        order = of(folder, *[INPUT] * ("image" in takes), size=(24, 32), steps=4)
        (folder / "pixels").write_bytes(b"".join(pixels[name].tobytes() for name in takes))
        given: dict[str, Any] = {"strength": 0.6} if "image" in takes else {}
        if "mask_image" in takes:
            given["mask"] = InputImage(64, 80, "", 1)
        if "control_image" in takes:
            given |= {"control": InputImage(64, 80, ""), "controlnet": "pose", "control_scale": 0.7}
        return image(others.ask(replace(order, **given)))

    made = [asked(takes) for takes in STARTS.values()]
    for right in ranks.run(2, of_diffusers, str(folder), str(folders["pose"])):
        assert [np.array_equal(one, other) for one, other in zip(made, right, strict=True)] == [True] * 4
    files = {"image": INPUT, "mask_image": UPPER, "control_image": INPUT}
    for name, pixels in files.items():
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
    for takes, one in zip(STARTS.values(), made, strict=True):  # the command line has the same bits
        flags = [word for name in takes for word in (f"--{name.removesuffix('_image')}", tmp_path / f"{name}.png")]
        flags = ["--control-image" if word == "--control" else word for word in flags]
        flags += ["--strength", 0.6] if "image" in takes else []
        flags += ["--controlnet", folders["pose"], "--control-scale", 0.7] if "control_image" in takes else []
        file = sampled(tmp_path / "x.png", "--model", folder, "--size", "24x32", "--steps", 4, *flags)
        assert np.array_equal(one, np.asarray(Image.open(file)))
    assert not np.array_equal(made[0], asked(STARTS["FluxInpaintPipeline"], mask=255 - UPPER))
    assert not np.array_equal(made[1], asked(STARTS["FluxControlNetPipeline"], input=INPUT[::-1].copy()))
    assert np.array_equal(made[1], asked(STARTS["FluxControlNetPipeline"]))


# LoRAs ---------------------------------------------------------------------------------------------------------------


def test_loras_have_the_bits_of_the_command_whatever_was_merged_before(
    driver: Driver, folders: dict[str, Path], tmp_path: Path
) -> None:
    order = replace(FROG, size=(64, 48))  # height comes first
    sets = ("none", "two", "one", "one", "none", "weak", "two", "none")
    answers = [(name, driver.ask(replace(order, loras=SETS[name]))) for name in sets]
    images = {name: image(answer) for name, answer in answers}
    assert all(np.array_equal(image(answer), images[name]) for name, answer in answers)
    switched = [isinstance(answer, ImageResult) and "lora" in answer.parts_s for _, answer in answers]
    assert switched == [False, True, True, False, True, True, True, True]
    assert all(not np.array_equal(images[a], images[b]) for a in SETS for b in SETS if a != b)
    loras = [f"{folders['loras'] / lora}.safetensors:{scale}" for lora, scale in SETS["two"]]
    flags = "--steps", "6", "--size", "64x48"
    for name, words in (("none", ()), ("two", ("--lora", *loras))):
        file = sampled(tmp_path / f"{name}.png", *flags, *words, prompt=FROG.prompt)
        assert np.array_equal(images[name], np.asarray(Image.open(file)))
    assert not np.array_equal(images["none"], image(driver.ask(replace(order, seed=4))))


def test_8_bits_are_calibrated_before_the_ranks_are_ready_and_have_the_bits_of_the_command(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEQPAR_CACHE", str(tmp_path / "cache"))
    words = ("builtin-text", "builtin", "--precision", "fp8", "--loras", str(folders["loras"]))
    with replica(tmp_path, 2, *words) as ranks:
        assert [model.precision for model in ranks.ready.models] == ["fp8", "fp8"]
        made = sorted((tmp_path / "cache").iterdir())
        assert len(made) == 2
        cat = image(ranks.ask(CAT))
        plain, outlined = (image(ranks.ask(replace(FROG, loras=SETS[name]))) for name in ("none", "one"))
        for what in ("prompts", "classes"):
            assert ranks.output.count(f"GEMMs in 8 bits are centred by fixed {what}") == 1
        assert ranks.finish() == 0
    lora = "--lora", folders["loras"] / "outline.safetensors"
    for name, ours, more in (("plain", plain, ()), ("lora", outlined, lora)):
        file = sampled(tmp_path / f"{name}.png", "--steps", 6, "--precision", "fp8", *more, prompt=FROG.prompt)
        assert np.array_equal(ours, np.asarray(Image.open(file)))
    words = ("--classes", "cat", "--seed", 3, "--ranks", 2, "--dtype", "fp32", "--steps", 6, "--precision", "fp8")
    done = seqpar("sample", *words, "--out", tmp_path / "cat.png")
    assert done.returncode == 0, done.stderr
    assert sorted((tmp_path / "cache").iterdir()) == made
    sheet = grid([Image.fromarray(cat)], ["cat"])
    assert np.array_equal(np.asarray(sheet), np.asarray(Image.open(tmp_path / "cat.png")))


def interleaved(rank: int, world: int, device: torch.device) -> tuple[list[bool], list[object]]:
    """Whether images of a model with a step cache have the bits that they have alone, the last one with a fault.

    Also their numbers of computed steps.
    """
    mesh, cache = Mesh.joined(), "dbcache:mask=1010"
    checked = CheckedModel.of("builtin-text", torch.float32, mesh, {}, cache=cache)
    assert checked.facts((64, 64)).cache == cache
    small, large = replace(FROG, steps=4), replace(FROG, steps=5, size=(48, 32), prompt="a red heart")
    other_seed = replace(small, steps=5, seed=4)
    one, other = LoadedModel(checked, mesh), LoadedModel(checked, mesh)

    def made(model: LoadedModel, request: ImageRequest, wants: Callable[[], Any] = lambda: None) -> Output:
        return model.make(request, (), StepBoundary(mesh, wants))

    alone, left = [made(one, small), made(other, large)], iter([None] * 4)
    together = [made(one, large)]
    with pytest.raises(CancelledError):
        made(one, other_seed, lambda: next(left, "cancelled"))
    together += [made(one, small), made(one, large)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepCaching, "reset", lambda self: None)
        patch.setattr(_Branch, "continues", lambda self, *_: True)
        made(one, other_seed)
        together += [made(one, small)]
    pairs = zip((alone[1], *alone, alone[0]), together, strict=True)
    same = [np.array_equal(np.asarray(alone.image), np.asarray(output.image)) for alone, output in pairs]
    return same, [output.computed for output in together]


def test_a_step_cache_keeps_nothing_of_other_requests(ranks: Pool) -> None:
    for same, computed in ranks.run(2, interleaved):
        assert computed[:3] == [(3, 5), (2, 4), (3, 5)]
        assert same == [True] * 3 + [False]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--warm", "auto", "64x50"), "no served model takes --warm 64x50: got size 50x64"),
        (("--warm", "big"), "--warm big is no size; use WIDTHxHEIGHT in pixels, such as 1024x768, or auto"),
        (("--loras", "empty"), "has no files NAME.safetensors"),
        (("--controlnet", "empty"), "got --controlnet empty, expected NAME=FOLDER"),
        (("--controlnet", "pose=empty"), "got ControlNet empty, which has no config.json"),
        (("--loras", "name"), "LoRA '-odd'"),
        (("--loras", "misfit"), "LoRA misfit fits no served model"),
        (("--cache", "dbcach"), "got step cache 'dbcach', expected dbcache or taylorseer"),
        (("--min-psnr", "30"), "it bounds the error of --precision fp8"),
        (("--precision", "fp8", "--min-psnr", "9.75"), "run: seqpar verify --precision fp8 --min-psnr 9.75 --steps 25"),
    ],
)
def test_invalid_flags_end_the_start(
    words: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SOCKET, "/nowhere")
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "name", "misfit"):
        (tmp_path / name).mkdir()
    shutil.copy(LORAS["outline"], tmp_path / "name" / "-odd.safetensors")
    save_file({"transformer.nothing.lora_A.weight": torch.ones(2, 4)}, tmp_path / "misfit" / "misfit.safetensors")
    done = seqpar("replica", "builtin-text", *words, "--ranks", 1)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr


# previews ------------------------------------------------------------------------------------------------------------


def colours(answer: object) -> np.ndarray:
    """The colours of an image, or of an enlarged preview."""
    if isinstance(answer, Partial):
        small = Image.frombytes("RGB", (answer.width, answer.height), answer.pixels)
        return np.asarray(small.resize((answer.size[1], answer.size[0]), Image.Resampling.BICUBIC)).astype(float)
    return image(answer).astype(float)


def likeness(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.corrcoef(one.ravel(), other.ravel())[0, 1])


@pytest.mark.parametrize(("order", "other"), [(CAT, "rainbow"), (FROG, "a red heart")], ids=["our loop", "diffusers"])
def test_previews_show_what_comes_and_change_nothing(driver: Driver, order: ImageRequest, other: str) -> None:
    order = replace(order, size=(64, 48), steps=12)
    plain_id, watched_id = f"{order.id} plain", f"{order.id} watched"
    plain = driver.ask(replace(order, id=plain_id))
    assert plain_id not in driver.partial
    made = driver.ask(replace(order, id=watched_id, partial_images=3))
    assert colours(made).shape == (64, 48, 3)
    assert np.array_equal(colours(made), colours(plain))
    assert driver.steps[watched_id] == driver.steps[plain_id] == list(range(1, 13))  # none of the fit's runs
    parts = driver.partial[watched_id]
    sizes = [(part.index, part.height, part.width, part.size) for part in parts]
    assert sizes == [(index, 16, 12, (64, 48)) for index in range(3)]
    first, _, last = (likeness(colours(part), colours(made)) for part in parts)
    assert last > 0.85
    assert last > first > 0.5
    assert last > likeness(colours(driver.ask(replace(order, prompt=other))), colours(made)) + 0.1


def test_a_scheduler_without_estimates_is_refused_and_a_cancel_ends_a_run_with_previews(driver: Driver) -> None:
    other = replace(CAT, scheduler="DDIMInverseScheduler")
    assert isinstance(driver.ask(other), ImageResult)
    refused = driver.ask(replace(other, id="refused", partial_images=1))
    failed(refused, "mistake", "previews are not supported with this scheduler, because DDIMInverseScheduler")
    assert "refused" not in driver.steps
    failed(driver.cancel_at(replace(CAT, steps=MANY, partial_images=3), 3), "cancelled")
    assert isinstance(driver.ask(replace(CAT, id="after", partial_images=1)), ImageResult)
    assert [part.index for part in driver.partial["after"]] == [0]
