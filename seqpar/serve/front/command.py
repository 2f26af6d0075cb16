"""`seqpar serve`: an HTTP server before ranks that hold models; it runs until a signal or the end of its ranks.

    seqpar serve builtin builtin-text --ranks 2
    seqpar serve black-forest-labs/FLUX.1-dev --gpus 4 --host 0.0.0.0 --keys keys.txt

Exit codes: 0 after SIGTERM or Ctrl-C, 2 for a mistake in the flags, 1 for a failure.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from seqpar.types.flags import parsed

EXTRA = ("fastapi", "uvicorn", "multipart", "prometheus_client")
FAILURE, MISTAKE = 1, 2


@dataclass(frozen=True)
class ServeArgs:
    """Start an OpenAI-compatible server for images and videos."""

    models: Annotated[tuple[str, ...], tyro.conf.Positional] = ("builtin", "builtin-text")
    """Models to hold, each as --model of `seqpar sample`."""
    gpus: int | None = None
    """Number of GPUs of this machine to use, one process each."""
    ranks: int | None = None
    """Number of processes: as --gpus if this machine has GPUs, otherwise processes on the CPU."""
    host: str = "127.0.0.1"
    """Address to listen at. One that other machines reach needs --keys."""
    port: int = 8000
    """Port to listen at; 0 takes a free one, which the log names."""
    keys: Path | None = None
    """File of API keys, a line NAME:KEY each, which only its owner can read."""
    loras: Path | None = None
    """Folder of LoRAs that requests may name, NAME.safetensors each, for the models that they fit. A request says
    NAME@TRANSFORMER where a model has several transformers."""
    warm: tuple[str, ...] = ()
    """Sizes, WIDTHxHEIGHT or auto, that each model makes before it is ready, if it takes them; others work, too, but
    their first one takes longer."""
    queue: int = 64
    """Requests that wait at most; one more is told to come again (429)."""
    connections: int = 512
    """Maximum number of open TCP connections. At the limit, a new one replaces the connection that has been idle
    longest, or gets 503 if all have requests in progress."""
    deadline_s: float = 600.0
    """Longest time of a request from its arrival, and that of one that names none."""
    video_deadline_s: float = 3600.0
    """The same for videos, for which no client waits."""
    grace_s: float = 30.0
    """Seconds that running requests have to end after SIGTERM."""
    keep_s: float = 3600.0
    """Retention of result files and finished job records, in seconds."""
    keep_bytes: int = 1 << 30
    """Bytes of all files behind links; the oldest go first."""
    jobs: Path | None = None
    """Folder in which servers keep what is known of jobs and files for each other, so that each answers for all."""
    show_prompts: bool = False
    """Write prompts into the log."""
    restarts: int = 3
    """Exit with code 1 after this many failures of the ranks within ten minutes."""
    stuck_s: float = 300.0
    """Restart the ranks if they do not answer within this many seconds of a cancellation."""


def main(words: Sequence[str], child: Sequence[str] | None = None) -> int:
    """Run `seqpar serve WORDS` and return its exit code. child: the command of the ranks in place of `seqpar replica`.

    One line "error: ..." tells a mistake or what failed.
    """
    missing = [name for name in EXTRA if importlib.util.find_spec(name) is None]
    try:
        args = parsed(ServeArgs, words, "seqpar serve", __doc__)
        if missing:
            raise ValueError(f"serving requires {', '.join(missing)}: pip install -e '.[serve]' in a clone")
        # imported when the extra is known to be there
        from seqpar.serve.front.server import run

        ended = asyncio.run(run(_checked(args), child or _child(args)))
    except ValueError as error:
        return _told(f"error: {error}", MISTAKE)
    except OSError as error:
        return _told(f"error: {error}", FAILURE)
    return ended.code if ended.code == 0 else _told(ended.text, ended.code)


def _told(text: str, code: int) -> int:
    print(text, file=sys.stderr, flush=True)
    return code


def _checked(args: ServeArgs) -> ServeArgs:
    """Return the flags, with the default models if none is named; ValueError for one that means nothing."""
    if args.gpus is not None and args.ranks is not None:
        raise ValueError(f"got --gpus {args.gpus} and --ranks {args.ranks}, expected one of them")
    least = {
        "gpus": 1,
        "ranks": 1,
        "port": 0,
        "queue": 1,
        "connections": 1,
        "deadline_s": 0,
        "video_deadline_s": 0,
        "grace_s": 0,
        "keep_s": 0,
        "keep_bytes": 0,
        "restarts": 1,
    }
    for name, bound in {**least, "stuck_s": 0}.items():
        value: float | None = getattr(args, name)
        if value is not None and not bound <= value < float("inf"):
            raise ValueError(f"got --{name.replace('_', '-')} {value}, expected at least {bound}")
    if args.port > 65535:
        raise ValueError(f"got --port {args.port}, expected at most 65535")
    return replace(args, models=args.models or ("builtin", "builtin-text"))


def _child(args: ServeArgs) -> list[str]:
    """Return the command that starts the ranks."""
    count = ["--gpus", str(args.gpus)] if args.gpus is not None else ["--ranks", str(args.ranks or 1)]
    loras = [] if args.loras is None else ["--loras", str(args.loras)]
    warm = ["--warm", *args.warm] if args.warm else []
    return [sys.executable, "-u", "-m", "seqpar.cli", "replica", *args.models, *count, *loras, *warm]
