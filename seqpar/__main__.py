"""`python -m seqpar` is the `seqpar` command."""

from __future__ import annotations

from seqpar.cli.entry import main

if __name__ == "__main__":
    main()
