"""seqpar: sequence-parallel inference for diffusion transformers.

`load` reads a diffusers pipeline once a host and makes it run on all GPUs; `parallelize` does so with a pipeline in
memory, until `release`; `refresh` lets it look at all changes again.
`DistributedDiT` runs one model on a `Mesh`, `sample` is the denoising loop, and
`seqpar.pipelines.class_labels.generate` makes pictures. `verify` compares several ranks with one, `profile` tells where
a run's time goes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seqpar.adapter.parallelize import parallelize, refresh, release
    from seqpar.engine.distributed import DistributedDiT
    from seqpar.fidelity.verify import verify
    from seqpar.pipelines._load import load
    from seqpar.ranks.deadlines import Deadlines
    from seqpar.ranks.mesh import Mesh
    from seqpar.sampling.guidance import Guidance
    from seqpar.sampling.loop import Sampler, sample
    from seqpar.sight.profile import profile

__version__ = "0.1.0"

__all__ = [
    "Deadlines",
    "DistributedDiT",
    "Guidance",
    "Mesh",
    "Sampler",
    "load",
    "parallelize",
    "profile",
    "refresh",
    "release",
    "sample",
    "verify",
]

_MODULES = {
    "Deadlines": "seqpar.ranks.deadlines",
    "DistributedDiT": "seqpar.engine.distributed",
    "Guidance": "seqpar.sampling.guidance",
    "Mesh": "seqpar.ranks.mesh",
    "Sampler": "seqpar.sampling.loop",
    "load": "seqpar.pipelines._load",
    "parallelize": "seqpar.adapter.parallelize",
    "profile": "seqpar.sight.profile",
    "refresh": "seqpar.adapter.parallelize",
    "release": "seqpar.adapter.parallelize",
    "sample": "seqpar.sampling.loop",
    "verify": "seqpar.fidelity.verify",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, because torch and diffusers take seconds to load."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """Return the names of the module, including those that are not imported yet."""
    return sorted({*globals(), *__all__})
