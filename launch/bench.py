"""The benches: `launch/bench.py steps`, `kernels`, `tiles`, `ladder`; each writes JSON lines and prints a table.

torchrun --nproc_per_node=4 launch/bench.py steps --model dit-xl/2       # every layout, and whether the bits agree
python launch/bench.py kernels                                           # each against copy bandwidth; fused products
python launch/bench.py tiles                                             # how each kernel's rows are best laid out
python launch/bench.py ladder --model large-dit-7b --tokens 256          # from plain eager to the graphed engine
"""

from __future__ import annotations

import tyro

from launch import kernels, ladder, steps, tiles
from launch.exits import guarded


def main() -> None:
    """Run the bench that was asked for; a mistake is one message and a non-zero exit everywhere."""
    guarded(run)


def run(rank: int) -> None:
    """Parse and measure."""
    benches = steps.Steps | kernels.Kernels | tiles.Tiles | ladder.Ladder
    args = tyro.cli(benches, description=__doc__, console_outputs=rank == 0)
    if isinstance(args, steps.Steps):
        steps.main(args)
    elif isinstance(args, kernels.Kernels):
        kernels.main(args)
    elif isinstance(args, tiles.Tiles):
        tiles.main(args)
    else:
        ladder.main(args)


if __name__ == "__main__":
    main()
