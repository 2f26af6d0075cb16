"""`seqpar sample` with prompts: pipelines of diffusers by their own loops, and random models."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import pytest
import torch

from seqpar.cli.args import Args
from seqpar.cli.sample import run
from seqpar.loading.names import RANDOM_MODELS
from seqpar.types.flags import parsed
from tests.cli.runs import SAME, parameters, pixels, shown, theirs
from tests.support.pool import Pool

FLAGS = ("--prompt", "a red cat", "--size", "24x32", "--steps", "2", "--seed", "3", "--dtype", "fp32")
SIZE: dict[str, Any] = {"height": 24, "width": 32}


@pytest.mark.usefixtures("no_gpu")
def test_two_ranks_write_the_picture_of_one_and_of_diffusers(
    ranks: Pool, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = folders("flux")
    args = parsed(Args, ["--model", str(folder), *FLAGS, "--out", str(tmp_path / "two.png")], "sample")
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
    assert abs(two - theirs(folder, guidance_scale=3.5, **SIZE)).max() <= SAME
    assert abs(two - theirs(folder, guidance_scale=3.0, **SIZE)).max() > 0.02  # a negative control
    told = parameters(tmp_path / "two.png")["chosen"]
    assert (told["guidance"], told["prompts"]) == ("guidance 3.5 as an input", ["a red cat"])


def test_several_prompts_are_numbered_files_on_every_axis_and_guidance_is_true(
    ranks: Pool, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    made: dict[str, Any] = {"size": "24x32", "steps": 2, "seed": 3, "dtype": "fp32"}
    guided: dict[str, Any] = {"negative_prompt": "blurry", "true_guidance": 3.0, "repeat": 2}
    plain = Args(str(folders("schnell")), prompt=("a red cat", "the sea"), **made)
    for mesh, more in {"cfg=2": guided, "ulysses=2": {}, "data=2": {}}.items():
        out = tmp_path / mesh / "x.png"
        args = replace(plain, mesh=mesh, out=out, **more)
        (told, bars), (other, silent) = ranks.run(2, shown, args)
        assert f"mesh      {mesh.replace('=', ' ')} (2 x " in told
        count = 4 if more else 2
        assert f"{out.parent}/x-1.png to x-{count}.png: {count} pictures" in told
        assert ("guidance 3\n" in told, "3/3" in bars) == (bool(more), bool(more))  # two prompts and the negative one
        assert "encoding: 100%" in bars
        assert other == silent == ""
        names = {f"x-{number}.png" for number in range(1, count + 1)}
        assert {path.name for path in out.parent.iterdir()} == names
        assert abs(pixels(out.parent / "x-1.png") - pixels(out.parent / "x-2.png")).max() > 0.02  # noise of their own
    for number in (1, 2):
        first, second = (pixels(tmp_path / mesh / f"x-{number}.png") for mesh in ("ulysses=2", "data=2"))
        assert abs(first - second).max() <= SAME


def of_random(rank: int, world: int, device: torch.device, name: str, args: Args) -> tuple[str, str]:
    known = RANDOM_MODELS[name]
    (kind, model), (vae_kind, vae) = known.parts["transformer"], known.parts["vae"]
    sizes = {"joint_attention_dim": 8, "pooled_projection_dim": 8, "axes_dims_rope": (4, 6, 6)}
    few = {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2, "attention_head_dim": 16}
    narrow = {"block_out_channels": (4, 4, 4, 4), "norm_num_groups": 2, "sample_size": 64}
    parts = {"transformer": (kind, {**model, **sizes, **few}), "vae": (vae_kind, {**vae, **narrow})}
    texts = {"prompt_embeds": (512, 8), "pooled_prompt_embeds": (8,)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RANDOM_MODELS, name, replace(known, parts={**known.parts, **parts}, texts=texts))
        return shown(rank, world, device, args)


@pytest.mark.parametrize("name", RANDOM_MODELS)
def test_a_random_model_makes_pictures_of_random_texts(ranks: Pool, tmp_path: Path, name: str) -> None:
    flags: dict[str, Any] = {"prompt": ("x", "y"), "steps": 2, "true_guidance": 2.0, "mesh": "throughput"}
    (out, bars), silent = ranks.run(2, of_random, name, Args(f"random:{name}", **flags, out=tmp_path / "x.png"))
    assert "512 tokens of random numbers: no text encoder comes with this model" in out
    assert f"model     random:{name}\nweights   random\n" in out
    assert "encoding" not in bars
    assert silent == ("", "")
    assert pixels(tmp_path / "x-2.png").shape == (64, 64, 3)


def test_any_other_pipeline_runs_by_its_own_loop(ranks: Pool, folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder, out = folders("sd3"), tmp_path / "x.png"
    args = parsed(Args, ["--model", str(folder), *FLAGS, "--negative-prompt", "blurry", "--guidance", "3"], "sample")
    (told, bars), other = ranks.run(2, shown, replace(args, out=out))
    assert "in StableDiffusion3Pipeline, guidance 3\n" in told
    assert "ms per step" in told
    assert "2/2" in bars
    assert other == ("", "")
    truth = theirs(folder, negative_prompt="blurry", guidance_scale=3.0, **SIZE)
    assert abs(pixels(out) - truth).max() <= SAME


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


def test_a_step_cache_says_how_many_steps_it_computed(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """Of two transformers, added up. It is off while they are verified."""
    flags: dict[str, Any] = {"size": "32x32", "steps": 6, "frames": 5, "cache": "dbcache:mask=10", "verify": True}
    args = Args(str(folders("wan22")), prompt=("a red cat",), **flags, out=tmp_path / "x.mp4")
    out, _ = shown(0, 1, torch.device("cpu"), args)
    assert "every step holds" in out
    assert "x.mp4: 1 videos, steps computed 4 of 6, " in out
    with av.open(str(args.out)) as file:
        told = json.loads(file.metadata["comment"])
    assert (told["cache"], told["steps_computed"]) == (args.cache, [4, 6])
    assert told["chosen"]["cache"] == ["dbcache:threshold=0.1,head=1,mask=10"] * 2
