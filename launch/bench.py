"""The benches: each writes JSON lines and prints a table. And `rates`: what the planner must know of a machine.

torchrun --nproc_per_node=4 launch/bench.py steps --model dit-xl/2       # every layout, and whether the bits agree
torchrun --nproc_per_node=4 launch/bench.py scale                        # the same beside other engines, and ceilings
torchrun --nproc_per_node=4 launch/bench.py exchange                     # our transports beside plain collectives
python launch/bench.py kernels                                           # each against copy bandwidth; fused products
python launch/bench.py tiles                                             # how each kernel's rows are best laid out
python launch/bench.py ladder --model large-dit-7b --tokens 256          # from plain eager to the graphed engine
python launch/bench.py start                                             # process start to first picture, and our part
python launch/bench.py numerics --models builtin large-dit-7b            # error of each step, beside plain bf16's
python launch/bench.py record --trees ../other                           # digests and ms a step of two versions, in turn
torchrun --nproc_per_node=4 launch/bench.py rates                        # measured once, kept for --mesh auto
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Union

import torch
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))  # benches are not installed: they run from the clone

from launch.benches import exchange, kernels, ladder, measure, numerics, record, scale, start, steps, tiles
from seqpar.cli.exits import guarded

# flags of a bench -> what runs it
BENCHES: dict[type, Callable[[Any], None]] = {
    steps.Steps: steps.main,
    scale.Scale: scale.main,
    exchange.Exchange: exchange.main,
    kernels.Kernels: kernels.main,
    tiles.Tiles: tiles.main,
    ladder.Ladder: ladder.main,
    start.Start: start.main,
    numerics.Numerics: numerics.main,
    measure.Rates: measure.main,
    record.Record: record.main,
}
ON_GPUS = (kernels.Kernels, tiles.Tiles, ladder.Ladder)


def main() -> None:
    """Run the bench that was asked for; a mistake is one message and a non-zero exit everywhere."""
    guarded(run)


def run(rank: int) -> None:
    """Parse and measure."""
    benches: Any = Union[tuple(BENCHES)]  # noqa: UP007 (of a tuple)
    args = tyro.cli(benches, description=__doc__, console_outputs=rank == 0)
    if isinstance(args, ON_GPUS) and not torch.cuda.is_available():
        raise ValueError("got no GPU, expected one: this bench times its kernels and graphs; run it where there is one")
    BENCHES[type(args)](args)


if __name__ == "__main__":
    main()
