"""The library in ten lines: a sharded model in a diffusers pipeline, and our own loop. Runs alone or under torchrun."""

from diffusers.pipelines.dit.pipeline_dit import DiTPipeline

from seqpar import DistributedDiT, Guidance, Mesh
from seqpar.pipeline import BUILTIN, Files, Pipeline

mesh = Mesh.from_env()  # all processes that torchrun started; one without it

# any diffusers pipeline whose transformer seqpar knows
theirs = DiTPipeline.from_pretrained(BUILTIN)
theirs.transformer = DistributedDiT(theirs.transformer, mesh)
pictures = theirs(theirs.get_label_ids(["cat", "rocket"]), num_inference_steps=4)

# our loop: tokens stay split from the first noise to the last step
ours = Pipeline.load(Files.locate("builtin"), mesh)
latents = ours.latents(["cat", "rocket"], steps=4, guidance=Guidance(4.0), seed=1)
images = ours.decode(latents)  # (2, 3, 64, 64) in [0, 1], equal on every rank

if mesh.is_main:
    print(ours.dit.strategy, ours.dit.local, tuple(images.shape), sep="\n")
