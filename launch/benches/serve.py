"""Many clients of `seqpar serve` at once, while keys, models and ranks change: nothing may be lost or made twice.

    python launch/bench.py serve --requests 500 --clients 32 --cancels 100 --kills 3 --stops 1 --out lines.jsonl

It starts the server with the built-in models, and a FLUX.1 that edits and a Wan 2.1, both small and random. Half of the
clients have one key, the flood; the others have two. They send requests of all `kinds`: plain, with other servers'
names, as files, links, streams, arrays and latents, edits, masks, ControlNets, LoRAs, videos, and wrong ones. All
images of the same `PICTURES` must have the same bits; those of `commands` of them are what `seqpar sample` writes.
Meanwhile jobs are cancelled by DELETE, clients hang up, models are unloaded (the next request loads them again), and
the file of keys gets a new key, whose request may wait for one job of each other key only. In the first half ranks get
SIGKILL or SIGSTOP. At the end the clients' ledger is compared with the server's jobs, metrics and log, and memory, open
files and threads of all processes with those in the middle.
"""

from __future__ import annotations

import base64
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from launch.benches.serve_kinds import (
    CLASS,
    EDITOR,
    FILM,
    GENERATIONS,
    PICTURES,
    TEXT,
    VIDEOS,
    WITH_COMMAND,
    Models,
    kinds,
    shown_bits,
)
from launch.benches.served import LIMIT_S, a_rank, processes, server, until_ready, used
from launch.benches.timing import judged, record

ROOM = 1.25  # memory, files and threads of a process at the end, in times of the middle
MORE = {"memory": 64, "files": 16, "threads": 16}  # which do not count as growth; memory in MiB
POLL_S = 1.0  # between two questions about a video
ADMIN = "/admin/models"
GUEST = "guest"  # how the names of new keys begin
UNCOUNTED = ("/ready", "/metrics")  # by the ledger
KEYS = {"flood": "places=8", "ada": "weight=2 admin=true", "bob": "rate=100000 priority=normal"}


@dataclass(frozen=True)
class Asked:
    """What a client asked and got. bits: of the pictures. code: the answer's error, or "left" for who hung up."""

    key: str
    kind: int
    id: str | None
    status: int
    code: str | None
    bits: tuple[str, ...]
    param: str | None = None


@dataclass
class Ledger:
    """What all clients asked. answers: id -> status of each HTTP answer.

    used: numbers of the front's process, whose `ranks` are those of each rank by its process.
    """

    asked: list[Asked] = field(default_factory=list)
    answers: dict[str, int] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)
    used: list[dict[str, Any]] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Requests whose client hung up."""
        return sum(each.code == "left" for each in self.asked)


def verdicts(
    ledger: Ledger, jobs: Sequence[dict[str, Any]], metrics: str, log: Sequence[dict[str, Any]], args: Serve
) -> Iterator[tuple[str, bool]]:
    """Yield what was found, and whether it is right. jobs, metrics, log: the server's."""
    yield from _answers(ledger, jobs, log, args.requests + args.reloads)
    yield from _counted(ledger, jobs, metrics, log)
    guests = [each.id for each in ledger.asked if each.key.startswith(GUEST) and each.id is not None]
    yield from _guests(guests, log, args.reloads)
    yield f"signals to ranks: {ledger.killed}", len(ledger.killed) == args.kills + args.stops
    swaps = [event for event in log if event["event"] == "models changed"]
    text = f"models unloaded {len(ledger.changes)} times, {len(swaps)} changes of models in all"
    yield text, len(ledger.changes) == args.swaps <= len(swaps)
    middle, end = ledger.used[len(ledger.used) // 2], ledger.used[-1]
    compared = {"the front": (middle, end)}
    compared |= {f"rank {i}": (middle["ranks"].get(key), x) for i, (key, x) in enumerate(end["ranks"].items())}
    for name, (before, after) in compared.items():
        if before is not None:  # else the ranks were restarted meanwhile
            grown = [part for part, more in MORE.items() if after[part] > ROOM * before[part] + more]
            told = [[numbers[part] for part in MORE] for numbers in (before, after)]
            yield f"memory (MiB), files and threads of {name}: {told[0]}, at the end {told[1]}", not grown


def _answers(
    ledger: Ledger, jobs: Sequence[dict[str, Any]], log: Sequence[dict[str, Any]], requests: int
) -> Iterator[tuple[str, bool]]:
    asked, every = ledger.asked, kinds()
    yield f"{len(asked)} of {requests} requests have an answer", len(asked) == requests
    wrong = [each for each in asked if every[each.kind].status != 200]
    other = [each for each in wrong if (each.status, each.param) != (every[each.kind].status, every[each.kind].param)]
    yield f"{len(wrong)} wrong requests were refused, {len(other)} not as they should {other[:3]}", not other
    strange = Counter(each.code for each in asked if each not in wrong and each.code not in (None, "left", "cancelled"))
    yield f"answers that are neither pictures nor given up: {dict(strange) or 'none'}", not strange
    by_id = {job["id"]: job["state"] for job in jobs}
    mine = {each.id: "completed" if each.bits else "cancelled" for each in asked if each.id and each not in wrong}
    differ = [id for id, state in mine.items() if by_id.get(id) != state]
    yield f"{len(mine)} jobs are known to clients and server alike, and {len(differ)} differ", not differ
    rest = {job["id"]: job["state"] for job in jobs if job["id"] not in mine}
    # some leave before their request is read, or while they are refused
    accepted = {e["request"] for e in log if e["event"] == "accepted"} - mine.keys()
    right = rest.keys() == accepted and len(rest) <= ledger.left and {*rest.values()} <= {"cancelled", "completed"}
    text = f"{ledger.left} clients hung up, {len(accepted)} after their jobs were accepted"
    yield f"{text}, and {len(rest)} jobs have no client", right
    yield f"{len(jobs)} jobs, {len(jobs) - len(by_id)} of them twice", len(by_id) == len(jobs)


def _counted(
    ledger: Ledger, jobs: Sequence[dict[str, Any]], metrics: str, log: Sequence[dict[str, Any]]
) -> Iterator[tuple[str, bool]]:
    """Compare the ledger with the counters and the log, which has answers 503 once a minute only."""
    answered = {e["request"]: e["status"] for e in log if e["event"] == "answered" and e["path"] not in UNCOUNTED}
    differ = [id for id, status in ledger.answers.items() if status not in (answered.get(id), 503)]
    text = f"{len(ledger.answers)} answers are in the log by their id, and {len(differ)} are not or differ"
    yield text, not differ
    alone = len(answered.keys() - ledger.answers.keys())
    yield f"{alone} lines of the log are of clients that hung up", alone == ledger.left
    counts = Counter(str(s) for s in [*answered.values(), *ledger.answers.values()] if s != 503)
    counts -= Counter(str(s) for id, s in ledger.answers.items() if id in answered and s != 503)
    counts += Counter("503" for s in ledger.answers.values() if s == 503)
    told = _samples(metrics, "seqpar_responses_total", "status", UNCOUNTED)
    yield f"the metrics count the same answers: {dict(sorted(told.items()))}", told == counts
    ends = Counter(e["code"] or e["state"] for e in log if e["event"] == "ended")
    states, told = Counter(job["state"] for job in jobs), _samples(metrics, "seqpar_jobs_total", "end")
    yield f"jobs by their end in log, metrics and /v1/jobs: {dict(ends)}", ends == told == states


def _samples(metrics: str, name: str, label: str, without: Sequence[str] = ()) -> Counter[str]:
    counts = Counter[str]()
    for sample in (each for family in text_string_to_metric_families(metrics) for each in family.samples):
        if sample.name == name and sample.labels.get("route") not in without:
            counts[sample.labels[label]] += int(sample.value)
    return counts


def _guests(guests: Sequence[str], log: Sequence[dict[str, Any]], reloads: int) -> Iterator[tuple[str, bool]]:
    """A request of a new key is sent to the ranks after at most one job of each other key."""
    keys = {e["request"]: e["key"] for e in log if e["event"] == "accepted"}
    most = list[int]()
    for id in guests:
        came = next(place for place, e in enumerate(log) if e["event"] == "accepted" and e["request"] == id)
        sent = {e["attempt"].rpartition("/")[0]: e["request"] for e in log[:came] if e["event"] == "sent to ranks"}
        before = Counter[str]()
        for event in log[came:]:
            if event["event"] == "sent to ranks":
                if event["request"] == id:
                    break
                if event["attempt"].rpartition("/")[0] not in sent:  # no second attempt at what had begun
                    before[keys[event["request"]]] += 1
        most.append(max(before.values(), default=0))
    text = f"requests of new keys: jobs of one other key that went before, {most}"
    yield text, len(most) == reloads and max(most, default=0) <= 1


def pictures(asked: Sequence[Asked], models: Models, args: Serve) -> Iterator[tuple[str, bool]]:
    """Compare all pictures of the same request, and with the command's."""
    bits = {place: set[str]() for place in range(len(PICTURES))}
    for each in asked:
        if each.bits:
            for place, found in zip(kinds()[each.kind].pictures, each.bits, strict=True):
                bits[place].add(found)
    made, several = sum(len(each.bits) for each in asked), [place for place, all in bits.items() if len(all) > 1]
    yield f"{made} pictures of {sum(map(bool, bits.values()))} requests, {len(several)} with several bits", not several
    places = [place for place in range(0, WITH_COMMAND, max(1, WITH_COMMAND // max(1, args.commands))) if bits[place]]
    with ThreadPoolExecutor(2) as pool:
        theirs = pool.map(lambda place: models.of_command(place, args.ranks), places[: args.commands])
        for place, found in zip(places, theirs, strict=False):
            yield f"picture {place} has the bits of seqpar sample", bits[place] == {found}


@dataclass(frozen=True)
class Serve:
    """Ask a server for many pictures while keys, models and ranks change; fail if one is lost, doubled or wrong."""

    ranks: int = 2
    """Number of ranks, on GPUs where the machine has them."""
    requests: int = 500
    """Requests of all clients together."""
    clients: int = 32
    """Clients that ask at the same time, each for one picture after the other; half of them by one key."""
    cancels: int = 100
    """Requests that are cancelled, half of them by DELETE and half by hanging up."""
    kills: int = 3
    """How often a rank gets SIGKILL."""
    stops: int = 1
    """How often a rank gets SIGSTOP, which is noticed after the deadline of an exchange."""
    swaps: int = 6
    """How often a model is unloaded, which a later request loads again."""
    reloads: int = 8
    """How often the file of keys gets a new key, which sends one request; by turns with SIGHUP and without."""
    commands: int = WITH_COMMAND
    """Pictures that are compared with those of `seqpar sample`."""
    seed: int = 0
    """Seed of what is drawn: kinds, times of cancels and of kills."""
    out: Path | None = None
    """Append JSON lines here."""


def main(args: Serve) -> None:
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="seqpar-bench-") as name:
        models, keys = Models.written(Path(name)), Path(name, "keys")
        _write_keys(keys, KEYS)
        words = ("--queue", "256", "--swap", "--keys", str(keys), *models.flags)
        with server(models.names, args.ranks, words) as (process, port, log):
            until_ready(port)
            clients = Clients(args, process.pid, port, keys)
            clients.run()
            ledger, ready_s = clients.ledger, time.monotonic() - begun
            jobs = [job for key in clients.keys for job in clients.get("/v1/jobs", key)["data"]]
            _, about, metrics = clients.send("GET", "/metrics", "ada")
            del ledger.answers[about["x-request-id"]]  # which is not among its own counts
            process.send_signal(signal.SIGTERM)
            code = process.wait(LIMIT_S)
        events = [json.loads(line) for line in log if line.startswith("{")]
        said = [
            *verdicts(ledger, jobs, metrics.decode(), events, args),
            *pictures(ledger.asked, models, args),
            ("the server ended with exit code 0", code == 0),
        ]
    ends = Counter(each.code or "picture" for each in ledger.asked)
    line = {"bench": "serve", "case": {**asdict(args), "out": None}, "ends": dict(ends), "used": ledger.used}
    restarts = next(
        f.samples[0].value for f in text_string_to_metric_families(metrics.decode()) if f.name == "seqpar_restarts"
    )
    line |= {"killed": ledger.killed, "seconds": ready_s, "restarts": restarts, "kinds": len(kinds())}
    line |= {"verdicts": [{"text": text, "right": right} for text, right in said], "log_lines": len(log)}
    record(line, args.out)
    if not judged(said):
        print("\n".join(log[-40:]), file=sys.stderr)
        raise SystemExit(1)


def _write_keys(file: Path, keys: Mapping[str, str]) -> None:
    new = file.with_suffix(".new")
    new.touch(0o600)
    new.write_text("".join(f"{name}: key-of-{name} {words}\n" for name, words in keys.items()))
    new.replace(file)


# Clients ----------------------------------------------------------------------------------------------------------


class Clients:
    """The clients of a server and the faults of a soak. front: the API server's process. file: its keys."""

    def __init__(self, args: Serve, front: int, port: int, file: Path) -> None:
        self.args, self.front, self.port, self.file = args, front, port, file
        self.ledger, self.keys, self.lock, self.done = Ledger(), dict(KEYS), threading.Lock(), threading.Event()
        self.others = list[threading.Thread]()

    def run(self) -> None:
        """Let all clients ask, and trouble them, until every request has an answer."""
        args, every, drawn = self.args, kinds(), random.Random(self.args.seed)
        good = [kind for kind, each in enumerate(every) if each.status == 200 and each.path == GENERATIONS]
        left = set(drawn.sample(range(args.requests), args.cancels // 2))
        order = [index % len(every) for index in range(args.requests)]
        drawn.shuffle(order)
        todo = [
            (drawn.choice(good), drawn.uniform(0.05, 2.0)) if index in left else (kind, None)
            for index, kind in enumerate(order)
        ]

        def client(key: str) -> None:
            while True:
                with self.lock:
                    if not todo:
                        return
                    kind, leaves_s = todo.pop(0)
                self.ask(key, kind, leaves_s)

        names = [("flood", "ada", "flood", "bob")[index % 4] for index in range(args.clients)]
        clients = [threading.Thread(target=client, args=(name,), daemon=True) for name in names]
        trouble = threading.Thread(target=self._trouble, daemon=True)
        for thread in (*clients, trouble):
            thread.start()
        for thread in clients:
            thread.join(LIMIT_S)
        self.done.set()
        for thread in (trouble, *self.others):
            thread.join(LIMIT_S)
        self._look()

    def send(
        self, method: str, path: str, key: str, body: bytes = b"", kind: str = "", leaves_s: float | None = None
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Send a request, and record its answer. OSError or HTTPException if the client leaves before."""
        line = HTTPConnection("127.0.0.1", self.port, timeout=leaves_s or LIMIT_S)
        headers = {"content-type": kind} | ({"authorization": f"Bearer key-of-{key}"} if key else {})
        try:
            line.request(method, path, body, headers)
            answer = line.getresponse()
            content, about = answer.read(), {name.lower(): value for name, value in answer.getheaders()}
        finally:
            line.close()
        with self.lock:
            self.ledger.answers[about["x-request-id"]] = answer.status
        return answer.status, about, content

    def get(self, path: str, key: str, method: str = "GET") -> Any:
        return json.loads(self.send(method, path, key)[2])

    def ask(self, key: str, kind: int, leaves_s: float | None = None) -> None:
        """Ask for what a kind describes until the answer is another than 429, and write it down."""
        sent = kinds()[kind]
        key = key if sent.key is None else sent.key
        body, form = sent.body
        while True:
            try:
                status, about, content = self.send("POST", sent.path, key, body, form, leaves_s)
            except (HTTPException, OSError) as error:
                code = "left" if leaves_s is not None else f"no answer: {type(error).__name__}"
                found = Asked(key, kind, None, 0, code, ())
                break
            if status != 429:
                files, error = self._files(key, status, about, content)
                bits = tuple(shown_bits(sent, file) for file in files)
                found = Asked(key, kind, about["x-request-id"], status, error.get("code"), bits, error.get("param"))
                break
            time.sleep(float(about["retry-after"]))
        with self.lock:
            self.ledger.asked.append(found)

    def _files(
        self, key: str, status: int, about: Mapping[str, str], content: bytes
    ) -> tuple[list[bytes], dict[str, Any]]:
        """The files of an answer, or its error."""
        form = about["content-type"].partition(";")[0]
        if form == "text/event-stream":
            events = [json.loads(line[6:]) for line in content.splitlines() if line.startswith(b"data: ")]
            if "error" in events[-1]:
                return [], events[-1]["error"]
            return [base64.b64decode(e["b64_json"]) for e in events if e["type"] == "image_generation.completed"], {}
        if form != "application/json":
            return [content], {}
        told = json.loads(content)
        if status != 200:
            return [], told["error"]
        if told.get("object") == "video":
            return self._video(key, f"{VIDEOS}/{told['id']}")
        return [
            self.send("GET", each["url"].split("/", 3)[3].join(("/", "")), key)[2]
            if each.get("url")
            else base64.b64decode(each["b64_json"])
            for each in told["data"]
        ], {}

    def _video(self, key: str, path: str) -> tuple[list[bytes], dict[str, Any]]:
        while (told := self.get(path, key))["status"] in ("queued", "in_progress"):
            time.sleep(POLL_S)
        if told["status"] == "failed":
            return [], told["error"]
        return [self.send("GET", f"{path}/content", key)[2]], {}

    # trouble ------------------------------------------------------------------------------------------------------

    def _trouble(self) -> None:
        args, drawn = self.args, random.Random(self.args.seed + 1)
        signals = [signal.SIGKILL] * args.kills + [signal.SIGSTOP] * args.stops
        cancels = [lambda: self._cancel_one(drawn)] * (args.cancels - args.cancels // 2)
        todo = [
            *((place // 2, work) for place, work in self._spread(signals, lambda x: lambda: self._signal(x, drawn))),
            *self._spread(
                range(args.swaps), lambda index: lambda: self._unload((CLASS, TEXT, EDITOR, FILM)[index % 4])
            ),
            *self._spread(range(args.reloads), lambda index: lambda: self._new_key(index)),
            *self._spread(range(9), lambda index: self._look),
            *((drawn.randrange(args.requests), each) for each in cancels),
        ]
        while not self.done.wait(0.05):
            count = len(self.ledger.asked)
            for each in [each for each in todo if each[0] <= count]:
                if each[1]() is not False:  # else the ranks are not there, and it is for later
                    todo.remove(each)

    def _spread(self, every: Sequence[Any], made: Callable[[Any], Callable[[], Any]]) -> list[tuple[int, Any]]:
        """Each with the number of answers after which it comes."""
        return [(round(self.args.requests * (i + 1) / (len(every) + 1)), made(x)) for i, x in enumerate(every)]

    def _look(self) -> None:
        ranks = {str(rank): used(rank) for rank in processes(self.front)}
        self.ledger.used.append({**used(self.front), "ranks": ranks})

    def _signal(self, number: signal.Signals, drawn: random.Random) -> bool:
        if (rank := a_rank(self.front, drawn)) is None:
            return False
        os.kill(rank, number)
        self.ledger.killed.append(number.name)
        return True

    def _cancel_one(self, drawn: random.Random) -> None:
        jobs = [(job, key) for key in KEYS for job in self.get("/v1/jobs", key)["data"]]
        waiting = [(job["id"], key) for job, key in jobs if job["state"] in ("queued", "running")]
        if waiting:
            id, key = waiting[0] if drawn.random() < 0.3 else drawn.choice(waiting)
            self.get(f"/v1/jobs/{id}", key, "DELETE")

    def _in_thread(self, work: Callable[[], None]) -> None:
        self.others.append(threading.Thread(target=work, daemon=True))
        self.others[-1].start()

    def _unload(self, model: str) -> None:
        def work() -> None:
            body = json.dumps({"unload": [model]}).encode()
            while self.send("POST", ADMIN, "ada", body, "application/json")[0] != 200:
                time.sleep(1)  # it is not loaded, or the ranks restart
            self.ledger.changes.append(model)

        self._in_thread(work)

    def _new_key(self, index: int) -> None:
        name = f"{GUEST}{index}"
        self.keys[name] = ""
        _write_keys(self.file, self.keys)
        if index % 2:
            os.kill(self.front, signal.SIGHUP)

        def work() -> None:
            while self.send("GET", "/v1/models", name)[0] != 200:
                time.sleep(0.2)
            self.ask(name, 0)

        self._in_thread(work)
