"""Tests that diffusers' FLUX, Wan and Lumina2 blocks on shards equal the same blocks on all tokens.

The truth is the unchanged block with its own attention processor, in one process; only its roundings to fp32 are left
out on both sides (`StayDouble`). What remains is the order of sums: matrix products of fewer rows, attention in other
pieces. That makes 1e-15 of the largest value (measured), so 1e-12 leaves room for other kernels and none for errors: a
norm with twice its eps is off by 1e-8 or more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from seqpar.mesh.mesh import Mesh
from seqpar.mesh.shard import JointShard, Shard, Tokens
from tests.support.foreign import BLOCKS, BlockCase, StayDouble, Stream
from tests.support.meshes import LAYOUTS, build, local_for, mesh_for
from tests.support.pairs import covering
from tests.support.pool import Pool

TOLERANCE = 1e-12
VISIBLE = 1e-3
LENGTHS = [(5, 9), (2, 7)]  # text and image tokens; with two text tokens some ranks hold image tokens only
RUNS = [
    *(pytest.param(2, strategy) for strategy in LAYOUTS),
    *(pytest.param(3, strategy) for strategy in LAYOUTS if strategy != "usp"),
    pytest.param(4, "usp"),  # 2 x 2 is the smallest mesh with both axes
]
Mistake = Literal["none", "rotary of rank 0", "text on every rank"]


def cut(foreign: BlockCase, text: Stream, image: Stream, mesh: Mesh, mistake: Mistake) -> tuple[Tokens, Stream, Stream]:
    """Return the tokens that the strategy is built for, and this rank's text and image."""
    parts, part = mesh.sequence.size, mesh.sequence.rank
    texts, images = (Shard(stream.angles_LD2.shape[0], parts) for stream in (text, image))
    mine = image[images.slice(part)]
    if mistake == "rotary of rank 0":
        mine = replace(mine, angles_LD2=image.angles_LD2[: images.sizes[part]])
    if not foreign.joint:
        return images, text, mine
    if mistake == "text on every rank":
        return JointShard((Shard(texts.total * parts, parts), images)), text, mine
    return JointShard((texts, images)), text[texts.slice(part)], mine


def sharded(
    rank: int,
    world: int,
    device: torch.device,
    name: str,
    strategy: str,
    lengths: tuple[int, int],
    mistake: Mistake = "none",
) -> tuple[Tensor, ...]:
    """Return this rank's piece of every sharded stream, image last."""
    foreign, mesh = BLOCKS[name], mesh_for(strategy, world, device)
    block, (text, image, condition) = foreign.build(device), foreign.inputs(lengths, device)
    tokens, text, image = cut(foreign, text, image, mesh, mistake)
    foreign.install(block, build(strategy, mesh, tokens, local_for(device)))
    with StayDouble():
        out = foreign.forward(block, text, image, condition)
    return out if foreign.joint else out[1:]


def whole(name: str, lengths: tuple[int, int]) -> tuple[Tensor, ...]:
    """Return the same streams computed by the unchanged block."""
    foreign = BLOCKS[name]
    out = foreign.forward(foreign.build(), *foreign.inputs(lengths))
    return out if foreign.joint else out[1:]


def joined(pieces: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
    return [torch.cat(parts, dim=1) for parts in zip(*pieces, strict=True)]


def error(got: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """Return the largest difference relative to the largest value of its stream."""
    errors = [(mine - other).abs().max() / other.abs().max() for mine, other in zip(got, truth, strict=True)]
    return torch.stack(errors).max().item()  # unlike Python's max, this returns NaN if any error is NaN


@pytest.mark.parametrize(("world", "strategy", "name", "lengths"), covering(RUNS, BLOCKS, turns=LENGTHS), ids=str)
def test_foreign_block_on_shards_equals_the_whole_block(
    ranks: Pool, world: int, strategy: str, name: str, lengths: tuple[int, int]
) -> None:
    got = joined(ranks.run(world, sharded, name, strategy, lengths))
    with StayDouble():
        truth = whole(name, lengths)
    assert error(got, truth) < TOLERANCE


@pytest.mark.parametrize("name", BLOCKS)
def test_foreign_block_kept_in_double_is_the_block_that_rounds(name: str) -> None:
    """`StayDouble` changes the truth by fp32 roundings and nothing else; there must be some, or it is not needed."""
    with StayDouble():
        truth = whole(name, LENGTHS[0])
    assert TOLERANCE < error(whole(name, LENGTHS[0]), truth) < 1e-5


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("strategy", LAYOUTS)
@pytest.mark.parametrize("world", [2])
def test_foreign_block_negative_control_rotary_rows_of_another_rank_are_noticed(
    ranks: Pool, world: int, strategy: str, name: str
) -> None:
    pieces = ranks.run(world, sharded, name, strategy, LENGTHS[0], "rotary of rank 0")
    with StayDouble():
        assert error(joined(pieces), whole(name, LENGTHS[0])) > VISIBLE


@pytest.mark.parametrize("name", [name for name, foreign in BLOCKS.items() if foreign.joint])
@pytest.mark.parametrize("strategy", LAYOUTS)
@pytest.mark.parametrize("world", [2])
def test_foreign_block_negative_control_text_counted_on_every_rank_is_noticed(
    ranks: Pool, world: int, strategy: str, name: str
) -> None:
    pieces = ranks.run(world, sharded, name, strategy, LENGTHS[0], "text on every rank")
    with StayDouble():
        assert error(joined(pieces)[-1:], whole(name, LENGTHS[0])[-1:]) > VISIBLE
