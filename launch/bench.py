"""Benches: each prints a table and writes JSON lines. `rates` measures a machine for the planner.

python launch/bench.py compare --trees ../other --gpus 2                 # ms and bits of two versions
torchrun --nproc_per_node=2 launch/bench.py steps --model large-dit-7b   # our loop: layouts and ceilings
torchrun --nproc_per_node=2 launch/bench.py calls --model flux.1-dev     # `parallelize`: ceilings, diffusers, cache-dit
python launch/bench.py loading --model qwen-image --folder FOLDER        # seqpar.load beside diffusers' fastest way
torchrun --nproc_per_node=2 launch/bench.py decode --vae kl wan          # decoders on all ranks beside diffusers'
torchrun --nproc_per_node=4 launch/bench.py exchange                     # our transports beside plain collectives
torchrun --nproc_per_node=2 launch/bench.py soak                         # 200 pictures, 100 sizes: memory, time, bits
python launch/bench.py faults                                            # jobs with faults in them: how they end
python launch/bench.py serve                                             # a server: many clients, cancels, killed ranks
python launch/bench.py latency                                           # a server: own cost, cancels, swaps, p50, p95
torchrun --nproc_per_node=4 launch/bench.py rates                        # measured once, kept for --mesh auto
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # benches are not installed: they run from the clone

from launch.benches import calls, compare, decode, exchange, faults, latency, loading, measure, serve, soak, steps
from seqpar.cli.exits import guarded
from seqpar.types.flags import chosen

# flags of a bench -> the function that runs it
BENCHES: dict[type, Callable[[Any], None]] = {
    compare.Compare: compare.main,
    steps.Steps: steps.main,
    calls.Calls: calls.main,
    loading.Loading: loading.main,
    decode.Decode: decode.main,
    exchange.Exchange: exchange.main,
    soak.Soak: soak.main,
    faults.Faults: faults.main,
    serve.Serve: serve.main,
    latency.Latency: latency.main,
    measure.Rates: measure.main,
}
CLEAN_UP_S = 120.0  # after Ctrl-C: benches end the jobs that they have started, and remove their folders


def main() -> None:
    """Run the bench that the flags name; a mistake ends in one message and a non-zero exit on every rank."""
    guarded(run, CLEAN_UP_S)


def run(rank: int) -> None:
    args = chosen({kind.__name__.lower(): kind for kind in BENCHES}, sys.argv[1:], "launch/bench.py", shows=rank == 0)
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
