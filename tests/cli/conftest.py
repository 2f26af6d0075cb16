"""Fixtures of the command line's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process sees no GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes a tiny pipeline of tests/support/pipelines.py, once, and returns its folder."""
    from tests.support import pipelines  # loads diffusers, after TRITON_INTERPRET is set

    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            pipe = pipelines.flux(False) if name == "schnell" else getattr(pipelines, name)()
            pipe.save_pretrained(made[name])
        return made[name]

    return folder
