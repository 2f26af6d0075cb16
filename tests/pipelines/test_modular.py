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
from seqpar.families._modular import OUTPUTS, hide_bars
from seqpar.loading.parts import MODULAR
from seqpar.mesh.mesh import Mesh
from tests.cli.runs import shown
from tests.support import modular
from tests.support.meshes import mesh as mesh_of
from tests.support.pool import Pool

pytestmark = pytest.mark.slow

THEIRS: Any = diffusers  # pyright does not see what it imports lazily
SMALL = {"height": 32, "width": 32, "num_inference_steps": 3}
LUMA = np.array([0.2126, 0.7152, 0.0722])
SAME = 2e-5  # of values in [0, 1]: two ranks add in another order


def picture() -> Image.Image:
    return Image.linear_gradient("L").resize((96, 64)).convert("RGB")


@dataclass(frozen=True)
class Row:
    """A pipeline of `tests.support.modular`. arguments: of its call, beside a prompt and `SMALL`."""

    make: str
    arguments: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    workflow: str | None = None


ROWS = {
    **{name: Row(name) for name in ("flux", "sd3", "flux2_klein", "flux2_klein_base", "qwen_image", "z_image")},
    "flux3": Row("flux3", {"max_new_tokens": lambda: 4}),
    "krea2": Row("krea2", {"max_sequence_length": lambda: 16}),
    **{f"{name}, image": Row(name, {"image": picture}) for name in ("flux", "flux2_klein", "qwen_image", "z_image")},
    **{name: Row(name, {"num_frames": lambda: 5}) for name in ("wan", "wan22", "ltx")},
    "ltx2": Row("ltx2", {"num_frames": lambda: 9, "max_sequence_length": lambda: 16}),
    "wan_i2v": Row("wan_i2v", {"image": picture, "num_frames": lambda: 5}),
    "minimax_h3": Row("minimax_h3"),
    "minimax_h3, first frame": Row("minimax_h3", {"image": picture}),
    "minimax_h3, last frame": Row("minimax_h3", {"last_image": picture}),
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


def made(pipe: Any, row: Row, seed: int = 0) -> list[np.ndarray]:
    """Return the images or videos of a pipeline, and their sounds."""
    hide_bars(pipe)
    arguments = {name: value() for name, value in row.arguments.items()}
    generator = torch.Generator().manual_seed(seed)
    out = pipe(prompt="a red cat", **SMALL, **arguments, generator=generator, output_type="np", output=[*OUTPUTS])
    return [np.asarray(out[name]) for name in ("images", "videos", "audio") if out[name] is not None]


def loaded(rank: int, world: int, device: torch.device, folder: str, name: str) -> list[np.ndarray]:
    row = ROWS[name]
    pipe = seqpar.load(folder, dtype=torch.float32, mesh=mesh_of(device, ulysses=world), workflow=row.workflow)
    result = made(pipe, row)
    seqpar.release(pipe)
    return result


@pytest.mark.parametrize("name", ROWS)
def test_two_ranks_make_what_diffusers_makes(ranks: Pool, folders: Callable[[str], Path], name: str) -> None:
    row = ROWS[name]
    folder = folders(row.make)
    pipe = THEIRS.ModularPipeline.from_pretrained(str(folder), workflow=row.workflow)
    pipe.load_components(dtype=torch.float32)
    truth, other = made(pipe, row), made(pipe, row, seed=1)
    for world in (1, 2):
        for result in ranks.run(world, loaded, str(folder), name):
            for one, right, wrong in zip(result, truth, other, strict=True):
                assert one.shape == right.shape
                assert abs(one - right).max() < SAME
                assert abs(one - wrong).max() > 100 * SAME


def test_a_clip_has_sound(ranks: Pool, folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder = folders("minimax_h3")
    flags: dict[str, Any] = {"prompt": ("a red cat",), "size": "32", "steps": 3, "dtype": "fp32", "seed": 0}
    (told, bars), (silent, _) = ranks.run(2, shown, Args(str(folder), **flags, out=tmp_path / "clip.mp4"))
    assert "2 steps of MiniMaxH3Scheduler in MiniMaxH3ModularPipeline, guidance 1\n" in told
    assert all(bar in bars for bar in ("encoding: 100%", "2/2", "decoding: 100%"))
    assert silent == ""
    pipe = THEIRS.ModularPipeline.from_pretrained(str(folder))
    pipe.load_components(dtype=torch.float32)
    frames_1FHW3, sound_1CT = made(pipe, ROWS["minimax_h3"])
    with av.open(str(tmp_path / "clip.mp4")) as file:
        comment, rate = json.loads(file.metadata["comment"]), file.streams.video[0].average_rate
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]) / 255
    with av.open(str(tmp_path / "clip.mp4")) as file:
        sound = np.concatenate([frame.to_ndarray() for frame in file.decode(audio=0)], axis=1)
        assert file.streams.audio[0].rate == modular.RATE
    assert rate == comment["chosen"]["fps"] == 24
    assert frames.shape == frames_1FHW3[0].shape
    assert alike(frames @ LUMA, frames_1FHW3[0] @ LUMA) > 0.95  # the file has fewer colours
    assert alike(sound[0, : sound_1CT.shape[2]], sound_1CT[0, 0]) > 0.9
    assert alike(sound[0, : sound_1CT.shape[2]], sound_1CT[0, 1]) < 0.5  # a negative control: the other channel


def alike(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.corrcoef(one.flatten(), other.flatten())[0, 1])


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
    folders: Callable[[str], Path], tmp_path: Path, flags: dict[str, Any], message: str
) -> None:
    given = {"prompt": ("a",), "out": tmp_path / "x.mp4", **flags}
    with pytest.raises(ValueError, match=message):
        check(Args(str(folders("minimax_h3")), **given), Mesh.single())


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
