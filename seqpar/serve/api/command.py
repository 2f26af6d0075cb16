"""`seqpar serve`: an API server and the ranks that it starts; runs until a signal or a failure of the ranks.

    seqpar serve builtin builtin-text --ranks 2
    seqpar serve black-forest-labs/FLUX.1-dev --gpus 4 --host 0.0.0.0 --keys keys.txt

Exit codes: 0 after SIGTERM or Ctrl-C, 2 for invalid flags, 1 for a failure.
"""

from __future__ import annotations

import asyncio
import importlib.util
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Literal

from seqpar.types.flags import Flag, parsed

EXTRA = ("fastapi", "uvicorn", "multipart", "prometheus_client")
FAILURE, MISTAKE = 1, 2
NAME = re.compile(r"[A-Za-z0-9]{1,32}")
ALIAS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,99}")
LEAST = dict.fromkeys(("gpus", "ranks", "loaded", "queue", "connections", "restarts"), 1)
LEAST |= dict.fromkeys(("port", "deadline_s", "video_deadline_s", "grace_s", "keep_s", "keep_bytes", "stuck_s"), 0)

GROUPS = {
    "GPUs": ("gpus", "ranks"),
    "Network": ("host", "port", "keys", "trusted_proxies", "connections"),
    "Models": ("name", "loras", "controlnet", "warm", "precision", "min_psnr", "cache", "park", "loaded", "swap"),
    "Requests": ("queue", "deadline_s", "video_deadline_s", "grace_s"),
    "Results": ("keep_s", "keep_bytes", "jobs"),
    "Advanced": ("show_prompts", "restarts", "stuck_s"),
}


@dataclass(frozen=True)
class ServeArgs:
    """Start an OpenAI-compatible server for images and videos."""

    models: Annotated[tuple[str, ...], Flag("MODEL", positional=True)] = ("builtin", "builtin-text")
    """Models to serve, each as --model of `seqpar sample` [builtin builtin-text]."""
    gpus: int | None = None
    """GPUs of this machine to use, one process each."""
    ranks: int | None = None
    """Number of processes: as --gpus if this machine has GPUs, otherwise processes on the CPU."""
    host: Annotated[str, Flag("ADDRESS")] = "127.0.0.1"
    """Address to listen at. Addresses that other machines can reach require --keys."""
    port: int = 8000
    """Port to listen at; 0 takes a free one, which the log names."""
    keys: Path | None = None
    """API key file, mode 600: one NAME:KEY per line, optionally followed by weight=X rate=N places=N priority=high
    (docs/serving.md). It is read again when it changes, and on SIGHUP."""
    trusted_proxies: Annotated[tuple[str, ...], Flag("CIDR")] = ()
    """Addresses of reverse proxies whose X-Forwarded-For and X-Forwarded-Proto count."""
    loras: Path | None = None
    """Folder of LoRAs that requests may name, NAME.safetensors each, for the models that they fit. Requests use
    NAME@TRANSFORMER where a model has several transformers."""
    controlnet: Annotated[tuple[str, ...], Flag("NAME=FOLDER")] = ()
    """ControlNets that requests may name, each a folder of diffusers, for the models that they fit."""
    warm: Annotated[tuple[str, ...], Flag("WxH")] = ()
    """Sizes, width x height or auto, that each model runs before it is ready, if it takes them. Other sizes work too;
    the first image of a size takes longer."""
    precision: Literal["fp8"] | None = None
    """fp8: most GEMMs of all models compute in 8 bits, as --precision of `seqpar sample`."""
    min_psnr: float | None = None
    """As --min-psnr of `seqpar sample`, for the 25 steps and the scheduler that each model has by default."""
    cache: Annotated[str | None, Flag("NAME")] = None
    """As --cache of `seqpar sample`, for all models: most blocks of similar steps are left out."""
    park: bool = False
    """As --park of `seqpar sample`: weights that are not in use wait in page-locked memory of the host."""
    loaded: int | None = None
    """Maximum number of models in memory at once, first those that are named first [all]. Keys with admin=true change
    them, and with --swap requests do."""
    swap: bool = False
    """Load the model of a request if it is not loaded, and unload those that were used least lately if memory or
    --loaded requires it. Without it such requests get HTTP 409."""
    queue: int = 64
    """Maximum queue length; further requests get HTTP 429."""
    connections: int = 512
    """Maximum number of open TCP connections. At the limit, a new one replaces the connection that has been idle
    longest, or gets 503 if all have requests in progress."""
    deadline_s: float = 600.0
    """Maximum and default request deadline, in seconds from arrival."""
    video_deadline_s: float = 3600.0
    """The same for videos."""
    grace_s: float = 30.0
    """Seconds for running requests to finish after SIGTERM."""
    keep_s: float = 3600.0
    """Retention of result files and finished job records, in seconds."""
    keep_bytes: int = 1 << 30
    """Maximum bytes of all result files; the oldest are deleted first."""
    jobs: Path | None = None
    """Folder for result files and records of finished jobs, which every server that mounts it can read."""
    name: Annotated[tuple[str, ...], Flag("NAME")] = ()
    """ALIAS=MODEL: a name that requests use for a model, which may have several; by default that of the command, for a
    folder its last part. Without =: the name of this server, with which ids of its jobs begin; random by default."""
    show_prompts: bool = False
    """Write prompts to the log."""
    restarts: int = 3
    """Exit with code 1 after this many failures of the ranks within ten minutes."""
    stuck_s: float = 300.0
    """Restart the ranks if they do not answer within this many seconds of a cancellation."""

    def checked(self) -> ServeArgs:
        """The flags with the default models if none is named; ValueError for invalid ones."""
        if self.gpus is not None and self.ranks is not None:
            raise ValueError(f"got --gpus {self.gpus} and --ranks {self.ranks}, expected one of them")
        for name, least in LEAST.items():
            value: float | None = getattr(self, name)
            if value is not None and not least <= value < float("inf"):
                raise ValueError(f"got --{name.replace('_', '-')} {value}, expected at least {least}")
        if self.port > 65535:
            raise ValueError(f"got --port {self.port}, expected at most 65535")
        if len(self._servers) > 1 or not all(map(NAME.fullmatch, self._servers)):
            text = "expected ALIAS=MODEL, or one name of 1 to 32 letters and digits"
            raise ValueError(f"got --name {' '.join(self._servers)}, {text}")
        for network in self.trusted_proxies:
            try:
                ip_network(network)
            except ValueError:
                text = f"got --trusted-proxies {network}, expected an address or a network such as 10.0.0.0/8"
                raise ValueError(text) from None
        args = replace(self, models=tuple(dict.fromkeys(self.models or ("builtin", "builtin-text"))))
        args.names()
        return args

    @property
    def _servers(self) -> list[str]:
        return [name for name in self.name if "=" not in name]

    @property
    def server(self) -> str | None:
        """The name of this server."""
        return next(iter(self._servers), None)

    def names(self) -> list[list[str]]:
        """The names of each model in requests, of which answers have the first; ValueError for invalid ones."""
        names: dict[str, list[str]] = {model: [] for model in self.models}
        for alias, _, model in (name.partition("=") for name in self.name if "=" in name):
            if model not in names:
                raise ValueError(f"got --name {alias}={model}, expected {alias}= and a model: {', '.join(self.models)}")
            if not ALIAS.fullmatch(alias):
                raise ValueError(f"got --name {alias}={model}, expected at most 100 letters, digits and . _ / : -")
            names[model].append(alias)
        # a path tells clients about the server's disk
        given = [names[x] or [Path(x).resolve().name if Path(x).exists() else x] for x in self.models]
        flat = [name for some in given for name in some]
        if twice := next((name for name in flat if flat.count(name) > 1), None):
            raise ValueError(f"several models are named {twice}; name them by --name ALIAS=MODEL")
        return given

    def public_names(self) -> list[str]:
        """The first name of each model."""
        return [names[0] for names in self.names()]

    @property
    def replica(self) -> list[str]:
        """The command that starts the ranks."""
        count = ["--gpus", str(self.gpus)] if self.gpus is not None else ["--ranks", str(self.ranks or 1)]
        loras = [] if self.loras is None else ["--loras", str(self.loras)]
        warm = ["--warm", *self.warm] if self.warm else []
        eight = [] if self.precision is None else ["--precision", self.precision]
        eight += [] if self.min_psnr is None else ["--min-psnr", str(self.min_psnr)]
        cache = [] if self.cache is None else ["--cache", self.cache]
        nets = ["--controlnet", *self.controlnet] if self.controlnet else []
        names = ["--names", *self.public_names()] if self.public_names() != [*self.models] else []
        how = [*loras, *nets, *warm, *eight, *cache, *names, *(["--park"] if self.park else [])]
        how += [] if self.loaded is None else ["--most", str(self.loaded)]
        how += ["--swaps"] if self.swap else []
        return [sys.executable, "-u", "-m", "seqpar.cli", "replica", *self.models, *count, *how]


def main(words: Sequence[str], child: Sequence[str] | None = None) -> int:
    """Run `seqpar serve WORDS`; return its exit code. child: the command of the ranks in place of `seqpar replica`.

    Prints one line "error: ..." for invalid flags and failures.
    """
    missing = [name for name in EXTRA if importlib.util.find_spec(name) is None]
    try:
        args = parsed(ServeArgs, words, "seqpar serve", GROUPS)
        if missing:
            raise ValueError(f"serving requires {', '.join(missing)}: pip install -e '.[serve]' in a clone")
        # imported when the extra is known to be installed
        from seqpar.serve.api.server import run

        args = args.checked()
        ended = asyncio.run(run(args, child))
        code, text = ended.code, ended.text
    except ValueError as error:
        code, text = MISTAKE, f"error: {error}"
    except OSError as error:
        code, text = FAILURE, f"error: {error}"
    if code:
        print(text, file=sys.stderr, flush=True)
    return code
