"""A mistake in the flags is the same message on every rank, before weights load, and nothing is written.

Ranks that run already parse and run here as under torchrun; `test_ranks.py` tests how processes end then.
"""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
import tyro

import seqpar.local
from seqpar.cli.args import Args
from seqpar.cli.sample import run
from seqpar.loop.blueprint import Blueprint
from seqpar.types.plugins import plugins
from tests.support.meshes import LAYOUTS
from tests.support.pool import Pool

LOCALS = ", ".join(plugins(seqpar.local))
NOTHING_WRONG = "weights are read"


class ReadError(Exception):
    """Options have passed all checks: weights would be read now."""


def told(rank: int, world: int, device: torch.device, words: list[str]) -> tuple[str, str]:
    """The error that these words end in, and what was printed before it."""

    def build(*_: object) -> None:
        raise ReadError

    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(shown), redirect_stderr(shown):
        patch.setattr(Blueprint, "build", build)
        try:
            run(tyro.cli(Args, args=words))
        except ValueError as error:
            return str(error), shown.getvalue()
        except ReadError:
            return NOTHING_WRONG, shown.getvalue()
    return "pictures were made", shown.getvalue()


def words(folder: Path, out: Path, flags: tuple[str, ...]) -> list[str]:
    """These flags, and right ones for all others."""
    right = {"--mesh": "ulysses=2", "--model": str(folder), "--out": str(out), "--steps": "2", "--size": "64"}
    return [word for name, value in right.items() if name not in flags for word in (name, value)] + list(flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--mesh", "rings=2"), "got --mesh rings=2, expected axes like cfg=2,ulysses=2"),
        (("--model", "nothing-there"), "got model 'nothing-there': there is no such path; presets"),
        (("--strategy", "ulises"), f"got strategy 'ulises', expected one of {', '.join(sorted(LAYOUTS))}"),
        (("--local-attention", "flush"), f"got local attention 'flush', expected one of {LOCALS}"),
        (("--mesh", "ulysses=2,ulysses=2"), "expected each axis once: ulysses is there twice"),
        (("--size", "100"), "got size 100x100, expected multiples of 16"),
        (("--size", "16"), "1 tokens cannot be sharded over 2 ranks"),
        (("--guidance", "1", "--mesh", "cfg=2"), "got cfg=2 with guidance 1.0, expected guidance > 1"),
        (("--scheduler", "DDIMSchedular"), "got scheduler 'DDIMSchedular', expected one of diffusers': DDIMS"),
        (("--steps", "0"), "got --steps=0"),
        (("--image", "no.png"), "got --image no.png, which cannot be read: No such file or directory; name a picture"),
        (("--out", "/proc/nowhere/x.png"), "got output /proc/nowhere/x.png, which cannot be written"),
        (("--dry-run", "0"), "got GPUs to plan for=0, expected a whole number from 1"),
        (
            ("--model", "dit-xl/2", "--size", "131072", "--mesh", "auto"),  # terabytes
            "the run does not fit: its smallest layout",
        ),
    ],
    ids=lambda value: "-".join(map(str, value)).strip("-") if isinstance(value, tuple) else "",
)
def test_a_mistake_is_the_same_message_on_every_rank_before_weights_load(
    ranks: Pool, folder: Path, tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    one, other = ranks.run(2, told, words(folder, tmp_path / "x.png", flags))
    assert one == other
    assert one[0].count(message) == 1
    assert one[1] == ""  # no plan, no bar
    assert not list(tmp_path.iterdir())


def test_flash_attention_without_a_gpu_is_the_same_message_on_every_rank(
    ranks: Pool, folder: Path, tmp_path: Path
) -> None:
    if ranks.device == "cuda":
        pytest.skip("flash attention works on GPUs")
    one, other = ranks.run(2, told, words(folder, tmp_path / "x.png", ("--local-attention", "flash")))
    assert one == other
    assert one[0].startswith("got local attention 'flash', which does not work here: needs a GPU")
    assert one[1] == ""


def test_a_truncated_checkpoint_is_the_same_message_on_every_rank(ranks: Pool, folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        cut = -100 if path.suffix == ".safetensors" else None
        (tmp_path / path.name).write_bytes(path.read_bytes()[:cut])
    found = ranks.run(2, told, words(tmp_path, tmp_path / "x.png", ()))
    assert len(set(found)) == 1
    assert "truncated or not a safetensors file" in found[0][0]
    assert not (tmp_path / "x.png").exists()


def test_negative_control_right_flags_are_no_mistake(ranks: Pool, folder: Path, tmp_path: Path) -> None:
    found = ranks.run(2, told, words(folder, tmp_path / "x.png", ()))
    assert [message for message, _ in found] == [NOTHING_WRONG] * 2
