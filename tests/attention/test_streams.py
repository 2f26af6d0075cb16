"""Tests of what strategies share: views of a fused projection, outboxes of several streams, joined key masks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from seqpar.attention._streams import OneRank
from seqpar.local import reference
from seqpar.mesh.mesh import Axis
from seqpar.mesh.shard import JointShard, Shard
from seqpar.types.masks import is_kept, joined_mask, key_bias
from seqpar.types.outboxes import Outbox, Outboxes, take_turns
from seqpar.types.protocols import Prepare
from tests.attention.test_strategies import DIM, TWO_STREAMS, lengths_mask, whole_stream


def test_one_stream_on_one_rank_is_not_copied() -> None:
    """Attention gets strided views of the fused projection."""
    got = list[Tensor]()

    def core(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, /) -> tuple[Tensor, Tensor]:
        got.extend((q, k, v))
        return reference.attend(q, k, v)

    OneRank(core, Axis("sequence"), 5)((replace(whole_stream(TWO_STREAMS[0], 0), prepare=Prepare()),))
    q, k, v = got
    assert q.stride(1) == k.stride(1) == (4 + 4 + 4) * DIM
    assert k.data_ptr() - q.data_ptr() == v.data_ptr() - k.data_ptr() == 4 * DIM * 8


def test_the_parts_of_a_split_are_made_once_for_all_slots() -> None:
    """Their tables are made, too, because the second slot is first used in a capture, which must not copy."""
    slots = [torch.zeros(2, 7, 1, 3, DIM) for _ in range(2)]
    every = slice(0, 3)
    first, second = kept = take_turns([Outboxes([Outbox(None, slot[0], slot[1], every, every)]) for slot in slots])
    text, image = first.split((3, 4))
    assert first.split([3, 4]) == (text, image)
    assert all("places" in vars(part) for boxes in (first, second) for part in boxes._splits[3, 4])
    assert image.places.table[1, 0, 0, 0] == slots[0][0, 3].data_ptr()
    assert second.split((3, 4))[1].places.table[2, 0, 2, 0] == slots[1][1, 3, 0, 2].data_ptr()
    assert first.split((7,))[0] is first is kept[0]
    with pytest.raises(ValueError, match=r"got streams of \(3, 5\) tokens on this rank, expected 7 tokens together"):
        first.split((3, 5))


def test_masks_are_joined_in_the_order_of_keys() -> None:
    tokens = JointShard((Shard(3, 2), Shard(4, 2)))
    text, image = lengths_mask(torch.tensor([1, 3]), 3), torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]]).bool()
    got = joined_mask((text, image), tokens, torch.zeros(2))
    # t0 t1 | i0 i1 | t2 | i2 i3
    assert got.int().tolist() == [[1, 0, 1, 1, 0, 1, 0], [1, 1, 0, 1, 1, 1, 1]]
    assert torch.equal(joined_mask((text, None), tokens, torch.zeros(2))[0].int(), torch.tensor([1, 0, 1, 1, 0, 1, 1]))
    with pytest.raises(ValueError, match=r"got a mask of \(2, 4\), torch.bool, expected \(2, 3\), torch.bool"):
        joined_mask((image, image), tokens, torch.zeros(2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_key_bias_is_finite_and_its_rows_are_aligned(dtype: torch.dtype) -> None:
    mask = lengths_mask(torch.tensor([5, 0, 19]), 19)
    bias = key_bias(mask, dtype)
    assert bias.isfinite().all()
    assert bias.stride() == (32, 1)
    assert torch.equal(is_kept(bias), mask)
