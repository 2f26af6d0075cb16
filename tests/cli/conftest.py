"""Fixtures of the command line's tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process sees no GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
