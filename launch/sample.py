"""Entry point for torchrun from a clone: `torchrun --nproc_per_node=4 launch/sample.py`. See `seqpar/cli/sample.py`."""

from __future__ import annotations

from seqpar.cli.sample import main

if __name__ == "__main__":
    main()
