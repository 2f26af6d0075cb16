"""Starts `seqpar serve` for a model of ComfyUI's folders, in another process. One such server runs at a time."""

from __future__ import annotations

import atexit
import json
import os
import re
import shlex
import subprocess
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path

from .client import POLL_S, Check, Server, ServerError

# the program comes from the environment alone: a workflow must not choose what runs
COMMAND = "SEQPAR_COMMAND"
END_S = 60.0  # for a server to finish
LINES = 20  # of its log that are kept


@dataclass(frozen=True)
class Plan:
    """A server to start. pipeline: folder, hub id or name. file: of a transformer, in place of the folder's.

    controlnet: NAME=FOLDER.
    """

    pipeline: str
    file: str | None = None
    gpus: int = 1
    eight: bool = False
    controlnet: str | None = None
    loras: frozenset[str] = frozenset()

    def with_lora(self, path: str) -> Plan:
        return replace(self, loras=self.loras | {path})


@dataclass
class Running:
    """A started server. lines: the last ones of its log."""

    plan: Plan
    process: subprocess.Popen[str]
    folder: tempfile.TemporaryDirectory[str]
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=LINES))
    server: Server | None = None
    reader: threading.Thread | None = None

    def read(self) -> None:
        """Follow the log, in a thread."""
        stderr = self.process.stderr
        assert stderr is not None
        with stderr:
            for line in stderr:
                self.lines.append(line.strip())
                if '"event": "listening"' in line:
                    self.server = Server(f"http://127.0.0.1:{json.loads(line)['port']}")

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.reader is not None:
            self.reader.join(END_S)
        self.folder.cleanup()


RUNNING: list[Running] = []  # at most one: another model would not fit beside it


def server_of(plan: Plan, check: Check) -> Server:
    """The server of a plan, ready; it is started if none runs, or another one. ServerError if it ends."""
    running = RUNNING[0] if RUNNING else None
    if running is not None and (running.process.poll() is not None or not serves(running.plan, plan)):
        stop()
        running = None
    if running is None:
        running = start(plan)
        RUNNING.append(running)
    while True:
        if running.process.poll() is not None:
            if running.reader is not None:
                running.reader.join(END_S)
            last = next((line for line in reversed(running.lines) if line.startswith("error: ")), None)
            reason = (last or (running.lines[-1] if running.lines else "without a word")).removeprefix("error: ")
            raise ServerError(f"seqpar serve has ended: {reason}")
        if running.server is not None:
            try:
                running.server.json("GET", "/ready", check)
            except ServerError as error:
                if error.status != 503:
                    raise
            else:
                return running.server
        check()
        time.sleep(POLL_S)


def serves(running: Plan, plan: Plan) -> bool:
    """Whether a server of one plan does for another: it may have more LoRAs."""
    return replace(running, loras=plan.loras) == plan and plan.loras <= running.loras


def start(plan: Plan) -> Running:
    folder, program = (
        tempfile.TemporaryDirectory(prefix="seqpar-comfyui-"),
        shlex.split(os.environ.get(COMMAND, "seqpar")),
    )
    try:
        words = [*program, "serve", model_path(plan, Path(folder.name)), "--ranks", str(plan.gpus), "--port", "0"]
        words += [*(["--precision", "fp8"] if plan.eight else []), *lora_flags(plan, Path(folder.name))]
        words += [] if plan.controlnet is None else [f"--controlnet={plan.controlnet}"]
        process = subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    except OSError as error:
        folder.cleanup()
        advice = f"install seqpar, or set {COMMAND} to its command, such as /opt/seqpar/bin/seqpar"
        raise ServerError(f"{program[0]} cannot be started ({error.strerror}); {advice}") from error
    except ServerError:
        folder.cleanup()
        raise
    running = Running(plan, process, folder)
    running.reader = threading.Thread(target=running.read, daemon=True)
    running.reader.start()
    return running


def lora_flags(plan: Plan, folder: Path) -> list[str]:
    """A folder of links to the LoRAs of a plan alone: a server refuses files that fit no model."""
    if not plan.loras:
        return []
    links = folder / "loras"
    links.mkdir()
    for path in sorted(plan.loras):
        (links / Path(path).name).symlink_to(path)
    return ["--loras", str(links)]


def model_path(plan: Plan, folder: Path) -> str:
    """What the server is told to serve. A single file needs the other parts beside it: a folder of links has both."""
    if plan.file is None:
        return plan.pipeline
    parts = Path(plan.pipeline)
    if not (parts / "model_index.json").is_file():
        raise ServerError(
            f"{plan.file} needs the folder of a pipeline with its text encoders and VAE; name it as pipeline"
        )
    links = folder / "model"
    links.mkdir()
    for part in parts.resolve().iterdir():
        (links / part.name).symlink_to(part)
    link = links / re.sub(r"[^A-Za-z0-9._-]", "_", Path(plan.file).name)
    link.unlink(missing_ok=True)
    link.symlink_to(Path(plan.file).resolve())
    return str(link)


def stop() -> None:
    """End the server that was started, if there is one."""
    while RUNNING:
        RUNNING.pop().stop()


atexit.register(stop)
