"""Imports what the server of CPU ranks imports, once for all of them."""

from __future__ import annotations

import importlib

from tests.support.garbage import imported

MODULES = (
    "torch",
    "seqpar.loop.distributed",
    "seqpar.loop.loop",
    "seqpar.cli.sample",
    "seqpar.cli.ranks",
    "seqpar.pipelines.classes",
    "seqpar.pipelines.unidiffuser",
    "seqpar.attention.kv_first",
    "seqpar.attention.usp",
    "seqpar.transformer.parallelize",
    "seqpar.verifying.ways",
    "diffusers.pipelines.flux.pipeline_flux",
    "accelerate",
    "hypothesis",
    "peft",
    "pytest",
    "typeguard",
)

with imported():
    for name in MODULES:
        importlib.import_module(name)
