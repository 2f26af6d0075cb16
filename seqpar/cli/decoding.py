"""What a run of ours says about decoding before weights load: how pictures are spread, and that they are too many."""

from __future__ import annotations

import os

import torch

from seqpar.cli.args import Args
from seqpar.mesh.mesh import Axis, Mesh
from seqpar.pipelines.diffusers import Adapted
from seqpar.pipelines.job import Job
from seqpar.planner.machine import Machine
from seqpar.planner.search import Ranking
from seqpar.vae.spread import spread_of


def line(args: Args, job: Job | Adapted, ranking: Ranking, machine: Machine) -> str | None:
    """Return the line of a dry run: how pictures are decoded. None without a decoder, and where no layout fits."""
    if not job.decodes or not ranking.ranked:
        return None
    world, data = Axis("world", size=machine.count), Axis("data", size=ranking.best.data)
    wish = "pictures" if args.exact and args.vae == "auto" else args.vae
    spread = spread_of(job.load.images, wish, world, data, lambda: None)
    return f"decoding: {spread}; its memory is measured when the weights are loaded, before the first step"


def check(job: Job | Adapted, mesh: Mesh) -> None:
    """Raise ValueError if the decoded pictures of a run, which every rank holds, exceed the memory of its device."""
    height, width = job.pixels or (1, 1)
    gpu, here = mesh.device.type == "cuda", min(mesh.world.size, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    nbytes = job.load.images * 3 * height * width * torch.float32.itemsize * (1 if gpu else here)
    if gpu:
        memory = torch.cuda.get_device_properties(mesh.device).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if nbytes > memory:
        raise ValueError(
            f"got {job.load.images} pictures of {height}x{width} pixels, which take {nbytes / 2**30:.1f} GiB once they "
            f"are decoded, expected at most {memory / 2**30:.1f} GiB; use a smaller --size or --repeat, and run again"
        )
