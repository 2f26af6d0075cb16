"""Multi-GPU inference for diffusion transformers, by sequence parallelism.

load, parallelize, release: run a diffusers pipeline on all GPUs, and undo it.
refresh: rescan after in-place changes.
DistributedDiT, Mesh, sample, Sampler: seqpar's models and denoising loop.
verify: compare a run with one rank. measure_precision, keep_budget: measure and bound what 8 bits
change. profile: measure where its time goes. StepCache: which steps a step cache computes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from seqpar import _moved

if TYPE_CHECKING:
    from seqpar.loop.distributed import DistributedDiT
    from seqpar.loop.loop import Sampler, sample
    from seqpar.mesh.mesh import Mesh
    from seqpar.mesh.watch import Deadlines
    from seqpar.pipelines.load import load
    from seqpar.profiling.profile import profile
    from seqpar.transformer.parallelize import parallelize, refresh, release
    from seqpar.transformer.step_cache import StepCache
    from seqpar.types.guidance import Guidance
    from seqpar.verifying.budget import keep_budget
    from seqpar.verifying.precision import measure_precision
    from seqpar.verifying.verify import verify

__version__ = "0.1.0"

__all__ = [
    "Deadlines",
    "DistributedDiT",
    "Guidance",
    "Mesh",
    "Sampler",
    "StepCache",
    "keep_budget",
    "load",
    "measure_precision",
    "parallelize",
    "profile",
    "refresh",
    "release",
    "sample",
    "verify",
]

_MODULES = {
    "Deadlines": "seqpar.mesh.watch",
    "DistributedDiT": "seqpar.loop.distributed",
    "Guidance": "seqpar.types.guidance",
    "Mesh": "seqpar.mesh.mesh",
    "Sampler": "seqpar.loop.loop",
    "StepCache": "seqpar.transformer.step_cache",
    "keep_budget": "seqpar.verifying.budget",
    "load": "seqpar.pipelines.load",
    "measure_precision": "seqpar.verifying.precision",
    "parallelize": "seqpar.transformer.parallelize",
    "profile": "seqpar.profiling.profile",
    "refresh": "seqpar.transformer.parallelize",
    "release": "seqpar.transformer.parallelize",
    "sample": "seqpar.loop.loop",
    "verify": "seqpar.verifying.verify",
}

_moved.install()


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, because torch and diffusers take seconds to load."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """Return the names of the module, including those that are not imported yet."""
    return sorted({*globals(), *__all__})
