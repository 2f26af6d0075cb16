"""`seqpar sample` from a clone: `python launch/sample.py`, or `torchrun --nproc_per_node=4 launch/sample.py`."""

from __future__ import annotations

from seqpar.cli.signals import Handler, leaves, take

if __name__ == "__main__":
    take(Handler("leave", leaves()))  # imports take seconds
    from seqpar.cli.main import sample

    sample()
