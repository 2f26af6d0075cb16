"""Tests of how much memory a rank counts as free."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from seqpar.planner.predict import GIB, USABLE
from seqpar.vae.decodable import free_gib


def segment(device: int, pool: tuple[int, int], total: float, active: float) -> dict[str, Any]:
    sizes = {"total_size": int(total * GIB), "active_size": int(active * GIB)}
    return {"device": device, "segment_pool_id": pool, **sizes}


def test_unused_memory_of_cuda_graphs_and_of_other_devices_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = [segment(1, (0, 0), 4, 1), segment(1, (0, 7), 16, 0), segment(0, (0, 0), 32, 0)]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * GIB, 64 * GIB))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for device in ("cuda", "cuda:1"):
        assert free_gib(torch.device(device)) == pytest.approx(USABLE * (2 + 3))
    assert free_gib(torch.device("cpu")) is None
