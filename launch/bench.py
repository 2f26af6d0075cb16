"""Benches: each prints a table and writes JSON lines. `rates` measures a machine for the planner.

torchrun --nproc_per_node=4 launch/bench.py steps --model dit-xl/2       # every layout; compares the bits of latents
torchrun --nproc_per_node=4 launch/bench.py scale                        # layouts beside other engines and ceilings
torchrun --nproc_per_node=2 launch/bench.py scale --model flux.1-dev     # calls of FLUX.1, Qwen-Image, Wan 2.1
torchrun --nproc_per_node=2 launch/bench.py pipeline --model flux.1-dev  # prompt to PNG, by part
torchrun --nproc_per_node=2 launch/bench.py decode --vae kl wan          # decoders on all ranks beside diffusers'
torchrun --nproc_per_node=4 launch/bench.py exchange                     # our transports beside plain collectives
python launch/bench.py kernels                                           # kernels beside copy bandwidth; GEMMs
python launch/bench.py tiles                                             # the fastest tile of each kernel
python launch/bench.py ladder --model large-dit-7b --tokens 256          # from the plain eager model to the CUDA graph
torchrun --nproc_per_node=2 launch/bench.py ladder-uni-diffuser          # UniDiffuser: a step, and a picture by part
python launch/bench.py start                                             # seconds from start to the first picture
python launch/bench.py load --gpus 2                                     # loading a 7B checkpoint on N ranks, memory
python launch/bench.py numerics --models builtin large-dit-7b            # error of each step beside plain bf16's
python launch/bench.py schedules                                         # a step under each scheduler beside DDIM
python launch/bench.py record --trees ../other                           # digests and ms a step of two versions
python launch/bench.py compare --trees ../other --gpus 2                 # calls of `parallelize` in two versions
torchrun --nproc_per_node=2 launch/bench.py soak                         # 200 pictures, 100 sizes: memory, time, bits
python launch/bench.py faults                                            # jobs with faults in them: how they end
torchrun --nproc_per_node=4 launch/bench.py rates                        # measured once, kept for --mesh auto
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, Union

import torch
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))  # benches are not installed: they run from the clone

from launch.benches import (
    compare,
    decode,
    exchange,
    faults,
    kernels,
    ladder,
    ladder_unidiffuser,
    load,
    measure,
    numerics,
    pipeline,
    record,
    scale,
    schedules,
    soak,
    start,
    steps,
    tiles,
)
from seqpar.cli.exits import guarded

# flags of a bench -> the function that runs it
BENCHES: dict[type, Callable[[Any], None]] = {
    steps.Steps: steps.main,
    scale.Scale: scale.main,
    pipeline.Pipeline: pipeline.main,
    decode.Decode: decode.main,
    exchange.Exchange: exchange.main,
    kernels.Kernels: kernels.main,
    tiles.Tiles: tiles.main,
    ladder.Ladder: ladder.main,
    ladder_unidiffuser.LadderUniDiffuser: ladder_unidiffuser.main,
    start.Start: start.main,
    load.Load: load.main,
    numerics.Numerics: numerics.main,
    measure.Rates: measure.main,
    record.Record: record.main,
    compare.Compare: compare.main,
    schedules.Schedules: schedules.main,
    soak.Soak: soak.main,
    faults.Faults: faults.main,
}
CLEAN_UP_S = 120.0  # after Ctrl-C: benches end the jobs that they have started, and remove their folders
ON_GPUS = (kernels.Kernels, tiles.Tiles, ladder.Ladder, schedules.Schedules)


def main() -> None:
    """Run the bench that the flags name; a mistake ends in one message and a non-zero exit on every rank."""
    guarded(run, CLEAN_UP_S)


def run(rank: int) -> None:
    """Parse the flags and run the bench."""
    benches: Any = Union[tuple(BENCHES)]  # noqa: UP007 (a union of a tuple has no other form)
    args = tyro.cli(benches, description=__doc__, console_outputs=rank == 0)
    if isinstance(args, ON_GPUS) and not torch.cuda.is_available():
        raise ValueError("got no GPU, expected one: this bench times its kernels and graphs; run it where there is one")
    check(args)
    BENCHES[type(args)](args)


def check(args: Any) -> None:
    """Raise ValueError for numbers that are none, and for a file of lines that cannot be written at the end."""
    for field in fields(args):
        value = getattr(args, field.name)
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, float) and math.isnan(each):
                raise ValueError(f"got --{field.name.replace('_', '-')} {each}, expected a number")
    out: Path | None = getattr(args, "out", None)
    if out is None:
        return
    if out.is_dir():
        raise ValueError(f"got --out {out}, which is a folder; expected the name of a file for JSON lines")
    if not out.absolute().parent.is_dir() or not os.access(out if out.exists() else out.absolute().parent, os.W_OK):
        raise ValueError(f"got --out {out}, which cannot be written; expected a file in a folder that exists")


if __name__ == "__main__":
    main()
