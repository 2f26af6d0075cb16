"""The `seqpar` command with one fault planted in one of its ranks; `faults.py` and the tests start it.

    SEQPAR_PLANTED='{"what": "kill", "place": "step", "rank": 1, "at": 2, "folder": "/tmp/job"}' \
        python -m launch.benches.planted sample --ranks 2 ...

Faults are planted from outside, by replacing functions of a rank, so that the program itself has no switch for them.
The same module runs under torchrun. Before a fault happens, the time is written to the folder, which the harness reads.
"""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import random
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from seqpar.mesh import inputs

PLANTED = "SEQPAR_PLANTED"  # environment of the job: a `Plant` as JSON
What = Literal["nothing", "kill", "stop", "leave", "raise", "memory", "late", "slow", "disk"]
Place = Literal["start", "arena", "step", "exchange", "write"]
LATE_S = 0.02  # an exchange of a late rank begins up to this much later
CYCLES_A_SECOND = 1_700_000_000  # of a GPU, about: how long a late rank's GPU is held up
SLOW_S = 3.0
MODULE = "launch.benches.planted"


@dataclass(frozen=True)
class Plant:
    """What happens to one rank, where, and at which of its steps or exchanges (counted from 0)."""

    what: What = "nothing"
    place: Place = "step"
    rank: int = 1
    at: int = 2
    folder: str = ""

    def text(self) -> str:
        return json.dumps(asdict(self))

    def moment(self) -> Path:
        return Path(self.folder, "moment")


def planted() -> Plant:
    return Plant(**json.loads(os.environ.get(PLANTED, "{}")))


def happen(plant: Plant) -> None:
    unfinished = plant.moment().with_suffix(".part")
    unfinished.write_text(repr(time.time()))
    unfinished.replace(plant.moment())
    if plant.what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif plant.what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif plant.what == "leave":
        os._exit(0)
    elif plant.what == "raise":
        raise RuntimeError("a planted bug")
    elif plant.what == "memory":
        _eat_memory()
    elif plant.what == "disk":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), plant.folder)
    elif plant.what == "slow":
        time.sleep(SLOW_S)


def _eat_memory() -> None:
    import torch

    if torch.cuda.is_available():
        torch.empty(1 << 46, dtype=torch.uint8, device="cuda")
    raise torch.OutOfMemoryError("got a planted allocation that fails, expected memory")


def plant(plant: Plant, rank: int) -> None:
    """Replace the function of this rank at whose call the fault happens. Every rank of a job calls this."""
    if rank != plant.rank or plant.what == "nothing":
        return
    if plant.place == "start":
        import seqpar.cli.sample  # noqa: F401 (takes seconds, in the other ranks as well)

        happen(plant)
    elif plant.place == "arena":
        _plant_in_arenas(plant)
    elif plant.place == "step":
        _plant_in_steps(plant)
    elif plant.place == "exchange":
        _plant_in_exchanges(plant)
    else:
        _plant_in_writing(plant)


def _plant_in_steps(plant: Plant) -> None:
    from seqpar.cli.summary import Progress

    counted = Progress.__call__

    def call(self: Progress, index: int) -> None:
        counted(self, index)
        if index == plant.at:
            happen(plant)

    Progress.__call__ = call


def _plant_in_exchanges(plant: Plant) -> None:
    from seqpar.transports._turns import Turns

    taken, chance, count = Turns.take, random.Random(0), [0]

    def take(self: Turns, call: str) -> None:
        taken(self, call)
        if plant.what == "late":
            if not count[0]:
                happen(plant)
            _hold_up(chance.random() * LATE_S)
        elif count[0] == plant.at:
            happen(plant)
        count[0] += 1

    Turns.take = take


def _hold_up(seconds: float) -> None:
    """Hold this rank up: its GPU, also in every later replay of a graph that is captured now, and its host."""
    import torch

    if torch.cuda.is_available():
        torch.cuda._sleep(int(seconds * CYCLES_A_SECOND / 20))  # replayed in every step
        seconds /= 20
    time.sleep(seconds)


def _plant_in_arenas(plant: Plant) -> None:
    """Let the fault happen in the rank whose memory exists, but which has not told the others so."""
    from seqpar.transports.peer import arena

    collect, meet = inputs.collect_on_axis, arena._Rendezvous.meet

    def collect_on_axis(axis: Any, value: Any, kind: Any) -> Any:
        if isinstance(value, tuple):  # where its memory is, and why that fails
            happen(plant)
        return collect(axis, value, kind)

    def met(*arguments: Any) -> Any:
        happen(plant)
        return meet(*arguments)

    arena.collect_on_axis = collect_on_axis
    setattr(arena._Rendezvous, "meet", met)  # noqa: B010 (its parameters do not matter here)


def _plant_in_writing(plant: Plant) -> None:
    """Let the fault happen when the first bytes of the picture are written, but not all of them."""
    from seqpar.pipelines import pictures as _pictures

    class Half(io.FileIO):
        def write(self, data: Any) -> int:
            half = super().write(data[: len(data) // 2])
            happen(plant)
            return half + super().write(data[half:])

    def opened(path: Any, mode: str = "r", *arguments: Any, **more: Any) -> Any:
        writes = "b" in mode and set(mode) & set("xwa")
        return Half(path, mode) if writes else builtins.open(path, mode, *arguments, **more)

    setattr(_pictures, "open", opened)  # noqa: B010 (the module has no such name)


def start_planted_ranks() -> None:
    """Make `seqpar sample --ranks` of this process start this module in its ranks."""
    from seqpar.cli import ranks

    if ranks.MODULE != "seqpar.cli":
        raise RuntimeError(f"got ranks that run {ranks.MODULE}, expected the module seqpar.cli; update this bench")
    setattr(ranks, "MODULE", MODULE)  # noqa: B010


def main() -> None:
    from seqpar.cli.main import main as command

    if "RANK" in os.environ:
        plant(planted(), int(os.environ["RANK"]))
    else:
        start_planted_ranks()
    command()


if __name__ == "__main__":
    sys.exit(main())
