"""Fixtures of the command line's tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes a tiny pipeline of tests/support/pipelines.py, once, and returns its folder."""
    from tests.support import pipelines  # loads diffusers, after TRITON_INTERPRET is set

    @cache
    def folder(name: str) -> Path:
        path = tmp_path_factory.mktemp(name)
        variants = {"schnell": lambda: pipelines.flux(False), "wan22": lambda: pipelines.wan(2)}
        pipe = variants[name]() if name in variants else getattr(pipelines, name)()
        pipe.save_pretrained(path)
        return path

    return folder


@pytest.fixture(scope="session")
def loras(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the LoRAs of `tests.cli.loras.of_flux`."""
    from tests.cli.loras import of_flux

    return of_flux(tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="session")
def pose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a ControlNet of the tiny FLUX."""
    from tests.support import pipelines

    sizes = (1, 1, pipelines.HEAD_DIM, pipelines.HEADS)
    net = pipelines.THEIRS.FluxControlNetModel.from_transformer(
        pipelines.flux().transformer, *sizes, load_weights_from_transformer=False
    )
    pipelines.random_weights(net, 6).save_pretrained(folder := tmp_path_factory.mktemp("pose"))
    return folder
