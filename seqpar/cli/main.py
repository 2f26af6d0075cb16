"""The commands of `seqpar` that import torch: parse the flags, then run, in this process or in ranks that it starts.

`seqpar/cli/entry.py` has the help of all commands. Arguments are checked before weights load; an invalid one is one
message and a non-zero exit.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from seqpar.cli.args import COMMANDS, GROUPS, Args, ConvertArgs, PlanArgs, ProfileArgs, ReplicaArgs, VerifyArgs
from seqpar.cli.exits import guarded
from seqpar.cli.ranks import start, wanted
from seqpar.cli.signals import at_once, quick_exit
from seqpar.mesh import mesh as meshes
from seqpar.mesh.watch import Deadlines
from seqpar.types.flags import parsed


def main() -> None:
    guarded(lambda rank: command(sys.argv[1:], rank))


def sample() -> None:
    """`seqpar sample` as a script, without the word `sample`."""
    guarded(lambda rank: command(["sample", *sys.argv[1:]], rank))


def command(words: Sequence[str], rank: int = 0) -> None:
    """Parse the words and do what they say, in this process or in ranks that it starts. Rank 0 prints the help."""
    args: Args | ProfileArgs | PlanArgs | VerifyArgs | ConvertArgs | ReplicaArgs
    args = parsed(COMMANDS[words[0]], words[1:], f"seqpar {words[0]}", GROUPS, shows=rank == 0)
    # imported after the flags are parsed, because diffusers takes seconds to load, which --help does not need
    if isinstance(args, ConvertArgs):
        with at_once():
            from seqpar.cli.job import DTYPES
            from seqpar.convert.folder import convert

        convert(args.source, args.target, args.heads, DTYPES.get(args.dtype), args.precision)
    elif isinstance(args, PlanArgs):
        with at_once():
            from seqpar.cli.job import as_dry_run
            from seqpar.cli.sample import run

        run(as_dry_run(args), args.hosts, args.explain)
    elif _is_start(args):
        start(words, wanted(args.gpus, args.ranks))
        if isinstance(args, ReplicaArgs):
            quick_exit(0)
    elif isinstance(args, ReplicaArgs):
        if not args.models:
            raise ValueError("got no model, expected at least one to serve")
        with at_once():
            from seqpar.cli.job import DTYPES
            from seqpar.serve.ranks.loop import run as serve

        deadlines = Deadlines(args.first_deadline_s, args.deadline_s, args.host_deadline_s)
        same = ("precision", "min_psnr", "cache", "park", "most", "swaps", "first", "controlnet")
        options = {name: getattr(args, name) for name in same}
        names = dict(zip(args.models, args.names or args.models, strict=True))
        serve(names, DTYPES.get(args.dtype), deadlines, args.loras, args.warm, **options)
        meshes.close()
        quick_exit(0)
    elif isinstance(args, VerifyArgs):
        with at_once():
            from seqpar.cli.verify import run_verify

        run_verify(args)
    else:
        with at_once():
            from seqpar.cli.sample import run

        run(args)


def _is_start(args: Args | VerifyArgs | ReplicaArgs) -> bool:
    count, world = wanted(args.gpus, args.ranks), os.environ.get("WORLD_SIZE")  # set in each rank
    asked = args.gpus is not None or args.ranks is not None
    if world is not None and asked and int(world) != count:
        raise ValueError(
            f"got {count} ranks by flag and WORLD_SIZE={world} from torchrun, expected one of them; leave one out"
        )
    return world is None and count > 1
