"""How an entry point ends: a mistake is one message, from rank 0, and a non-zero exit on every rank; nobody hangs."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable

import torch

from seqpar import mesh as meshes

GRACE_S = 5.0  # how long other ranks leave rank 0 to say what is wrong


def guarded(work: Callable[[int], None]) -> None:
    """Run `work(rank)`; what a user can cause ends in a message, anything else is a bug and ends in a traceback."""
    rank = int(os.environ.get("RANK", "0"))
    try:
        work(rank)
    except SystemExit as stop:  # of the command line's parser, which has spoken
        _leave(rank, None, stop.code)
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        _leave(rank, f"error: {error}", 1)
    except KeyboardInterrupt:
        _leave(rank, "stopped", 130)
    except BaseException:  # a bug: told now, because leaving the group may wait for others for ever
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)
    meshes.close()


def _leave(rank: int, message: str | None, code: int | str | None) -> None:
    """Exit; rank 0 speaks first. Others speak only where rank 0 had nothing to say and still runs."""
    if not code:
        return
    if rank > 0:
        time.sleep(GRACE_S)
        message = message and f"rank {rank}: {message}"
    if message:
        print(message, file=sys.stderr, flush=True)
    sys.stdout.flush()
    # not sys.exit: a process group whose other ranks wait in a collective would hold the exit up
    os._exit(code if isinstance(code, int) else 1)
