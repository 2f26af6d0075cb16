"""The benches: `launch/bench.py steps`, `kernels`, `ladder` ...; each writes JSON lines and prints a table.

torchrun --nproc_per_node=4 launch/bench.py steps --model dit-xl/2       # every layout, and whether the bits agree
torchrun --nproc_per_node=4 launch/bench.py scale                        # the same beside other engines, and ceilings
torchrun --nproc_per_node=4 launch/bench.py exchange                     # our transports beside plain collectives
python launch/bench.py kernels                                           # each kernel against copy bandwidth
python launch/bench.py ladder --model large-dit-7b --tokens 256          # from plain eager to the graphed engine
python launch/bench.py start                                             # process start to first picture, and our part
python launch/bench.py numerics --models builtin large-dit-7b            # error of each step, beside plain bf16's
"""

from __future__ import annotations

import tyro

from launch import exchange, kernels, ladder, numerics, scale, start, steps
from launch.exits import guarded


def main() -> None:
    """Run the bench that was asked for; a mistake is one message and a non-zero exit everywhere."""
    guarded(run)


def run(rank: int) -> None:
    """Parse and measure."""
    benches = (
        steps.Steps
        | scale.Scale
        | exchange.Exchange
        | kernels.Kernels
        | ladder.Ladder
        | numerics.Numerics
        | start.Start
    )
    args = tyro.cli(benches, description=__doc__, console_outputs=rank == 0)
    if isinstance(args, steps.Steps):
        steps.main(args)
    elif isinstance(args, scale.Scale):
        scale.main(args)
    elif isinstance(args, exchange.Exchange):
        exchange.main(args)
    elif isinstance(args, kernels.Kernels):
        kernels.main(args)
    elif isinstance(args, numerics.Numerics):
        numerics.main(args)
    elif isinstance(args, start.Start):
        start.main(args)
    else:
        ladder.main(args)


if __name__ == "__main__":
    main()
