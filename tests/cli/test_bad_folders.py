"""Pipeline folders with something wrong in them: one message before or in the run, and no file.

What is wrong in a file is told as such; what may be a bug of this package keeps its traceback.
"""

from __future__ import annotations

import io
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from seqpar.cli import summary as progress
from seqpar.cli.args import Args
from seqpar.cli.sample import run
from tests.cli.test_prompts import refused
from tests.pipelines.test_folder import changed
from tests.support.pool import Pool


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("transformer", "truncated or not a safetensors file"),
        ("text_encoder_2", "truncated or not a safetensors file"),
        ("tokenizer_2", "has no tokenizer_config.json; it is no tokenizer's folder"),
        ("model_index.json", "has no text_encoder_2, which prompts need"),
        ("config.json", "model.safetensors: got embeddings.position_embedding.weight of shape (16, 32), expected"),
    ],
)
def test_a_bad_folder_is_refused_by_name(
    folders: Callable[[str], Path], tmp_path: Path, spoil: str, message: str
) -> None:
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
        ("flux", "text_encoder_2", "got a text_encoder_2 that fails on a prompt: math domain error"),
        ("sd3", "text_encoder_3", "got a text_encoder_3 that fails on a prompt: math domain error"),
    ],
)
def test_an_encoder_that_fails_on_a_prompt_is_named(
    folders: Callable[[str], Path], tmp_path: Path, name: str, encoder: str, message: str
) -> None:
    with changed(folders(name) / encoder / "config.json", relative_attention_max_distance=0):
        assert refused(folders(name), tmp_path / "x.png", {"prompt": ("a",)}) == message
    assert not (tmp_path / "x.png").exists()


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("vae", {"shift_factor": None}, "unsupported operand type"),
        ("transformer", {"pos_embed_max_size": ""}, "The size of tensor a"),
        ("scheduler", {"shift_terminal": True}, "index 3"),
    ],
)
def test_a_value_that_fails_in_diffusers_loop_is_one_message(
    folders: Callable[[str], Path], tmp_path: Path, file: str, change: dict[str, Any], message: str
) -> None:
    folder = folders("sd3")
    with changed(folder / file / ("scheduler_config.json" if file == "scheduler" else "config.json"), **change):
        told = refused(folder, tmp_path / "x.png", {"prompt": ("a",)})
    assert re.match(rf"got pipeline {folder}, which fails in its loop: {message}", told), told
    assert not (tmp_path / "x.png").exists()


WRONG = (None, 0, -1, 7, "x", [], [1], 1.5, True, {}, -0.5)


def altered(folder: Path, count: int) -> Iterator[tuple[Path, str]]:
    """Let a field of one of a pipeline's configs have another value, `count` times; yield the file and the change."""
    files = [path for path in sorted(folder.rglob("*.json")) if "tokenizer" not in str(path.parent)]
    fields = [(path, name) for path in files for name in json.loads(path.read_text())]
    chance = random.Random(5)
    for _ in range(count):
        (path, name), value = chance.choice(fields), chance.choice(WRONG)
        with changed(path, **{name: value}):
            yield path, f"{name}={value}"


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
    folder, out, made = folders("sd3"), tmp_path / "x.png", 0
    for path, change in altered(folder, 10):
        told = ending(folder, out)
        assert told is None or ("\n" not in told and len(told) < 700), (path, change)
        assert out.exists() == (told is None), (path, change)
        out.unlink(missing_ok=True)
        made += told is None
    assert 0 < made < 10


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
    from seqpar.transformer.attention import ShardedAttention

    right = ShardedAttention.of_streams
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        patch.setattr(
            ShardedAttention, "of_streams", lambda *given, **named: [x[:, 1:] for x in right(*given, **named)]
        )
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
    copy = Path(shutil.copytree(folders("flux"), tmp_path / "copy"))
    (file,) = (copy / "transformer").glob("*.safetensors")
    tensors = load_file(file)
    whole = tensors["proj_out.weight"]
    tensors["proj_out.weight"] = torch.full_like(whole, 1e35)  # whose squares overflow in the second step
    save_file(tensors, file, {"format": "pt"})
    assert "latents stopped being finite at step 2 of 2" in refused(copy, tmp_path / "x.png", {"prompt": ("a",)})
    tensors["proj_out.weight"] = torch.full_like(whole, float("nan"))
    save_file(tensors, file, {"format": "pt"})
    assert "got NaN or infinity in proj_out.weight" in refused(copy, tmp_path / "x.png", {"prompt": ("a",)})
