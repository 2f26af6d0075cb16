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
from tests.cli.runs import refused
from tests.pipelines.test_folder import changed
from tests.support.pool import Pool

Spoil = Callable[[Path], object]


def cut(part: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (file,) = (folder / part).glob("*.safetensors")
        file.write_bytes(file.read_bytes()[:-100])

    return spoil


def gone(file: str) -> Spoil:
    return lambda folder: (folder / file).unlink()


def config(file: str, **change: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | change))

    return spoil


def last_layer(value: float) -> Spoil:
    def spoil(folder: Path) -> None:
        (file,) = (folder / "transformer").glob("*.safetensors")
        tensors = load_file(file)
        tensors["proj_out.weight"] = torch.full_like(tensors["proj_out.weight"], value)
        save_file(tensors, file, {"format": "pt"})

    return spoil


IN_LOOP = "got pipeline .*, which fails in its loop: "
OFF: dict[str, Any] = {"relative_attention_max_distance": 0}


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("flux", cut("transformer"), ".*truncated or not a safetensors file"),
        ("flux", cut("text_encoder_2"), ".*truncated or not a safetensors file"),
        ("flux", gone("tokenizer_2/tokenizer_config.json"), ".*has no tokenizer_config.json; it is no tokenizer's fol"),
        ("flux", config("model_index.json", text_encoder_2=[None, None]), ".*has no text_encoder_2, which prompts nee"),
        (
            "flux",
            config("text_encoder/config.json", hidden_size=24),
            r".*model.safetensors: got embeddings.position_embedding.weight of shape \(16, 32\), expected",
        ),
        ("sd3", config("text_encoder_3/config.json", **OFF), "got a text_encoder_3 that fails on a prompt: math"),
        ("sd3", config("vae/config.json", shift_factor=None), f"{IN_LOOP}unsupported operand type"),
        ("sd3", config("transformer/config.json", pos_embed_max_size=""), f"{IN_LOOP}The size of tensor a"),
        ("flux", last_layer(1e35), ".*latents stopped being finite at step 2 of 2"),  # whose squares overflow
        ("flux", last_layer(float("nan")), ".*got NaN or infinity in proj_out.weight"),
    ],
)
def test_what_is_wrong_in_a_folder_is_one_message(
    folders: Callable[[str], Path], tmp_path: Path, name: str, spoil: Spoil, message: str
) -> None:
    folder = Path(shutil.copytree(folders(name), tmp_path / "copy"))
    spoil(folder)
    text = refused(folder, tmp_path / "x.png", prompt=("a",))
    assert re.match(message, text), text
    assert "\n" not in text
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


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.filterwarnings("ignore")
def test_altered_configs_end_in_a_picture_or_one_message(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """docs/inputs.md counts the configs that were run by hand."""
    folder, out, made = folders("sd3"), tmp_path / "x.png", 0
    for path, change in altered(folder, 6):
        message = None
        try:
            run(Args(str(folder), prompt=("a",), steps=2, size="24x32", out=out))
        except (ValueError, FloatingPointError) as error:
            message = str(error)
        assert message is None or ("\n" not in message and len(message) < 700), (path, change)
        assert out.exists() == (message is None), (path, change)
        out.unlink(missing_ok=True)
        made += message is None
    assert 0 < made < 6


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
    """The class of the error in which a run ends if attention returns a token less than it was given."""
    from seqpar.families._block import unrounded
    from seqpar.transformer.attention import ShardedAttention

    attend, sink = ShardedAttention.of_streams, io.StringIO()

    def less(*given: Any, **named: Any) -> Any:
        return [unrounded(x)[:, 1:] for x in attend(*given, **named)]

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(sink), redirect_stderr(sink):
        patch.setattr(ShardedAttention, "of_streams", less)
        with pytest.raises((RuntimeError, ValueError)) as error:  # (the caller looks at its class)
            run(args)
    return error.type.__name__


def test_a_wrong_split_is_a_bug_and_no_mistake_in_a_file(
    ranks: Pool, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    args = Args(str(folders("sd3")), prompt=("a",), steps=2, size="24x32", dtype="fp32", out=tmp_path / "x.png")
    assert ranks.run(2, planted, replace(args, mesh="ulysses=2")) == ["RuntimeError"] * 2
