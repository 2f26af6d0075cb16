"""What `launch/benches/serve.py` asks a server for, and how it judges the answers."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

ROOM = 1.25  # memory, files and threads of the front at the end, in times of the middle
KINDS = 20  # of pictures
THINGS = ("frog", "cat", "rocket", "apple", "house", "fish")
COLOURS = ("red", "green", "blue")
CLASSES = ("cat", "dog", "frog", "7")


@dataclass(frozen=True)
class Asked:
    """What a client asked and got. bits: of the picture. code: the answer's error, or "left" for who hung up."""

    kind: int
    id: str | None
    status: int
    code: str | None
    bits: str | None
    seconds: float


@dataclass
class Ledger:
    """What all clients asked. used: numbers of the front's process in the middle and at the end."""

    asked: list[Asked] = field(default_factory=list)
    used: list[dict[str, int]] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)


def kinds(count: int = KINDS) -> list[dict[str, Any]]:
    """Return the bodies of requests of different kinds; the first ones are texts."""
    made: list[dict[str, Any]] = []
    for index in range(count - count // 3):
        size = ("64x64", "48x64", "64x32")[index % 3]
        words = f"a {COLOURS[index % len(COLOURS)]} {THINGS[index % len(THINGS)]}"
        made.append({"model": "builtin-text", "prompt": words, "size": size, "steps": 3 + index % 4, "seed": index})
    for index in range(count // 3):
        name = CLASSES[index % len(CLASSES)]
        made.append({"model": "builtin", "prompt": name, "steps": 4 + index, "seed": index, "guidance": 2.0 + index})
    return made


def bits_of(png: bytes) -> str:
    """Return 16 hex digits of a hash over the pixels of a picture."""
    return hashlib.sha256(np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).tobytes()).hexdigest()[:16]


def verdicts(
    ledger: Ledger, jobs: Sequence[dict[str, Any]], requests: int, signals: int, commands: int, ranks: int
) -> Iterator[tuple[str, bool]]:
    """Yield what was found, and whether it is right. jobs: the server's. The others are the flags."""
    yield from _answers(ledger.asked, jobs, requests)
    yield from _pictures(ledger.asked, commands, ranks)
    yield f"signals to ranks: {ledger.killed}", len(ledger.killed) == signals
    before, after = ledger.used[0], ledger.used[-1]
    grown = {name: (before[name], after[name]) for name in after if after[name] > ROOM * before[name] + 16}
    yield f"the front's memory (MiB), files and threads: {before}, at the end {after}", not grown


def _answers(asked: Sequence[Asked], jobs: Sequence[dict[str, Any]], requests: int) -> Iterator[tuple[str, bool]]:
    """Yield whether the clients' ledger and the server's are the same."""
    yield f"{len(asked)} of {requests} requests have an answer", len(asked) == requests
    strange = Counter(each.code for each in asked if each.code not in (None, "left", "cancelled"))
    yield f"answers that are neither pictures nor given up: {dict(strange) or 'none'}", not strange
    by_id = {job["id"]: job for job in jobs}
    mine = {each.id: "completed" if each.bits else "cancelled" for each in asked if each.id is not None}
    other = {
        id: by_id.get(id, {}).get("state") for id, state in mine.items() if by_id.get(id, {}).get("state") != state
    }
    yield f"{len(mine)} jobs are known to clients and server alike, and {len(other)} differ", not other
    rest = [job for job in jobs if job["id"] not in mine]
    hung = sum(each.code == "left" for each in asked)
    right = len(rest) == hung and all(job["state"] in ("cancelled", "completed") for job in rest)
    yield f"{hung} clients hung up, and {len(rest)} jobs have no client", right
    twice = len(jobs) - len(by_id)
    yield f"{len(jobs)} jobs, {twice} of them twice", twice == 0 and len(jobs) == requests


def _pictures(asked: Sequence[Asked], commands: int, ranks: int) -> Iterator[tuple[str, bool]]:
    """Yield whether all pictures of a kind have the same bits, and those of the command."""
    bits = {kind: {each.bits for each in asked if each.kind == kind and each.bits} for kind in range(KINDS)}
    made = sum(each.bits is not None for each in asked)
    single = all(len(each) <= 1 for each in bits.values())
    yield f"{made} pictures of {sum(map(bool, bits.values()))} kinds, each with one set of bits", single
    for kind, body in list(enumerate(kinds()))[:commands]:
        if bits[kind]:
            yield f"kind {kind} has the bits of seqpar sample", bits[kind] == {_of_command(body, ranks)}


def _of_command(body: dict[str, Any], ranks: int) -> str:
    """Return the bits of the picture that `seqpar sample` writes; height comes first there."""
    width, height = body["size"].split("x")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "picture.png")
        words = ["--prompt", body["prompt"], "--seed", body["seed"], "--steps", body["steps"], "--out", file]
        count = ["--gpus" if torch.cuda.is_available() else "--ranks", ranks]
        every = ["sample", "--model", body["model"], "--size", f"{height}x{width}", *words, *count]
        done = subprocess.run([sys.executable, "-m", "seqpar.cli", *map(str, every)], capture_output=True, check=False)
        return bits_of(file.read_bytes()) if done.returncode == 0 else done.stderr.decode()[-300:]


def used(process: int) -> dict[str, int]:
    """Return the memory in MiB, the open files and the threads of a process."""
    status = Path(f"/proc/{process}/status").read_text()
    facts = dict(line.split(":", 1) for line in status.splitlines())
    files = len(os.listdir(f"/proc/{process}/fd"))
    return {"memory": int(facts["VmRSS"].split()[0]) // 1024, "files": files, "threads": int(facts["Threads"])}
