"""The server from which CPU ranks and pytest's workers are forked; this file imports nothing that takes long."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from multiprocessing import forkserver
from typing import Any

import pytest

PRELOADED = ["tests.support.preloaded"]  # what the server imports


def server(*modules: str, environment: Mapping[str, str] | None = None) -> Any:
    """Return the context whose processes are forked from a server; start it first, from the main thread.

    modules: what it imports besides, and environment: its variables besides, if it does not run yet.
    The server sees no GPU: importing diffusers may initialise CUDA, and a fork of that would know of GPUs, whatever its
    own environment says, and could not use them.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, *modules])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**(environment or {}), "CUDA_VISIBLE_DEVICES": ""}.items():
            patch.setenv(name, value)
        forkserver.ensure_running()
    return context
