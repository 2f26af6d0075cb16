"""What a run of ours says about decoding before it samples: seconds and memory, or that a size cannot be decoded."""

from __future__ import annotations

import os

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

from seqpar.cli.args import Args
from seqpar.mesh import Axis, Mesh
from seqpar.pipelines._family import Job
from seqpar.planner.machine import Machine, here
from seqpar.planner.plan import Plan
from seqpar.planner.search import Ranking
from seqpar.vae import decodable
from seqpar.vae.decoder import way_of

Found = tuple[decodable.Kind, tuple[int, ...]]  # the kind of a decoder, and the shape of one picture's latents


def line(args: Args, job: Job, ranking: Ranking, machine: Machine) -> str | None:
    """Return the line of a dry run: predicted seconds and memory of decoding, and why it does not fit if it does not.

    None for a model without a decoder, and where no layout fits.
    """
    found = _decoder(job)
    if found is None or not ranking.ranked:
        return None
    ranks, pictures = _shared(args, job, machine.count, ranking.best.data)
    text = decodable.told(*found, ranks, pictures, ranking.rates, machine.transport)
    memory = None if machine.device == "CPU" else machine.memory
    try:
        fit = decodable.check_decodable(*found, ranks, _left(ranking, memory, found[0]))
    except ValueError as error:
        return f"{text}; it does not fit: {error}"
    return text if fit.told is None else f"{text}; {fit.told}"


def check(args: Args, job: Job, plan: Plan, ranks: Mesh) -> None:
    """Raise ValueError, before any weight is read, if the pictures of a job cannot be decoded or kept here."""
    _check_memory(job, ranks)
    found = _decoder(job)
    if found is None or ranks.device.type != "cuda":
        return
    share, _ = _shared(args, job, ranks.world.size, plan.layout.data)
    memory = here(ranks.device, ranks.world.size, plan.transport.name).memory
    decodable.check_decodable(*found, share, _left(plan.ranking, memory, found[0]))


def _check_memory(job: Job, mesh: Mesh) -> None:
    """Raise ValueError if the decoded pictures of a run, which every rank holds, exceed the memory of its device."""
    height, width = job.pixels
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


def _decoder(job: Job) -> Found | None:
    files = job.loading["files"]
    if files.vae is None:
        return None
    sides = (side // files.factor for side in job.pixels)
    return decodable.Kind.of(AutoencoderKL, files.vae, job.dtype), (1, files.vae.latent_channels, *sides)


def _shared(args: Args, job: Job, count: int, data: int) -> tuple[int, int]:
    """Return how many ranks share a picture, and how many pictures each of them decodes."""
    wish, images = "pictures" if args.exact else args.vae, job.load.images
    way = way_of(images, wish, Axis("world", size=count), Axis("data", size=data), lambda: None)
    return (way.ranks, -(-images // data)) if way.name == "strips" else (1, -(-images // count))


def _left(ranking: Ranking, memory: float | None, kind: decodable.Kind) -> float | None:
    """Return the GiB that the model and the decoder's weights leave on a device; None if its memory is unknown."""
    return None if memory is None else decodable.left_gib(memory, ranking.ranked[0].memory.total, kind)
