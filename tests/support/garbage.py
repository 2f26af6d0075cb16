"""How tests look for garbage: seldom, and never in what was imported."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

# objects that are made, and looks at them, before Python looks: tests make many models and drop them
SELDOM = 50_000, 20, 20


@contextmanager
def imported() -> Iterator[None]:
    """Look for no garbage within, nor later in what was made: it stays, and its forks would look through it, too.

    Python frees it at its end; some of it tells of leaks otherwise.
    """
    gc.disable()
    yield
    gc.freeze()
    atexit.register(gc.unfreeze)
    gc.enable()
