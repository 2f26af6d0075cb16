"""Tests of the pool of ranks itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from tests.support import pool


def fail_alone(rank: int, world: int, device: Any) -> None:
    if rank == 1:
        raise ValueError("planted")
    dist.barrier()


def test_a_rank_that_waits_for_one_that_failed_is_not_waited_for(
    ranks: pool.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "ALSO_S", 0.5)
    with pytest.raises(pool.RankError, match=r"rank 0 did not answer in time\n(?s:.*)planted"):
        ranks.run(2, fail_alone)
