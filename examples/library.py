"""Shows the library: a sharded model in a diffusers pipeline, and our own loop. Run it with python or torchrun."""

from typing import Any

import torch
from diffusers.pipelines.dit.pipeline_dit import DiTPipeline

from seqpar import Guidance, Mesh, parallelize, release
from seqpar.pipelines.classes import BUILTIN, Files, Pipeline

mesh = Mesh.from_env()  # all processes that torchrun started, or one process without torchrun

# any diffusers pipeline with a transformer that seqpar supports
theirs = parallelize(DiTPipeline.from_pretrained(BUILTIN), mesh)  # its transformer and its VAE compute on all ranks
seed = torch.Generator().manual_seed(1)
labels = theirs.get_label_ids(["cat", "rocket"])
pictures: Any = theirs(labels, generator=seed, num_inference_steps=4, output_type="pt")
release(theirs)

# our loop keeps the tokens split from the first noise to the last step
with Pipeline.load(Files.locate("builtin"), mesh) as ours:  # keeps the CUDA graph for the next compatible call
    latents = ours.latents(["cat", "rocket"], steps=4, guidance=Guidance(4.0), seed=1)
    images = ours.decode(latents)  # (2, 3, 64, 64) in [0, 1], equal on every rank

print(
    f"rank {mesh.world.rank}: {ours.dit.strategy}, {ours.dit.local}, difference between the two ways",
    f"{(images.cpu() - pictures.images.cpu()).abs().max():.1e}",
)
