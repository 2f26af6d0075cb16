"""What a server costs: its share of a picture's time, a full queue, cancels, LoRAs, swaps, killed ranks, a load.

    python launch/bench.py latency --model flux.1-dev --folder /tmp/flux --ranks 2 --size 1024x1024 --out lines.jsonl

Each part asks a server that the bench starts. `flux.1-dev` is written to the folder at its released sizes with random
weights (24 GB and 9.5 GB; tiny ones on a machine without GPUs), so that no checkpoint is needed. With `--swap MODEL`
one model is loaded at a time, and the part `swapped` lets requests swap the two: seconds of each swap, and whether
memory, files and threads stay flat.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from http.client import HTTPConnection
from pathlib import Path
from statistics import fmean, median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

from launch.baselines.pipelines import saved_loras
from launch.benches.loading import write
from launch.benches.served import a_rank, asked, get, processes, server, status, text_of, until_ready, used
from launch.benches.timing import record

FLUX = "flux.1-dev"
LORAS = ("first", "second")
PROMPTS = {"builtin": "cat"}  # other models take texts
NOTICE_S = 0.01  # between two looks at a server
FIRST = 3  # pictures before anything is measured: kernels are compiled, graphs captured


@dataclass(frozen=True)
class Latency:
    """Measure a server: its own cost, a full queue, cancels, a killed rank, and latencies at a load."""

    model: str = "builtin-text"
    """A model of `seqpar sample` that generates images from prompts, or flux.1-dev."""
    folder: Path = Path("flux.1-dev")
    """Where flux.1-dev is written, unless it is there."""
    ranks: int = 2
    """Number of ranks, on GPUs where the machine has them."""
    steps: int = 28
    """Denoising steps of each picture."""
    size: str = "auto"
    """WIDTHxHEIGHT of each picture."""
    pictures: int = 12
    """Pictures of each part."""
    waiting: int = 1000
    """Requests that wait while steps are timed."""
    cancels: int = 8
    """Runs that are cancelled at random times."""
    kills: int = 1
    """How often a rank is killed."""
    arrivals: int = 40
    """Requests that arrive at random times."""
    load: float = 0.8
    """Requests that arrive while a picture is made."""
    lora_rank: int = 0
    """Serve two random LoRAs of this rank on all linear layers of flux.1-dev's blocks, and switch between them."""
    swap: str = ""
    """A second model, which the part swapped lets requests swap with the first one."""
    swaps: int = 50
    """Number of swaps."""
    parts: tuple[str, ...] = ()
    """Only these of alone, busy, full, cancelled, switched, swapped, killed and open."""
    fake: bool = False
    """Ranks that answer at once in place of a model's (tests/support/fake_replica.py): the API server alone."""
    seed: int = 0
    """Seed of what is drawn."""
    out: Path | None = None
    """Append JSON lines here."""


@dataclass(frozen=True)
class Picture:
    """The client's seconds of a picture, those of the process that wrote the file, and those of the ranks, by part."""

    seconds: float
    file_s: float
    parts_s: dict[str, float]

    @property
    def ranks_s(self) -> float:
        return sum(self.parts_s.values())


@dataclass(frozen=True)
class Bench:
    """A server that is measured, and how it is asked. front: its process."""

    args: Latency
    port: int
    front: int
    drawn: random.Random

    def body(self, **other: Any) -> dict[str, Any]:
        shape = {"size": self.args.size, "steps": self.args.steps, "seed": 1}
        return {"prompt": "a red fox in deep snow", **shape, **other}

    def picture(self, kept: HTTPConnection | None = None, **other: Any) -> Picture:
        start = time.monotonic()
        parts = asked(self.port, self.body(**other), kept)["seqpar"]["seconds"]
        return Picture(time.monotonic() - start, parts.pop("file"), {} if self.args.fake else parts)


Part = Callable[[Bench], dict[str, Any]]


def main(args: Latency) -> None:
    if args.fake:
        from tests.support.front import running  # needs the extra `test`

        with TemporaryDirectory() as temporary, running(Path(temporary)) as front:
            _measure(args, front.port, front.process)
        return
    folder = str(args.folder)
    words = ["--queue", str(args.waiting + 64)]
    if args.model == FLUX:
        write(FLUX, args.folder)
        if args.lora_rank:
            loras = args.folder.with_name(f"{args.folder.name}-loras")
            saved_loras(loras, args.folder / "transformer", LORAS, args.lora_rank)
            words += ["--loras", str(loras)]
    models, begun = [folder if args.model == FLUX else args.model], time.monotonic()
    if args.swap:
        models.append(args.swap)
        words += ["--loaded", "1", "--swap"]
    with server(models, args.ranks, words) as (process, port, _):
        until_ready(port)
        _told(args, "start", {"seconds": time.monotonic() - begun})
        _measure(args, port, process)


def _measure(args: Latency, port: int, process: subprocess.Popen[str]) -> None:
    """Run the parts with a server that is ready, and end it."""
    bench = Bench(args, port, process.pid, random.Random(args.seed))
    for _ in range(FIRST):
        bench.picture()
    needs = {_switched: args.lora_rank, _swapped: args.swap}
    for part in (_alone, _busy, _full, _cancelled, _switched, _swapped, _killed, _open):
        name = part.__name__.strip("_")
        if name in (args.parts or [name]) and needs.get(part, True):
            _told(args, name, part(bench))
    process.send_signal(signal.SIGTERM)
    process.wait()


def _told(args: Latency, part: str, facts: dict[str, Any]) -> None:
    shown = ", ".join(f"{key} {value:.4g}" for key, value in facts.items() if isinstance(value, int | float))
    print(f"{part}: {shown}", flush=True)
    case = {**asdict(args), "folder": None, "out": None}
    record({"bench": "latency", "part": part, **facts, "case": case}, args.out)


def _alone(bench: Bench) -> dict[str, Any]:
    """One client on a kept connection; front_s: what neither the ranks nor the writing of files took, and the least."""
    kept, cpu_s = HTTPConnection("127.0.0.1", bench.port), _cpu_s(bench.front)
    every = [bench.picture(kept) for _ in range(bench.args.pictures)]
    cpu_s = (_cpu_s(bench.front) - cpu_s) / len(every)
    kept.close()
    fronts_s = [each.seconds - each.ranks_s - each.file_s for each in every]
    front_s = median(fronts_s)
    seconds = median(each.seconds for each in every)
    parts = {f"{part}_s": median(each.parts_s[part] for each in every) for part in every[0].parts_s}
    return {
        "seconds": seconds,
        **parts,
        "file_s": median(each.file_s for each in every),
        "front_s": front_s,
        "least_front_s": min(fronts_s),
        "front_cpu_s": cpu_s,
        "front_percent": 100 * front_s / seconds,
        "every": list(map(asdict, every)),
    }


def _cpu_s(process: int) -> float:
    """CPU seconds of a process so far."""
    user, system = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _busy(bench: Bench) -> dict[str, Any]:
    """Four clients, so that the queue is never empty: seconds between two pictures, and those of the ranks in them."""
    ends, every = list[float](), list[Picture]()

    def client(_: int) -> None:
        every.append(bench.picture())
        ends.append(time.monotonic())

    with ThreadPoolExecutor(4) as clients:
        list(clients.map(client, range(bench.args.pictures + 4)))
    between = (max(ends) - min(ends)) / (len(ends) - 1)
    ranks_s = fmean(each.ranks_s for each in every)
    return {"between_s": between, "ranks_s": ranks_s, "front_percent": 100 * (between / ranks_s - 1)}


def _full(bench: Bench) -> dict[str, Any]:
    """Steps of pictures that go first, alone and while many requests wait."""
    alone = [bench.picture(priority="high") for _ in range(bench.args.pictures)]
    held = [_waits(bench) for _ in range(bench.args.waiting)]
    try:
        every = [bench.picture(priority="high") for _ in range(bench.args.pictures)]
    finally:
        for line in held:
            line.close()
    _until(lambda: not _open_jobs(bench))
    times = {"steps_s": every, "alone_s": alone}
    shown = {name: median(each.parts_s["steps"] for each in pictures) for name, pictures in times.items()}
    return {"waiting": len(held), **shown, "ratio": shown["steps_s"] / shown["alone_s"]}


def _waits(bench: Bench) -> socket.socket:
    line, text = socket.create_connection(("127.0.0.1", bench.port)), json.dumps(bench.body(priority="low"))
    head = f"POST /v1/images/generations HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(text)}\r\n"
    line.sendall(f"{head}content-type: application/json\r\n\r\n{text}".encode())
    return line


def _cancelled(bench: Bench) -> dict[str, Any]:
    every = list[float]()
    while len(every) < bench.args.cancels:
        if (seconds := _one_cancel(bench)) is not None:
            every.append(seconds)
    return {"median_s": median(every), "most_s": max(every), "every": every}


def _one_cancel(bench: Bench) -> float | None:
    """Seconds from a cancel to the start of the next run; None if the run ended before this client cancelled it."""
    known = {job["id"] for job in get(bench.port, "/v1/jobs")["data"]}

    def arrived() -> list[str]:
        return [job["id"] for job in get(bench.port, "/v1/jobs")["data"] if job["id"] not in known]

    def job(id_: str) -> dict[str, Any]:
        return get(bench.port, f"/v1/jobs/{id_}")

    lines = [_waits(bench)]
    try:
        (first,) = _until(arrived)
        known.add(first)
        at = bench.drawn.randrange(bench.args.steps - 1)
        _until(lambda: (now := job(first))["ended"] or (now["started"] and now["step"] >= at))
        lines.append(_waits(bench))
        (second,) = _until(arrived)
        asked_at = time.time()
        get(bench.port, f"/v1/jobs/{first}", "DELETE")
        begun = _until(lambda: job(second)["started"])
        get(bench.port, f"/v1/jobs/{second}", "DELETE")
        return begun - asked_at if job(first).get("state") == "cancelled" else None
    finally:
        for line in lines:
            line.close()


def _switched(bench: Bench) -> dict[str, Any]:
    """Milliseconds that the ranks take longer where the LoRA changes, and those of their parts with and without.

    The ranks' clocks take what their hosts wait for: a change that GPUs still work on counts in the first step.
    """
    same, other = list[Picture](), list[Picture]()
    bench.picture(lora=[{"name": LORAS[1]}])
    for name in LORAS * bench.args.pictures:
        other.append(bench.picture(lora=[{"name": name}]))
        same.append(bench.picture(lora=[{"name": name}]))
    ms = 1e3 * (median(each.ranks_s for each in other) - median(each.ranks_s for each in same))
    return {"switch_ms": ms, "same": list(map(asdict, same)), "other": list(map(asdict, other))}


def _swapped(bench: Bench) -> dict[str, Any]:
    """Seconds of each swap, and [MiB, open files, threads] of the API server and each rank after every tenth.

    gpus: bytes that each rank holds of its GPU; on CPUs those of its process.
    Raises RuntimeError if an image has other bits after a swap than before.
    """
    names = [model["id"] for model in get(bench.port, "/v1/models")["data"]]
    images, swaps_s, looks = dict[str, str](), dict[str, list[float]](), list[dict[str, Any]]()
    for number in range(bench.args.swaps + 1):
        name = names[number % 2]
        made = asked(bench.port, bench.body(model=name, prompt=PROMPTS.get(name, "a red fox")))
        image = made["data"][0]["b64_json"]
        if images.setdefault(name, image) != image:
            raise RuntimeError(f"the image of {name} has other bits after swap {number}")
        if number:
            swaps_s.setdefault(name, []).append(made["seqpar"]["seconds"]["swap"])
        if number % 10 == 0:
            ranks = [[*used(rank).values()] for rank in processes(bench.front)]
            metrics = text_of(bench.port, "/metrics").splitlines()
            gpus = [float(line.split()[-1]) for line in metrics if line.startswith("seqpar_memory_bytes{")]
            looks.append({"swaps": number, "front": [*used(bench.front).values()], "ranks": ranks, "gpus": gpus})
            print(looks[-1], flush=True)
    most = {f"most_s of {name}": max(every) for name, every in swaps_s.items()}
    return (
        {f"median_s of {name}": median(every) for name, every in swaps_s.items()}
        | most
        | {"every_s": swaps_s, "used": looks}
    )


def _killed(bench: Bench) -> dict[str, Any]:
    found: dict[str, list[float]] = {"noticed_s": [], "ready_s": [], "picture_s": []}
    for _ in range(bench.args.kills):
        rank = _until(lambda: a_rank(bench.front, bench.drawn))
        start = time.monotonic()
        os.kill(rank, signal.SIGKILL)
        _until(lambda: status(bench.port, "/ready") != 200)
        found["noticed_s"].append(time.monotonic() - start)
        until_ready(bench.port)
        found["ready_s"].append(time.monotonic() - start)
        bench.picture()
        found["picture_s"].append(time.monotonic() - start)
    return {name: max(times) for name, times in found.items() if times} | {"every": found}


def _open(bench: Bench) -> dict[str, Any]:
    """Latencies of requests that arrive at random times, next to what queueing theory predicts.

    Waiting for one server with a constant time: the mean is load / (2 (1 - load)) pictures (Pollaczek, Khinchine).
    """
    bench.picture()
    service = fmean(bench.picture().seconds for _ in range(3))
    seconds, clients = list[float](), list[threading.Thread]()
    for _ in range(bench.args.arrivals):
        time.sleep(bench.drawn.expovariate(bench.args.load / service))
        clients.append(threading.Thread(target=lambda: seconds.append(bench.picture().seconds)))
        clients[-1].start()
    for client in clients:
        client.join()
    cuts, load = quantiles(seconds, n=20, method="inclusive"), bench.args.load
    facts = {"service_s": service, "mean_s": fmean(seconds), "p50_s": median(seconds), "p95_s": cuts[-1]}
    return facts | {"theory_mean_s": service * (1 + load / (2 * (1 - load))), "every": seconds}


def _open_jobs(bench: Bench) -> list[dict[str, Any]]:
    return [job for job in get(bench.port, "/v1/jobs")["data"] if job["state"] in ("queued", "running")]


def _until(look: Callable[[], Any]) -> Any:
    while not (found := look()):
        time.sleep(NOTICE_S)
    return found
