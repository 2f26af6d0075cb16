"""Imports what the server of CPU ranks imports, once for all of them.

No garbage is looked for meanwhile, nor later in what was imported: it stays, and ranks would look through all of it.
"""

from __future__ import annotations

import atexit
import gc
import importlib

MODULES = (
    "torch",
    "seqpar.engine.distributed",
    "seqpar.sampling.loop",
    "seqpar.cli.sample",
    "seqpar.cli.ranks",
    "seqpar.pipelines.class_labels",
    "seqpar.pipelines.unidiffuser",
    "seqpar.attention.kv_first",
    "seqpar.attention.usp",
    "seqpar.adapter.parallelize",
    "seqpar.fidelity.ways",
    "diffusers.pipelines.flux.pipeline_flux",
    "accelerate",
    "hypothesis",
    "peft",
    "pytest",
    "typeguard",
)

gc.disable()
for name in MODULES:
    importlib.import_module(name)
gc.freeze()
atexit.register(gc.unfreeze)  # the server frees it at its end; some of it tells of leaks otherwise
gc.enable()
