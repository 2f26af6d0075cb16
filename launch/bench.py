"""The benches: `launch/bench.py steps`, `kernels`, `ladder`; each writes JSON lines and prints a table.

torchrun --nproc_per_node=4 launch/bench.py steps --model dit-xl/2       # every layout, and whether the bits agree
python launch/bench.py kernels                                           # each kernel against copy bandwidth
python launch/bench.py ladder --model large-dit-7b --tokens 256          # from plain eager to the graphed engine
"""

from __future__ import annotations

import tyro

from launch import kernels, ladder, steps


def main() -> None:
    """Run the bench that was asked for."""
    args = tyro.cli(steps.Steps | kernels.Kernels | ladder.Ladder, description=__doc__)
    if isinstance(args, steps.Steps):
        steps.main(args)
    elif isinstance(args, kernels.Kernels):
        kernels.main(args)
    else:
        ladder.main(args)


if __name__ == "__main__":
    main()
