"""diffusers' modular pipelines: each loads on one and two ranks, and makes what diffusers' own pipeline makes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import av
import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

import seqpar
from seqpar.cli.args import Args
from seqpar.cli.job import check
from seqpar.convert.folder import convert
from seqpar.families._modular import OUTPUTS, hide_bars
from seqpar.loading.folder import parts_of_folder
from seqpar.loading.parts import MODULAR
from seqpar.loading.schedulers import build, taking_mu
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.diffusers import Source
from seqpar.transformer import calibration
from seqpar.transformer.parallelize import call_of
from tests.cli.runs import SAME as SAME_FILE
from tests.cli.runs import pixels, shown
from tests.support import modular, pipelines
from tests.support.meshes import mesh as mesh_of
from tests.support.pool import Pool

pytestmark = pytest.mark.slow

THEIRS: Any = diffusers  # pyright does not see what it imports lazily
UNIPC = "UniPCMultistepScheduler"
SMALL = {"height": 32, "width": 32, "num_inference_steps": 3}
LUMA = np.array([0.2126, 0.7152, 0.0722])
SAME = 2e-5  # of values in [0, 1]: two ranks add in another order


def picture() -> Image.Image:
    return Image.linear_gradient("L").resize((96, 64)).convert("RGB")


@dataclass(frozen=True)
class Row:
    """A pipeline of `tests.support.modular`. arguments: of its call, beside a prompt and `SMALL`. park: see `load`."""

    make: str
    arguments: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    workflow: str | None = None
    park: bool = False


SHORT: Mapping[str, Callable[[], Any]] = {"max_sequence_length": lambda: 32}  # tokens of a text
ROWS = {
    **{name: Row(name, SHORT) for name in ("flux", "sd3", "flux2_klein", "flux2_klein_base", "z_image", "anima")},
    **{name: Row(name) for name in ("qwen_image", "qwen_image21")},
    "flux2": Row("flux2", {"text_encoder_out_layers": lambda: (0, 1, 2), **SHORT}),
    "flux3": Row("flux3", {"max_new_tokens": lambda: 4}),
    "krea2": Row("krea2", {"max_sequence_length": lambda: 16}),
    "flux2_klein, image": Row("flux2_klein", {"image": picture, **SHORT}),
    "qwen_image, image": Row("qwen_image", {"image": picture}),
    "qwen_image21, image": Row("qwen_image21", {"image": picture, "output_resolution": lambda: 32}),
    **{name: Row(name, {"num_frames": lambda: 5}) for name in ("wan", "ltx", "hunyuan_video15")},
    "wan22_vace": Row("wan22_vace", {"num_frames": lambda: 5, "video": lambda: [picture().resize((48, 48))] * 5}),
    # its decoder computes with flex_attention, which is slow without a compiler
    "ltx25": Row(
        "ltx25", {"output_type": lambda: "latent", "frame_rate": lambda: 8.0, "max_sequence_length": lambda: 16}
    ),
    "wan_i2v": Row("wan_i2v", {"image": picture, "num_frames": lambda: 5}),
    "minimax_h3": Row("minimax_h3", park=True),  # other tests load it as it is
    "minimax_h3, first frame": Row("minimax_h3", {"image": picture}, park=True),
    "minimax_h3, last frame": Row("minimax_h3", {"last_image": picture}, park=True),
    "minimax_h3, references": Row(
        "minimax_h3", {"references": lambda: [modular.reference(picture())], "num_frames": lambda: 124}, "ref2va"
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes a tiny pipeline, once, and returns its folder."""

    @cache
    def folder(name: str) -> Path:
        return modular.saved(getattr(modular, name)(), tmp_path_factory.mktemp(name))

    return folder


def made(pipe: Any, row: Row, seed: int = 0, steps: int = 3) -> list[np.ndarray]:
    """Return the images or videos of a pipeline, and their sounds."""
    hide_bars(pipe)
    arguments = {"output_type": "np", **{name: value() for name, value in row.arguments.items()}}
    arguments |= SMALL | {"generator": torch.Generator().manual_seed(seed), "num_inference_steps": steps}
    out = pipe(prompt="a red cat", **arguments, output=[*OUTPUTS])
    return [np.asarray(out[name]) for name in ("images", "videos", "audio") if out[name] is not None]


def whole(folder: Path, workflow: str | None = None) -> Any:
    """Return diffusers' own pipeline of a folder."""
    if not (folder / MODULAR).is_file():
        return pipelines.quiet(THEIRS.DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float32))
    pipe = THEIRS.ModularPipeline.from_pretrained(str(folder), workflow=workflow)
    pipe.load_components(dtype=torch.float32)
    hide_bars(pipe)
    return pipe


def loaded(rank: int, world: int, device: torch.device, folder: str, names: tuple[str, ...]) -> list[list[np.ndarray]]:
    """Return what a pipeline makes of each row."""
    rows = [ROWS[name] for name in names]
    mesh, options = mesh_of(device, ulysses=world), {"workflow": rows[0].workflow, "park": rows[0].park}
    pipe = seqpar.load(folder, dtype=torch.float32, mesh=mesh, **options)
    results = [made(pipe, row, steps=2) for row in rows]
    seqpar.release(pipe)
    return results


def of_one_pipeline() -> list[Any]:
    """Return the names of rows that one loaded pipeline computes."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, row in ROWS.items():
        groups.setdefault((row.make, row.workflow, row.park), []).append(name)
    return [pytest.param(tuple(names), id=names[0]) for names in groups.values()]


def agree(result: list[np.ndarray], truth: list[np.ndarray], name: str) -> None:
    for one, right in zip(result, truth, strict=True):
        assert one.shape == right.shape, name
        assert abs(one - right).max() < SAME, name


@pytest.mark.parametrize("names", of_one_pipeline())
def test_two_ranks_make_what_diffusers_makes(
    ranks: Pool, folders: Callable[[str], Path], names: tuple[str, ...]
) -> None:
    rows = [ROWS[name] for name in names]
    folder = folders(rows[0].make)
    pipe = whole(folder, rows[0].workflow)
    truths, other = [made(pipe, row, steps=2) for row in rows], made(pipe, rows[0], seed=1, steps=2)
    assert all(abs(wrong - right).max() > 100 * SAME for wrong, right in zip(other, truths[0], strict=True))
    for results in ranks.run(2, loaded, str(folder), names):
        for name, result, truth in zip(names, results, truths, strict=True):
            agree(result, truth, name)


@pytest.mark.parametrize(
    ("name", "flags", "work"),
    [
        ("ltx2", {}, "3 steps of FlowMatchEulerDiscreteScheduler in LTX2ModularPipeline, guidance "),
        # whose scheduler is copied for the sound
        ("ltx2_ordinary", {"scheduler": UNIPC}, f"3 steps of {UNIPC} in LTX2Pipeline, guidance "),
    ],
)
def test_a_clip_has_sound(
    ranks: Pool, folders: Callable[[str], Path], tmp_path: Path, name: str, flags: dict[str, Any], work: str
) -> None:
    given = {"prompt": ("a red cat",), "size": "32", "steps": 3, "dtype": "fp32", "seed": 0, "frames": 9, **flags}
    (told, bars), (silent, _) = ranks.run(2, shown, Args(str(folders(name)), **given, out=tmp_path / "clip.mp4"))
    assert work in told
    assert all(bar in bars for bar in ("encoding: 100%", "denoising: 100%", "decoding: 100%"))
    assert silent == ""
    pipe = whole(folders(name))
    if name == "ltx2_ordinary":
        size = {**SMALL, "num_frames": 9, "generator": torch.Generator().manual_seed(0), "output_type": "np"}
        pipe.scheduler = taking_mu(build(dict(pipe.scheduler.config), UNIPC))
        right = pipe(prompt="a red cat", **size)
        (frames_FHW3,), (sound_CT,) = right.frames, right.audio.numpy()
    else:
        (frames_FHW3,), (sound_CT,) = made(pipe, Row(name, {"num_frames": lambda: 9}))
    with av.open(str(tmp_path / "clip.mp4")) as file:
        comment, rate = json.loads(file.metadata["comment"]), file.streams.video[0].average_rate
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]) / 255
    with av.open(str(tmp_path / "clip.mp4")) as file:
        heard_CT = np.concatenate([frame.to_ndarray() for frame in file.decode(audio=0)], axis=1)
        assert file.streams.audio[0].rate == 24000
    assert rate == comment["chosen"]["fps"] == 24
    assert frames.shape == frames_FHW3.shape
    assert alike(frames @ LUMA, frames_FHW3 @ LUMA) > 0.9  # the file has fewer colours
    count = sound_CT.shape[1]
    assert alike(heard_CT[0, :count], sound_CT[0]) > 0.8
    assert alike(heard_CT[0, :count], sound_CT[1]) < 0.5  # a negative control: the other channel


@pytest.mark.parametrize(
    ("name", "axes", "flags", "guider", "arguments"),
    [
        ("qwen_image", "cfg 2", {"guidance": 3.0, "negative_prompt": "blurry"}, 3.0, {"negative_prompt": "blurry"}),
        ("z_image", "ulysses 2", {}, None, {}),  # its guider is not enabled
        ("z_image", "ulysses 2", {"guidance": 4.0, "mesh": "ulysses=2"}, 4.0, {}),
        ("wan22", "cfg 2", {"guidance": 2.0, "frames": 5}, 2.0, {"num_frames": 5}),
        ("flux", "ulysses 2", {"guidance": 2.0}, None, {"guidance_scale": 2.0}),
    ],
)
def test_guidance_is_that_of_the_guider_and_no_axis_is_for_one_branch(
    ranks: Pool,
    folders: Callable[[str], Path],
    tmp_path: Path,
    name: str,
    axes: str,
    flags: dict[str, Any],
    guider: float | None,
    arguments: dict[str, Any],
) -> None:
    video = "num_frames" in arguments
    given = {"prompt": ("a red cat",), "size": "32", "steps": 3, "dtype": "fp32", "seed": 0, **flags}
    out = tmp_path / f"x.{'mp4' if video else 'png'}"
    (told, _), _ = ranks.run(2, shown, Args(str(folders(name)), **given, out=out))
    assert f"mesh      {axes} (2 x " in told
    assert "both halves of the cfg axis compute the same calls" not in told
    pipe = whole(folders(name))
    for part in ("guider", "guider_2") if guider is not None else ():
        if hasattr(pipe, part):
            pipe.update_components(**{part: getattr(pipe, part).new(guidance_scale=guider, enabled=True)})
    row = Row(name, {key: lambda value=value: value for key, value in arguments.items()})
    ((right,),), ((wrong,),) = made(pipe, row), made(pipe, row, seed=1)
    if video:
        with av.open(str(out)) as file:
            result = np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]) / 255
        assert alike(result @ LUMA, right @ LUMA) > 0.9 > alike(result @ LUMA, wrong @ LUMA)
        return
    assert abs(pixels(out) - right).max() <= SAME_FILE
    assert abs(pixels(out) - wrong).max() > 0.02


def test_a_pipeline_without_a_second_branch_gets_no_cfg_axis(ranks: Pool) -> None:
    assert ranks.run(2, by_default) == [[2, 1, 1, 1]] * 2


def by_default(rank: int, world: int, device: torch.device) -> list[int]:
    """Return the sizes of the cfg axis of pipelines in memory: of two branches, one, one by hooks, and no guider."""
    sizes, plain, layers = [], THEIRS.ClassifierFreeGuidance, {"auto_guidance_layers": [0], "dropout": 1.0}
    for guider in (plain(guidance_scale=4.0), plain(guidance_scale=1.0), THEIRS.AutoGuidance(**layers), None):
        kind = "Flux2KleinModularPipeline" if guider is None else "Flux2KleinBaseModularPipeline"
        pipe = modular.like(kind, pipelines.flux2_klein())
        if guider is not None:
            pipe.update_components(guider=guider)
        seqpar.parallelize(pipe)
        call: Any = call_of(pipe.transformer)
        sizes.append(call.mesh.cfg.size)
        seqpar.release(pipe)
    return sizes


def test_one_rank_makes_the_same_and_refuses_inputs_of_a_workflow_that_is_not_loaded(
    folders: Callable[[str], Path],
) -> None:
    row = ROWS["minimax_h3"]
    pipe = seqpar.load(folders("minimax_h3"), dtype=torch.float32, mesh=Mesh.single())
    with pytest.raises(AttributeError, match=r"transformer_ref is not loaded; load .*\(..., workflow='ref2va'\) for"):
        made(pipe, ROWS["minimax_h3, references"])
    agree(made(pipe, row, steps=2), made(whole(folders("minimax_h3")), row, steps=2), row.make)
    seqpar.release(pipe)


def test_a_folder_is_converted_to_8_bits_and_calibrated_by_small_videos(
    folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="is a folder of diffusers; seqpar loads it as it is"):
        convert(folders("minimax_h3"), tmp_path / "x")
    convert(folders("minimax_h3"), tmp_path / "x", precision="fp8")
    before, after = (
        parts_of_folder(x).fitted["transformer"].checkpoint for x in (folders("minimax_h3"), tmp_path / "x")
    )
    assert before.raw is None
    assert after.raw is not None
    assert after.shapes == before.shapes
    monkeypatch.setenv("SEQPAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(calibration, "SIZES", {"height": 64, "width": 64, "num_frames": 5})
    pipe = seqpar.load(tmp_path / "x", dtype=torch.bfloat16, mesh=Mesh.single(), precision="fp8")
    assert "8 of 8 GEMMs in 8 bits are centred by fixed prompts" in capsys.readouterr().out
    run, _ = calibration.fixed_run(pipe)
    assert run is not None
    sizes = [run.arguments[name] for name in ("height", "width", "num_frames")]
    assert sizes == [32, 32, 124]  # no fewer frames are taken
    seqpar.release(pipe)


def alike(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.corrcoef(one.flatten(), other.flatten())[0, 1])


@pytest.fixture(scope="module")
def source(folders: Callable[[str], Path]) -> Source:
    return Source.locate(folders("minimax_h3"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"prompt": ("a", "b")}, "2 results, but MiniMaxH3ModularPipeline takes one prompt; run it once for each"),
        ({"frames": 100}, "got --frames 100, expected 120 to 360: MiniMaxH3ModularPipeline makes no others"),
        ({"frames": 130}, "got --frames 130, expected 5 more than a multiple of 17, such as 124 or 141"),
        ({"fps": 30}, "--fps 30 .* makes 24 frames per second, with sound of their length"),
        ({"size": "36"}, "size 36x36 is not divisible by 8, as MiniMaxH3ModularPipeline needs"),
        ({"steps": 1}, "got --steps 1, expected 2 or more"),
        ({"guidance": 3.0}, "--guidance 3.0 .* MiniMaxH3ModularPipeline takes no guidance_scale"),
        ({"negative_prompt": "blurry"}, "MiniMaxH3ModularPipeline takes no negative_prompt"),
        ({"scheduler": "EulerDiscreteScheduler"}, "expected one of the same, like MiniMaxH3Scheduler"),
    ],
)
def test_flags_that_it_does_not_take_are_refused(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr("seqpar.cli.job._source", lambda *_: source)  # whose files are checked once
    with pytest.raises(ValueError, match=message):
        check(Args(**{"prompt": ("a",), "out": tmp_path / "x.mp4", **flags}), Mesh.single())


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"workflow": "t2i"}, "workflow='t2i' is none of t2va, fl2va, ref2va"),
        ({"_blocks_class_name": "MyBlocks"}, {}, r"of blocks 'MyBlocks', which diffusers .* does not have; build it"),
        ({"_class_name": "ModularPipeline"}, {}, "got a ModularPipeline of blocks 'MiniMaxH3Blocks', which"),
        ({"vae": [None, None, {"type_hint": ["os", "path"], "subfolder": "vae"}]}, {}, r"vae=\[os, path\], expected"),
        ({"vae": ["diffusers", "AutoencoderKLMiniMaxH3", {"type_hint": [], "subfolder": "../x"}]}, {}, "in subfolder="),
        (
            {"vae": ["diffusers", "AutoencoderKLMiniMaxH3", {"type_hint": [], "subfolder": "x"}]},
            {},
            "without vae, expe",
        ),
    ],
)
def test_an_index_that_describes_no_pipeline_is_refused(
    folders: Callable[[str], Path], tmp_path: Path, changes: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    folder = folders("minimax_h3")
    for part in folder.iterdir():
        (tmp_path / part.name).symlink_to(part)
    index = json.loads((folder / MODULAR).read_text()) | changes
    (tmp_path / MODULAR).unlink()
    (tmp_path / MODULAR).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=message):
        seqpar.load(tmp_path, mesh=Mesh.single(), **options)
