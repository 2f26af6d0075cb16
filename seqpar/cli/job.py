"""Checked flags: everything that can be wrong with them is found here, before any weight is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import seqpar.local
import seqpar.transports
from seqpar.cli.args import Args
from seqpar.mesh import Mesh, default_dtype
from seqpar.pipelines.class_labels import Files
from seqpar.pipelines.pictures import check_writable
from seqpar.planner.plan import parse_mesh
from seqpar.planner.predict import Load
from seqpar.protocols import plugin
from seqpar.sampling.guidance import Guidance, check_layout

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHOWN_BY_DEFAULT = 12  # number of classes if the user names none


@dataclass(frozen=True)
class Job:
    """The work that the flags describe: `classes` as the user named them, `pictures` the class number of each."""

    files: Files
    classes: tuple[str, ...]
    pictures: list[int]
    size: tuple[int, int] | None
    guidance: Guidance
    scheduler: Any
    dtype: torch.dtype

    @property
    def evaluations(self) -> int:
        """The number of calls of the model: one a step, about two a step for schedulers such as Heun's."""
        return len(self.scheduler.timesteps)

    @property
    def latent_size(self) -> tuple[int, int]:
        """(height, width) of the latent."""
        return self.files.latent_size(self.size)

    @property
    def tokens(self) -> int:
        """The number of tokens of one picture."""
        return self.latent_size[0] * self.latent_size[1] // self.files.blueprint.config.patch_size**2

    @property
    def load(self) -> Load:
        """The sizes that the planner needs."""
        return self.files.load_of(self.pictures, self.guidance, self.evaluations, self.dtype, self.size)


def check(args: Args, mesh: Mesh, guidance: Guidance) -> Job:
    """The job that the flags describe; `ValueError` for any flag that is wrong. Reads headers of files, no weights."""
    _check_ranges(args, guidance)
    _check_names(args)
    files = Files.locate(args.model)
    classes = args.classes or tuple(map(str, sorted(files.labels)[:SHOWN_BY_DEFAULT])) or ("0",)
    pictures = [number for number in files.class_ids(classes) for _ in range(args.repeat)]
    scheduler = files.schedule(args.scheduler, args.steps, args.eta)
    _, axes = parse_mesh(args.mesh)
    data, cfg = axes.get("data", 1), axes.get("cfg", 1)
    check_layout(data, cfg, len(pictures), guidance, files.blueprint.config.in_channels)
    job = Job(files, classes, pictures, parse_size(args.size), guidance, scheduler, _dtype(args, mesh))
    _ = job.tokens  # raises for a wrong size now, on all ranks at once
    return job


def parse_size(text: str | None) -> tuple[int, int] | None:
    """(height, width) from "256" or "256x384"; `ValueError` for other texts."""
    if text is None:
        return None
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() for side in sides):
        raise ValueError(f"got --size {text}, expected pixels like 256 or 256x384 (height x width)")
    return int(sides[0]), int(sides[-1])


def _check_ranges(args: Args, guidance: Guidance) -> None:
    if any(count < 1 for count in args.dry_run or ()):
        raise ValueError(f"got --dry-run {args.dry_run}, expected numbers of processes, from 1")
    if args.steps < 1 or args.repeat < 1:
        raise ValueError(f"got --steps {args.steps} --repeat {args.repeat}, expected at least 1 of each")
    if not 0 <= args.seed < 2**63:
        raise ValueError(f"got --seed {args.seed}, expected 0 to 2**63 - 1")
    if args.guidance_channels is not None and not guidance.on:
        raise ValueError(
            f"got --guidance-channels {args.guidance_channels} with --guidance {args.guidance:g}, expected guidance "
            f"over 1: without it there is nothing to guide"
        )


def _check_names(args: Args) -> None:
    """Raise where the output cannot be written, or where a transport or a local attention does not exist."""
    if args.dry_run is None:
        check_writable(args.out)
    if args.transport != "auto":
        plugin(seqpar.transports, args.transport, "transport")
    if args.local != "auto":
        plugin(seqpar.local, args.local, "local attention")


def _dtype(args: Args, mesh: Mesh) -> torch.dtype:
    """The data type of weights; a plan for a number of GPUs takes a GPU's, also on a machine without one."""
    device = torch.device("cuda") if args.dry_run else mesh.device
    return DTYPES.get(args.dtype, default_dtype(device))
