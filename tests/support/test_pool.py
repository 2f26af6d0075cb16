"""Tests of the pool of ranks itself."""

from __future__ import annotations

import os
import stat
from typing import Any

import pytest
import torch.distributed as dist

from tests.support import pool


def fail_alone(rank: int, world: int, device: Any) -> None:
    if rank == 1:
        raise ValueError("planted")
    dist.barrier()


def cache(rank: int, world: int, device: Any) -> tuple[str, int]:
    folder = os.environ["SEQPAR_CACHE"]
    return folder, stat.S_IMODE(os.stat(folder).st_mode)


def test_ranks_share_a_folder_of_this_run_for_what_is_measured(ranks: pool.Pool) -> None:
    here, *others = (cache(0, 1, None), *ranks.run(2, cache))
    assert others == [here, here]
    assert here[1] == 0o700  # as `mkdtemp` makes it


def test_a_rank_that_waits_for_one_that_failed_is_not_waited_for(
    ranks: pool.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "ALSO_S", 0.5)
    with pytest.raises(pool.RankError, match=r"rank 0 did not answer in time\n(?s:.*)planted"):
        ranks.run(2, fail_alone)
