"""`seqpar sample` with prompts: FLUX by its own loop, other diffusers pipelines by theirs, and what is refused."""

from __future__ import annotations

import io
import json
import random
import re
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from seqpar.cli import progress
from seqpar.cli.args import Args
from seqpar.cli.sample import run
from seqpar.pipelines import adapted
from seqpar.weights.find import Blueprint
from tests.cli.test_sample import parameters
from tests.support.pool import Pool

SAME = 2  # of 255, because two ranks add in another order


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes a tiny pipeline of tests/support/pipelines.py, once, and returns its folder."""
    from tests.support import pipelines  # loads diffusers, after TRITON_INTERPRET is set

    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            pipe = pipelines.flux(False) if name == "schnell" else getattr(pipelines, name)()
            pipe.save_pretrained(made[name])
        return made[name]

    return folder


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
    flags: dict[str, Any] = {"prompt": ("a red cat",), "size": "24x32", "steps": 2, "seed": 3, "dtype": "fp32"}
    args = Args(str(folder), **flags, out=tmp_path / "two.png")
    (out, bars), nothing = ranks.run(2, shown, replace(args, mesh="ulysses=2"))
    for text in (
        "mesh      ulysses 2 (2 x ",
        "text      512 tokens a prompt, encoded on rank 0 before",
        "1 pictures, 48 tokens, float32, 2 steps of FlowMatchEulerDiscreteScheduler on local tokens",
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


def test_a_preset_makes_a_preview_of_random_texts(ranks: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from seqpar.models import flux

    config = flux.Config(1, 1, 2, 16, 8, 8, True, (4, 6, 6), 2, 4, 4, 8)
    monkeypatch.setitem(flux.PRESETS, "flux.1-dev", config)
    out, _ = shown(0, 1, torch.device("cpu"), Args("flux.1-dev", prompt=("x",), steps=1, out=tmp_path / "x.png"))
    assert "512 tokens of random numbers: no text encoder comes with this model" in out
    assert "first three latent channels" in out
    assert pixels(tmp_path / "x.png").shape == (64, 64, 3)


@pytest.mark.parametrize("world", [1, 2])
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
    assert "loop      diffusers': seqpar has no loop of its own for" in out
    assert "ms a step" in out
    assert "2/2" in bars
    assert others == [("", "")] * (world - 1)
    truth = theirs(folder, negative_prompt="blurry", guidance_scale=3.0)
    assert abs(pixels(tmp_path / "x.png") / 255 - truth).max() <= (SAME + 0.5) / 255


# imageio leaves pipes to ffmpeg open when it has read a video
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_video_is_written_by_diffusers_exporter(ranks: Pool, folders: Callable[[str], Path], tmp_path: Path) -> None:
    imageio = pytest.importorskip("imageio.v3")
    pytest.importorskip("imageio_ffmpeg")
    flags: dict[str, Any] = {"size": "32x32", "steps": 2, "frames": 5, "fps": 8, "guidance": 3.0}
    args = Args(str(folders("wan")), prompt=("a red cat",), **flags, out=tmp_path / "x.mp4")
    (out, _), (other, _) = ranks.run(2, shown, args)
    assert f"{tmp_path}/x.mp4: " in out
    assert other == ""
    assert [path.name for path in tmp_path.iterdir()] == ["x.mp4"]
    assert imageio.imread(tmp_path / "x.mp4").shape == (5, 32, 32, 3)


def refused(folder: Path, out: Path, flags: dict[str, Any]) -> str:
    with pytest.raises((ValueError, FloatingPointError)) as error:  # (the caller looks at the message)
        run(Args(str(folder), **{"steps": 2, "size": "24x32", "out": out, **flags}))
    return str(error.value)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("flux", {}, "without --prompt, expected one: it makes pictures of texts"),
        ("flux", {"prompt": ("a",), "classes": ("1",)}, "got --classes 1 with --model"),
        ("flux", {"prompt": ("a",), "size": "24x30"}, "got size 24x30, expected multiples of 4 (patch 2 x decoder 2)"),
        ("flux", {"prompt": ("a",), "negative_prompt": "b"}, "got --negative-prompt b with"),
        ("flux", {"prompt": ("a",), "frames": 5}, "expected none: this model makes no videos"),
        ("flux", {"prompt": ("a",), "guidance_channels": 3}, "expected --true-guidance over 1, too"),
        (
            "flux",
            {"prompt": ("a",), "respacing": "25"},
            "expected none: it is for models that make pictures of classes",
        ),
        ("flux", {"prompt": ("a",), "steps": 1001}, "got 1001 steps, expected 1 to 1000"),
        ("flux", {"prompt": ("a",), "mesh": "cfg=2"}, "got cfg=2 with guidance 1.0, expected guidance > 1"),
        (
            "schnell",
            {"prompt": ("a",), "guidance": 3.5},
            "got --guidance 3.5 for a model without the scale as an input",
        ),
        ("sd3", {}, "without --prompt, expected one: StableDiffusion3Pipeline takes texts"),
        ("sd3", {"prompt": ("a",), "frames": 5}, "got --frames 5 with --model"),
        ("sd3", {"prompt": ("a",), "true_guidance": 2.0}, "StableDiffusion3Pipeline takes no true_cfg_scale"),
        ("sd3", {"prompt": ("a",), "dry_run": ()}, "got a plan with StableDiffusion3Pipeline, expected neither"),
        ("sd3", {"prompt": ("a",), "strategy": "best"}, "got strategy 'best'"),
        ("wan", {"prompt": ("a",)}, "expected a name that ends in .mp4"),
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
    monkeypatch.setattr(adapted, "_check_exporter", lambda name: None)  # its packages are not needed here
    told = refused(folder, tmp_path / "x.png", flags)
    assert message in told
    assert "\n" not in told
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_gpu")
def test_a_prompt_for_a_model_of_classes_is_refused(folder: Path, tmp_path: Path) -> None:
    told = refused(folder, tmp_path / "x.png", {"prompt": ("a cat",), "size": "64"})
    assert told.endswith("expected none: this model makes pictures of classes (--classes)")


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("transformer", "truncated or not a safetensors file"),
        ("text_encoder_2", "truncated or not a safetensors file"),
        ("tokenizer_2", "without tokenizer_config.json, expected a tokenizer's folder"),
        ("model_index.json", "without text_encoder_2, expected one: prompts need it"),
        ("config.json", "got text_encoder of hidden_size 24, expected the transformer's pooled_projection_dim of 32"),
    ],
)
def test_a_bad_folder_is_refused_by_name(
    folders: Callable[[str], Path], tmp_path: Path, spoil: str, message: str
) -> None:
    import shutil

    copy = Path(shutil.copytree(folders("flux"), tmp_path / "copy"))
    if spoil == "tokenizer_2":
        (copy / spoil / "tokenizer_config.json").unlink()
    elif spoil.endswith(".json"):
        path = copy / "text_encoder" / spoil if spoil == "config.json" else copy / spoil
        change = {"hidden_size": 24} if spoil == "config.json" else {"text_encoder_2": [None, None]}
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    else:
        (file,) = (copy / spoil).glob("*.safetensors")
        file.write_bytes(file.read_bytes()[:-100])
    assert message in refused(copy, tmp_path / "x.png", {"prompt": ("a",)})


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("name", "encoder", "message"),
    [
        ("flux", "text_encoder_2", "got text encoders that fail on a prompt: math domain error"),
        ("sd3", "text_encoder_3", "got a text_encoder_3 that fails on a prompt: math domain error"),
    ],
)
def test_an_encoder_that_fails_on_a_prompt_is_named(
    folders: Callable[[str], Path], tmp_path: Path, name: str, encoder: str, message: str
) -> None:
    import shutil

    copy = Path(shutil.copytree(folders(name), tmp_path / "copy"))
    path = copy / encoder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"relative_attention_max_distance": 0}))
    assert refused(copy, tmp_path / "x.png", {"prompt": ("a",)}) == message
    assert not (tmp_path / "x.png").exists()


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("vae", {"shift_factor": None}, r"pipeline_stable_diffusion_3.py, line \d+\): unsupported operand type"),
        ("transformer", {"pos_embed_max_size": ""}, r"embeddings.py, line \d+\): The size of tensor a"),
        ("scheduler", {"shift_terminal": True}, r"scheduling_flow_match_euler_discrete.py, line \d+\): index 3"),
    ],
)
def test_a_value_that_fails_in_diffusers_loop_is_one_message(
    folders: Callable[[str], Path], tmp_path: Path, file: str, change: dict[str, Any], message: str
) -> None:
    import shutil

    copy = Path(shutil.copytree(folders("sd3"), tmp_path / "copy"))
    path = copy / file / ("scheduler_config.json" if file == "scheduler" else "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    told = refused(copy, tmp_path / "x.png", {"prompt": ("a",)})
    assert re.match(rf"got pipeline {copy}, which fails in its loop \({message}", told), told
    assert not (tmp_path / "x.png").exists()


WRONG = (None, 0, -1, 7, "x", [], [1], 1.5, True, {}, 1e30, 10**9, -0.5)


def altered(folder: Path, count: int) -> Iterator[tuple[Path, str]]:
    """Let a field of one of a pipeline's configs have another value, `count` times; yield the file and the change."""
    files = [path for path in sorted(folder.rglob("*.json")) if "tokenizer" not in str(path.parent)]
    fields = [(path, name) for path in files for name in json.loads(path.read_text())]
    chance = random.Random(5)
    for _ in range(count):
        (path, name), value = chance.choice(fields), chance.choice(WRONG)
        before = path.read_text()
        path.write_text(json.dumps(json.loads(before) | {name: value}))
        yield path, f"{name}={value}"
        path.write_text(before)


def ending(folder: Path, out: Path) -> str | None:
    """Return the message in which a run ends, or None if it makes a picture."""
    try:
        run(Args(str(folder), prompt=("a",), steps=2, size="24x32", out=out))
    except (ValueError, FloatingPointError) as error:
        return str(error)
    return None


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.filterwarnings("ignore")
def test_altered_configs_end_in_a_picture_or_one_message(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """docs/reliability.md counts those that were run outside of the tests."""
    import shutil

    folder, out, made = Path(shutil.copytree(folders("sd3"), tmp_path / "copy")), tmp_path / "x.png", 0
    for path, change in altered(folder, 50):
        told = ending(folder, out)
        assert told is None or ("\n" not in told and len(told) < 700), (path, change)
        assert out.exists() == (told is None), (path, change)
        out.unlink(missing_ok=True)
        made += told is None
    assert 0 < made < 50


@pytest.mark.usefixtures("no_gpu")
def test_an_error_of_ours_in_diffusers_loop_stays_as_it_is(
    folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(progress, "tqdm", fail)
    with pytest.raises(RuntimeError, match=r"^a bug$"):
        run(Args(str(folders("sd3")), prompt=("a",), steps=2, size="24x32", out=tmp_path / "x.png"))


def planted(rank: int, world: int, device: torch.device, args: Args) -> str:
    """Return the class of the error in which a run ends if attention returns a token less than it was given."""
    from seqpar.adapter.attention import SplitAttention

    right = SplitAttention.compute
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        patch.setattr(SplitAttention, "compute", lambda *given: right(*given)[:, 1:])
        with pytest.raises((RuntimeError, ValueError)) as error:  # (the caller looks at its class)
            run(args)
    return error.type.__name__


def test_a_wrong_split_is_a_bug_and_no_mistake_in_a_file(
    ranks: Pool, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    args = Args(str(folders("sd3")), prompt=("a",), steps=2, size="24x32", dtype="fp32", out=tmp_path / "x.png")
    assert ranks.run(2, planted, replace(args, mesh="ulysses=2")) == ["RuntimeError"] * 2


@pytest.mark.usefixtures("no_gpu")
def test_latents_that_are_not_finite_are_refused(folders: Callable[[str], Path], tmp_path: Path) -> None:
    import shutil

    copy = Path(shutil.copytree(folders("flux"), tmp_path / "copy"))
    (file,) = (copy / "transformer").glob("*.safetensors")
    tensors = load_file(file)
    tensors["proj_out.weight"] = torch.full_like(tensors["proj_out.weight"], float("inf"))
    save_file(tensors, file, {"format": "pt"})
    assert "latents stopped being finite at step 1 of 2" in refused(copy, tmp_path / "x.png", {"prompt": ("a",)})
