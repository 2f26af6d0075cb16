"""Tests that shards cover all items once, in order, in balanced sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpar.mesh.shard import JointShard, Shard, check_tokens


@given(st.integers(0, 500), st.integers(1, 17))
def test_shard_covers_all_items_once_in_balanced_slices(total: int, parts: int) -> None:
    shard = Shard(total, parts)
    items = [item for part in range(parts) for item in range(total)[shard.slice(part)]]
    assert items == list(range(total))
    assert max(shard.sizes) - min(shard.sizes) <= 1
    assert list(shard.sizes) == sorted(shard.sizes, reverse=True)


def test_fewer_tokens_than_ranks_is_an_error() -> None:
    with pytest.raises(ValueError, match="got 3 tokens for 4 ranks"):
        check_tokens(Shard(3, 4), 4)


@pytest.mark.parametrize(("sizes", "padding"), [((4, 3), 5), ((4, 0), 4), ((4,), -1)])
def test_joint_shard_refuses_padding_without_tokens(sizes: tuple[int, ...], padding: int) -> None:
    with pytest.raises(ValueError, match="tokens of padding in"):
        JointShard(tuple(Shard(size, 1) for size in sizes), padding=padding)
