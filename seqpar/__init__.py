"""seqpar: sequence-parallel inference for diffusion transformers.

`DistributedDiT` runs one model on a `Mesh`; `sample` is the denoising loop; `seqpar.pipelines.class_labels.generate`
makes pictures.
"""

from seqpar.distributed import DistributedDiT
from seqpar.mesh import Mesh
from seqpar.sampling.guidance import Guidance
from seqpar.sampling.loop import Sampler, sample

__version__ = "0.1.0"

__all__ = ["DistributedDiT", "Guidance", "Mesh", "Sampler", "sample"]
