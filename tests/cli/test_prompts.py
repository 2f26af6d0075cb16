"""`seqpar sample` with prompts: pipelines of diffusers by their own loops, with presets, and what is refused."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
import tyro
from PIL import Image

from seqpar.cli.args import Args
from seqpar.cli.sample import run
from seqpar.loading.names import PRESETS
from seqpar.loop.blueprint import Blueprint
from tests.cli.test_sample import parameters
from tests.support.pool import Pool

FLAGS = ("--prompt", "a red cat", "--size", "24x32", "--steps", "2", "--seed", "3", "--dtype", "fp32")
PICTURE = str(Path(__file__).parents[2] / "docs" / "builtin.png")
SAME = 2  # of 255, because two ranks add in another order


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB"), dtype=np.int16)


def shown(rank: int, world: int, device: torch.device, args: Args) -> tuple[str, str]:
    """What a run prints on this rank, and its bars."""
    out, bars = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(bars):
        run(args)
    return out.getvalue(), bars.getvalue()


def theirs(folder: Path, **arguments: Any) -> np.ndarray:
    """The picture that diffusers alone makes of these flags, or the video."""
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    pipe: Any = DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    sizes = {"height": 24, "width": 32, "num_inference_steps": 2}
    generator = torch.Generator().manual_seed(3)
    made = pipe(prompt="a red cat", generator=generator, output_type="np", **sizes, **arguments)
    return np.asarray(made.images[0] if hasattr(made, "images") else made.frames[0])


@pytest.mark.usefixtures("no_gpu")
def test_two_ranks_write_the_picture_of_one_and_of_diffusers(
    ranks: Pool, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = folders("flux")
    words = ["--model", str(folder), *FLAGS, "--out", str(tmp_path / "two.png")]
    args = tyro.cli(Args, args=words)
    (out, bars), nothing = ranks.run(2, shown, replace(args, mesh="ulysses=2"))
    for text in (
        "mesh      ulysses 2 (2 x CPU, gloo)" if ranks.device == "cpu" else "mesh      ulysses 2 (2 x ",
        "text      512 tokens per prompt, encoded on rank 0",
        "1 pictures, 48 tokens, float32, 2 steps of FlowMatchEulerDiscreteScheduler in FluxPipeline",
        "state     as the pipeline keeps it: the transformer has weights of float32",
        "guidance 3.5 as an input",
    ):
        assert text in out
    assert all(bar in bars for bar in ("encoding: 100%", "2/2", "decoding: 100%"))
    assert nothing == ("", "")
    run(replace(args, out=tmp_path / "one.png"))
    two, one = pixels(tmp_path / "two.png"), pixels(tmp_path / "one.png")
    assert two.shape == (24, 32, 3)
    assert abs(two - one).max() <= SAME
    assert abs(two / 255 - theirs(folder, guidance_scale=3.5)).max() <= (SAME + 0.5) / 255
    assert abs(two / 255 - theirs(folder, guidance_scale=3.0)).max() > 0.02  # a negative control
    told = parameters(tmp_path / "two.png")
    assert told["chosen"]["guidance"] == "guidance 3.5 as an input"
    assert told["chosen"]["prompts"] == ["a red cat"]


def test_several_prompts_are_numbered_files_and_guidance_is_true(
    ranks: Pool, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    args = Args(
        str(folders("schnell")),
        prompt=("a red cat", "the sea"),
        negative_prompt="blurry",
        true_guidance=3.0,
        repeat=2,
        size="24x32",
        steps=2,
        seed=3,
        dtype="fp32",
        out=tmp_path / "x.png",
    )
    (out, bars), (other, silent) = ranks.run(2, shown, args)
    assert "cfg 2" in out
    assert "guidance 3\n" in out
    assert f"{tmp_path}/x-1.png to x-4.png: 4 pictures" in out
    assert "encoding: 100%" in bars
    assert "3/3" in bars  # two prompts and the negative one
    assert other == silent == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"x-{number}.png" for number in range(1, 5)]
    assert abs(pixels(tmp_path / "x-1.png") - pixels(tmp_path / "x-2.png")).max() > 5  # noise of their own


def of_preset(rank: int, world: int, device: torch.device, name: str, args: Args) -> tuple[str, str]:
    """What a run of a preset prints, whose model is tiny."""
    known = PRESETS[name]
    (kind, model), (vae_kind, vae) = known.parts["transformer"], known.parts["vae"]
    sizes = {"joint_attention_dim": 8, "pooled_projection_dim": 8, "axes_dims_rope": (4, 6, 6)}
    few = {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2, "attention_head_dim": 16}
    narrow = {"block_out_channels": (4, 4, 4, 4), "norm_num_groups": 2, "sample_size": 64}
    parts = {"transformer": (kind, {**model, **sizes, **few}), "vae": (vae_kind, {**vae, **narrow})}
    texts = {"prompt_embeds": (512, 8), "pooled_prompt_embeds": (8,)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, name, replace(known, parts={**known.parts, **parts}, texts=texts))
        return shown(rank, world, device, args)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_makes_pictures_of_random_texts(ranks: Pool, tmp_path: Path, name: str) -> None:
    args = Args(
        f"random:{name}", prompt=("x", "y"), steps=2, true_guidance=2.0, mesh="throughput", out=tmp_path / "x.png"
    )
    (out, bars), silent = ranks.run(2, of_preset, name, args)
    assert "512 tokens of random numbers: no text encoder comes with this model" in out
    assert f"model     random:{name}\nweights   random (preset)\n" in out
    assert "encoding" not in bars
    assert silent == ("", "")
    assert pixels(tmp_path / "x-2.png").shape == (64, 64, 3)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_a_folder_is_planned_for_the_tokens_of_the_run(folders: Callable[[str], Path], name: str) -> None:
    args = Args(str(folders(name)), prompt=("x",), true_guidance=2.0 if name == "flux" else None, dry_run=(2,))
    for size, tokens in (("24x32", 48), ("32x32", 64)):
        out, _ = shown(0, 1, torch.device("cpu"), replace(args, size=size))
        assert f"1 picture(s) of {tokens} tokens" in out
        assert "2 x NVIDIA H200: cfg 2, " in out


@pytest.mark.usefixtures("no_gpu")
def test_a_plan_of_a_preset_is_that_of_its_published_size() -> None:
    out, _ = shown(0, 1, torch.device("cpu"), Args("random:FLUX.1-dev", prompt=("x",), size="1024", dry_run=(1, 2)))
    assert "1 picture(s) of 4096 tokens, guidance 3.5 as an input, bfloat16" in out
    assert "2 x NVIDIA H200: ulysses 2" in out
    assert "a step: 74" in out


def test_the_data_axis_gives_ranks_pictures_of_their_own(
    ranks: Pool, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    args = Args(str(folders("schnell")), prompt=("a red cat", "the sea"), size="24x32", steps=2, dtype="fp32")
    for out, mesh in (("one", "ulysses=2"), ("two", "data=2")):
        (told, _), _ = ranks.run(2, shown, replace(args, mesh=mesh, out=tmp_path / f"{out}.png"))
        assert f"mesh      {mesh.replace('=', ' ')} (2 x " in told
    for number in (1, 2):
        assert abs(pixels(tmp_path / f"one-{number}.png") - pixels(tmp_path / f"two-{number}.png")).max() <= SAME


@pytest.mark.parametrize("world", [2])
def test_any_other_pipeline_runs_by_its_own_loop(
    ranks: Pool, folders: Callable[[str], Path], tmp_path: Path, world: int
) -> None:
    folder = folders("sd3")
    args = Args(
        str(folder),
        prompt=("a red cat",),
        negative_prompt="blurry",
        guidance=3.0,
        size="24x32",
        steps=2,
        seed=3,
        dtype="fp32",
        out=tmp_path / "x.png",
    )
    (out, bars), *others = ranks.run(world, shown, args)
    assert "in StableDiffusion3Pipeline, guidance 3\n" in out
    assert "ms per step" in out
    assert "2/2" in bars
    assert others == [("", "")] * (world - 1)
    truth = theirs(folder, negative_prompt="blurry", guidance_scale=3.0)
    assert abs(pixels(tmp_path / "x.png") / 255 - truth).max() <= (SAME + 0.5) / 255


def test_frames_of_a_text_are_a_video(ranks: Pool, folders: Callable[[str], Path], tmp_path: Path) -> None:
    flags: dict[str, Any] = {"size": "32x32", "steps": 2, "frames": 5, "guidance": 3.0}
    args = Args(str(folders("wan")), prompt=("a red cat",), **flags, out=tmp_path / "x.mp4")
    (out, bars), (other, _) = ranks.run(2, shown, args)
    assert f"{tmp_path}/x.mp4: 1 videos, " in out
    assert all(bar in bars for bar in ("prompt/s]", "step/s]", "video/s]"))
    assert other == ""
    assert [path.name for path in tmp_path.iterdir()] == ["x.mp4"]
    with av.open(str(tmp_path / "x.mp4")) as file:
        told = json.loads(file.metadata["comment"])
        assert sum(1 for _ in file.decode(video=0)) == 5
        assert file.streams.video[0].average_rate == told["chosen"]["fps"] == 16
    assert (told["guidance"], told["pixels"]) == (3.0, out.split()[-1])


def refused(folder: Path, out: Path, flags: dict[str, Any]) -> str:
    with pytest.raises((ValueError, FloatingPointError)) as error:  # (the caller looks at the message)
        run(Args(str(folder), **{"steps": 2, "size": "24x32", "out": out, **flags}))
    return str(error.value)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("flux", {}, "needs --prompt: FluxPipeline takes prompts"),
        ("flux", {"prompt": ("a",), "classes": ("1",)}, "--classes 1 with --model"),
        ("flux", {"prompt": ("a",), "size": "24x30"}, "got size 24x30, expected multiples of 4 (patch 2 x decoder 2)"),
        ("flux", {"prompt": ("a",), "negative_prompt": "b"}, "--negative-prompt b with"),
        ("flux", {"prompt": ("a",), "frames": 5}, "FluxPipeline generates images, no videos"),
        ("flux", {"prompt": ("a",), "guidance_channels": 3}, "diffusers' loop has no such setting"),
        ("flux", {"prompt": ("a",), "respacing": "25"}, "only models of classes take it"),
        ("flux", {"prompt": ("a",), "steps": 1001}, "got 1001 steps, expected 1 to 1000"),
        ("flux", {"prompt": ("a",), "mesh": "cfg=2"}, "got cfg=2 with guidance 1.0, expected guidance > 1"),
        (
            "schnell",
            {"prompt": ("a",), "guidance": 3.5},
            "the transformer of this FluxPipeline takes no scale as an input; use --true-guidance",
        ),
        ("sd3", {}, "needs --prompt: StableDiffusion3Pipeline takes prompts"),
        ("sd3", {"prompt": ("a",), "frames": 5}, "--frames 5 with --model"),
        ("sd3", {"prompt": ("a",), "true_guidance": 2.0}, "StableDiffusion3Pipeline takes no true_cfg_scale"),
        ("wan", {"prompt": ("a",), "dry_run": ()}, "no plan: the files of WanPipeline do not state"),
        ("sd3", {"prompt": ("a",), "size": "24x30"}, "got size 24x30, expected multiples of 4 (patch 2 x decoder 2)"),
        ("flux", {"prompt": ("a",), "scheduler": "DDIMScheduler"}, "got scheduler 'DDIMScheduler' of diffusion by"),
        (
            "flux",
            {"prompt": ("a",), "scheduler": "FlowMatchHeunDiscreteScheduler"},
            "expected one of flow matching that takes sigmas",
        ),
        ("sd3", {"prompt": ("a",), "strategy": "best"}, "got strategy 'best'"),
        ("wan", {"prompt": ("a",)}, "expected a name that ends in .mp4"),
        ("wan", {"prompt": ("a",), "frames": 7}, "got --frames 7, expected 1 more than a multiple of 4, such as 5"),
        ("wan", {"prompt": ("a",), "image": (PICTURE,)}, "WanPipeline takes no input image"),
        ("flux", {"prompt": ("a",), "image": ("no.png",)}, "got --image no.png, which cannot be read: No such file"),
        ("flux", {"prompt": ("a",), "image": (PICTURE,), "strength": 2.0}, "got --strength 2.0, expected 0.001 to 1"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value if isinstance(value, str) else None,
)
def test_a_mistake_is_one_sentence_before_weights_load(
    folders: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    flags: dict[str, Any],
    message: str,
) -> None:
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    folder = folders(name)
    monkeypatch.setattr(Blueprint, "build", refuse)
    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", refuse)
    told = refused(folder, tmp_path / "x.png", flags)
    assert message in told
    assert "\n" not in told
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_gpu")
def test_a_prompt_for_a_model_of_classes_is_refused(folder: Path, tmp_path: Path) -> None:
    told = refused(folder, tmp_path / "x.png", {"prompt": ("a cat",), "size": "64"})
    assert told.endswith("this model generates images of classes (--classes)")
