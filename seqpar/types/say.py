"""Lines about a run, for its user."""

from __future__ import annotations

import sys

from tqdm import tqdm


def say(text: str) -> None:
    """Print a line of this package on stdout, above the progress bars that this process shows."""
    tqdm.write(f"seqpar: {text}")
    sys.stdout.flush()
