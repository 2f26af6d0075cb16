"""Many clients of `seqpar serve` at once, with cancels, killed and stopped ranks: nothing may be lost or made twice.

    python launch/bench.py serve --requests 500 --clients 32 --cancels 100 --kills 3 --stops 1 --out lines.jsonl

It starts the server with the built-in models. Clients ask for pictures of 20 kinds; of one kind all must have the same
bits, which for `commands` kinds are also compared with those that `seqpar sample` writes. Meanwhile jobs are cancelled
by DELETE, and clients hang up, at random steps, and ranks get SIGKILL or SIGSTOP. At the end the clients' ledger is
compared with the server's, and the front's memory, open files and threads with those in the middle.
"""

from __future__ import annotations

import base64
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import torch

from launch.benches.serve_judge import Asked, Ledger, bits_of, kinds, used, verdicts
from launch.benches.served import LIMIT_S, a_rank, counted, get, server, text_of, until_ready
from launch.benches.timing import append, command, environment


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
    """Requests that are given up, half of them by DELETE and half by hanging up."""
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
    """Run the server and its clients, print the verdicts, append a line; exit with code 1 if one of them is wrong."""
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
    """Ask for a picture; leaves_s: seconds after which the client hangs up."""
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
    """Cancel jobs, and kill and stop ranks, spread evenly over the requests."""
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
    """Cancel the job that runs, or one that waits."""
    open_jobs = [job["id"] for job in get(port, "/v1/jobs")["data"] if job["state"] in ("queued", "running")]
    if open_jobs:
        get(port, f"/v1/jobs/{open_jobs[0] if drawn.random() < 0.7 else drawn.choice(open_jobs)}", "DELETE")
