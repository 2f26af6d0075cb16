"""One rank of a server: checks the flags, and serves until the API server sends `Finish`."""

from __future__ import annotations

from seqpar.cli.args import ReplicaArgs
from seqpar.cli.job import DTYPES
from seqpar.cli.signals import quick_exit
from seqpar.mesh import mesh as meshes
from seqpar.mesh.watch import Deadlines
from seqpar.serve.ranks.loop import run


def run_replica(args: ReplicaArgs) -> None:
    """Serve requests of an API server. Collective."""
    if not args.models:
        raise ValueError("got no model, expected at least one to serve")
    deadlines = Deadlines(args.first_deadline_s, args.deadline_s, args.host_deadline_s)
    run(args.models, DTYPES.get(args.dtype), deadlines, args.loras, args.warm)
    meshes.close()
    quick_exit(0)
