"""Many clients of `seqpar serve` at once, with cancels, killed and stopped ranks: nothing may be lost or made twice.

    python launch/bench.py serve --requests 500 --clients 32 --cancels 100 --kills 3 --stops 1 --out lines.jsonl

It starts the server with the built-in models. Clients ask for pictures of 20 kinds; of one kind all must have the same
bits, which for `commands` kinds are also compared with those that `seqpar sample` writes. Meanwhile jobs are cancelled
by DELETE, and clients hang up, at random steps, and ranks get SIGKILL or SIGSTOP. At the end the clients' ledger is
compared with the server's, and the front's memory, open files and threads with those in the middle.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from launch.benches import served
from launch.benches.served import LIMIT_S, a_rank, counted, get, server, text_of, until_ready
from launch.benches.timing import append, command, environment

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
    bits = {kind: {each.bits for each in asked if each.kind == kind and each.bits} for kind in range(KINDS)}
    made = sum(each.bits is not None for each in asked)
    single = all(len(each) <= 1 for each in bits.values())
    yield f"{made} pictures of {sum(map(bool, bits.values()))} kinds, each with one set of bits", single
    for kind, body in list(enumerate(kinds()))[:commands]:
        if bits[kind]:
            yield f"kind {kind} has the bits of seqpar sample", bits[kind] == {_of_command(body, ranks)}


def _of_command(body: dict[str, Any], ranks: int) -> str:
    width, height = body["size"].split("x")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "picture.png")
        words = ["--prompt", body["prompt"], "--seed", body["seed"], "--steps", body["steps"], "--out", file]
        count = ["--gpus" if torch.cuda.is_available() else "--ranks", ranks]
        every = ["sample", "--model", body["model"], "--size", f"{height}x{width}", *words, *count]
        done = served.ended(every)
        return bits_of(file.read_bytes()) if done.returncode == 0 else done.stderr[-300:]


def used(process: int) -> dict[str, int]:
    status = Path(f"/proc/{process}/status").read_text()
    facts = dict(line.split(":", 1) for line in status.splitlines())
    files = len(os.listdir(f"/proc/{process}/fd"))
    return {"memory": int(facts["VmRSS"].split()[0]) // 1024, "files": files, "threads": int(facts["Threads"])}


@dataclass(frozen=True)
class Serve:
    """Ask a server for many pictures while jobs are cancelled and ranks end; fail if one is lost, doubled or wrong."""

    ranks: int = 2
    """Number of ranks, on GPUs where the machine has them."""
    requests: int = 500
    """Requests of all clients together."""
    clients: int = 32
    """Clients that ask at the same time, each for one picture after the other."""
    cancels: int = 100
    """Requests that are cancelled, half of them by DELETE and half by hanging up."""
    kills: int = 3
    """How often a rank gets SIGKILL."""
    stops: int = 1
    """How often a rank gets SIGSTOP, which is noticed after the deadline of an exchange."""
    commands: int = 3
    """Kinds of pictures that are compared with those of `seqpar sample`."""
    seed: int = 0
    """Seed of what is drawn: kinds, times of cancels and of kills."""
    out: Path | None = None
    """Append JSON lines here."""


def main(args: Serve) -> None:
    ledger, begun = Ledger(), time.monotonic()
    with server(("builtin", "builtin-text"), args.ranks, ("--queue", "256")) as (process, port, log):
        until_ready(port)
        _run(args, ledger, process.pid, port)
        jobs = get(port, "/v1/jobs")["data"]
        metrics = text_of(port, "/metrics")
        process.send_signal(signal.SIGTERM)
        code = process.wait(LIMIT_S)
    said = [
        *verdicts(ledger, jobs, args.requests, args.kills + args.stops, args.commands, args.ranks),
        ("the server ended with exit code 0", code == 0),
    ]
    ends = Counter(each.code or "picture" for each in ledger.asked)
    line = {"bench": "serve", "case": {**asdict(args), "out": None}, "ends": dict(ends), "used": ledger.used}
    line |= {"killed": ledger.killed, "seconds": time.monotonic() - begun, "restarts": counted(metrics, "restarts")}
    line |= {"verdicts": [{"text": text, "right": right} for text, right in said], "log_lines": len(log)}
    append([line | {"command": command(), "env": environment(torch.device("cpu"))}], args.out)
    for text, right in said:
        print(f"{'ok    ' if right else 'FAILED'} {text}", flush=True)
    if not all(right for _, right in said):
        print("\n".join(log[-40:]), file=sys.stderr)
        raise SystemExit(1)


# Clients ----------------------------------------------------------------------------------------------------------


def _run(args: Serve, ledger: Ledger, front: int, port: int) -> None:
    """Let all clients ask, and trouble them, until every request has an answer."""
    drawn, every = random.Random(args.seed), kinds()
    left = set(drawn.sample(range(args.requests), args.cancels // 2))
    todo = [(index, drawn.randrange(len(every)), index in left) for index in range(args.requests)]
    lock, done = threading.Lock(), threading.Event()

    def client() -> None:
        while True:
            with lock:
                if not todo:
                    return
                _, kind, leaves = todo.pop(0)
            asked = _ask(port, kind, every[kind], drawn.uniform(0.05, 2.0) if leaves else None)
            with lock:
                ledger.asked.append(asked)

    clients = [threading.Thread(target=client, daemon=True) for _ in range(args.clients)]
    trouble = threading.Thread(target=_trouble, args=(args, ledger, front, port, done), daemon=True)
    for thread in (*clients, trouble):
        thread.start()
    for thread in clients:
        thread.join(LIMIT_S)
    done.set()
    trouble.join(LIMIT_S)
    ledger.used.append(used(front))


def _ask(port: int, kind: int, body: dict[str, Any], leaves_s: float | None) -> Asked:
    start, line = time.monotonic(), HTTPConnection("127.0.0.1", port, timeout=leaves_s or LIMIT_S)
    try:
        line.request("POST", "/v1/images/generations", json.dumps(body), {"content-type": "application/json"})
        answer = line.getresponse()
        told, id = json.loads(answer.read()), answer.getheader("x-request-id")
    except (TimeoutError, HTTPException, OSError) as error:
        code = "left" if leaves_s is not None else f"no answer: {type(error).__name__}"
        return Asked(kind, None, 0, code, None, time.monotonic() - start)
    finally:
        line.close()
    seconds = time.monotonic() - start
    if answer.status != 200:
        return Asked(kind, id, answer.status, told["error"]["code"], None, seconds)
    return Asked(kind, id, 200, None, bits_of(base64.b64decode(told["data"][0]["b64_json"])), seconds)


def _trouble(args: Serve, ledger: Ledger, front: int, port: int, done: threading.Event) -> None:
    drawn = random.Random(args.seed + 1)
    signals = [signal.SIGKILL] * args.kills + [signal.SIGSTOP] * args.stops
    at = {round(args.requests * (index + 1) / (len(signals) + 1)): each for index, each in enumerate(signals)}
    cancels = sorted(drawn.sample(range(args.requests), args.cancels - args.cancels // 2))
    while not done.wait(0.05):
        count = len(ledger.asked)
        if count * 2 >= args.requests and not ledger.used:
            ledger.used.append(used(front))
        while cancels and cancels[0] <= count:
            _cancel_one(port, drawn)
            cancels.pop(0)
        for place in [place for place in at if place <= count]:
            if (rank := a_rank(front, drawn)) is not None:
                number = at.pop(place)
                os.kill(rank, number)
                ledger.killed.append(signal.Signals(number).name)


def _cancel_one(port: int, drawn: random.Random) -> None:
    open_jobs = [job["id"] for job in get(port, "/v1/jobs")["data"] if job["state"] in ("queued", "running")]
    if open_jobs:
        get(port, f"/v1/jobs/{open_jobs[0] if drawn.random() < 0.7 else drawn.choice(open_jobs)}", "DELETE")
