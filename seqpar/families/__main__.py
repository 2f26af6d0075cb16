"""Proves a family: `python -m seqpar.families NAME`, a file of this folder or a class of diffusers' transformers.

It builds a tiny random model of each class (`_tiny.py`), computes a call in fp64 in one process and on 3 ranks of the
CPU with odd numbers of tokens, by diffusers' own blocks and by the family's, and prints that they agree, or the first
module whose output differs. Without a name it lists all of diffusers' transformers: which run, and why others do not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from seqpar.families._prove import RANKS, kinds_of, proofs, runs, standing, transformers


def main(words: Sequence[str] | None = None) -> int:
    """Prove the families in the arguments, or list all transformers; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m seqpar.families", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a file of seqpar/families, or a transformer class")
    try:
        names: list[str] = parser.parse_args(words).names
        kinds = [kind for name in names for kind in kinds_of(name)]
    except ValueError as error:
        parser.error(str(error))
    if not names:
        every = transformers()
        print(*(f"{kind}: {standing(kind)}" for kind in every), sep="\n")
        print(f"{sum(map(runs, every))} of {len(every)} run")
        return 0
    wrong = 0
    for kind, reason in proofs(kinds):
        wrong += reason is not None
        print(f"{kind}: {reason or f'{RANKS} ranks agree with one process'}", flush=True)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
