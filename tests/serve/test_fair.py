"""Whose request runs next: bounds that hold for random arrivals, and that another order breaks; and a keys file."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from seqpar.serve.api.connections import Connections
from seqpar.serve.api.errors import ProblemError
from seqpar.serve.api.fair import FairShares
from seqpar.serve.api.gate import GENERATIONS, Gate
from seqpar.serve.api.jobs import JobSpec, Queue
from seqpar.serve.api.keys import KeyTerms, Priority, read_keys
from seqpar.serve.api.server import http_server
from seqpar.serve.messages import ImageRequest
from tests.support.front import keys_in, running, until

ALIKE: Mapping[str, float] = {}


@dataclass(frozen=True)
class Arrival:
    """A job. seconds: of the ranks for each image; the server predicts `predicted` times as many."""

    at: float
    key: str
    seconds: float
    images: int = 1
    priority: Priority = "normal"
    predicted: float = 1.0

    @property
    def spec(self) -> JobSpec:
        request = ImageRequest("", "m", "x")
        return JobSpec(request, self.priority, 1, self.seconds * self.predicted, 1e6, count=self.images)


@dataclass(frozen=True)
class Run:
    """An image on the ranks."""

    arrival: Arrival
    start: float
    end: float


class Fifo(FairShares):
    """Negative control: the earliest job is next, whosever it is."""

    def tag(self, key: str) -> float:
        return 0.0


def queue_of(terms: Mapping[str, KeyTerms], places: int = 10**6) -> Queue:
    return Queue(places, 1e6, lambda job: None, lambda key: terms.get(key, KeyTerms()))


def simulated(
    arrivals: Sequence[Arrival], weights: Mapping[str, float], shares: FairShares, fails: bool = False
) -> list[Run]:
    """All images of these jobs in the order in which a queue starts them. fails: the last image of each."""

    async def simulate() -> list[Run]:
        queue = queue_of({key: KeyTerms(weight) for key, weight in weights.items()})
        queue.shares = shares
        coming, jobs, runs, now = sorted(arrivals, key=lambda arrival: arrival.at), dict[str, Arrival](), [], 0.0

        def admit(until: float) -> None:
            while coming and coming[0].at <= until:
                arrival = coming.pop(0)
                jobs[queue.add(str(len(jobs)), arrival.key, arrival.spec).id] = arrival

        while coming or queue.active:
            admit(now)
            job = queue.begin()
            if job is None:
                now = coming[0].at
                continue
            arrival = jobs[job.id]
            runs.append(Run(arrival, now, now + arrival.seconds))
            now += arrival.seconds
            admit(now)  # while the image runs
            if job.done_count + 1 == arrival.images and fails:
                queue.end(job, "failed")
            queue.ran(job, arrival.seconds)
            if job.ended is None:
                queue.image_done(job)
            if job.done_count == arrival.images:
                queue.end(job, "completed")
        return runs

    return asyncio.run(simulate())


def before(runs: Sequence[Run], arrival: Arrival) -> Counter[str]:
    """How many images of each key started between the arrival of a job and its first image."""
    start = next(run.start for run in runs if run.arrival is arrival)
    return Counter(run.arrival.key for run in runs if arrival.at < run.start < start)


def unfairness(runs: Sequence[Run], keys: Sequence[str], weights: Mapping[str, float], since: float) -> float:
    """The largest difference of two keys' seconds by weight in any interval, over that of one image of each.

    The keys always have images that wait, from `since` to the last start of an image of each.
    """
    until = min(max(run.start for run in runs if run.arrival.key == key) for key in keys)
    within = [run for run in runs if run.start >= since and run.end <= until]
    worst = 0.0
    for pair in combinations(keys, 2):
        longest = [
            max(run.arrival.seconds for run in runs if run.arrival.key == key and run.end > since) for key in pair
        ]
        allowed = sum(seconds / weights.get(key, 1.0) for key, seconds in zip(pair, longest, strict=True))
        sign, sums = {pair[0]: 1.0, pair[1]: -1.0}, [0.0]
        for run in within:
            lead = sign.get(run.arrival.key, 0.0) * run.arrival.seconds / weights.get(run.arrival.key, 1.0)
            sums.append(sums[-1] + lead)
        worst = max(worst, (max(sums) - min(sums)) / allowed)
    return worst


def flood(draw: random.Random, key: str, count: int, at: float = 0.0, priority: Priority = "high") -> list[Arrival]:
    """Jobs that arrive together, of different lengths, whose predictions are wrong."""
    return [
        Arrival(at, key, draw.uniform(0.2, 2), draw.randint(1, 3), priority, draw.uniform(0.3, 3)) for _ in range(count)
    ]


def waits_too_long(draw: random.Random, shares: FairShares) -> bool:
    """Whether a low request of a new key waits for more than one image of a key, under floods of high ones."""
    weights = {key: draw.uniform(0.2, 5) for key in "abc"}
    floods = [arrival for key in "abc" for arrival in flood(draw, key, 12)]
    new = [Arrival(draw.uniform(1, 20), f"new {number}", 1.0, priority="low") for number in range(4)]
    runs = simulated([*floods, *new], weights, shares)
    return any(max(before(runs, arrival).values(), default=0) > 1 for arrival in new)


def shares_are_wrong(draw: random.Random, shares: FairShares) -> bool:
    """Whether the seconds of floods, by weight, differ by more than an image of each; also with one that was idle.

    Before the floods b and then a had the ranks alone, and nothing ran for a while: nobody owes or is owed for that.
    """
    weights = {"a": 0.5, "b": 1.0, "c": 3.0, "back": 1.0}
    alone = [Arrival(0.0, "b", 2.0), Arrival(3.0, "a", 30.0), Arrival(41.0, "back", 0.5)]
    floods = [*flood(draw, "b", 30, 40.0, "low"), *flood(draw, "c", 60, 40.5), *flood(draw, "a", 20, 41.0)]
    runs = simulated([*alone, *floods, *flood(draw, "back", 20, 90.0)], weights, shares, draw.random() < 0.5)
    return unfairness(runs, ("a", "b", "c"), weights, 45) > 1 or unfairness(runs, tuple(weights), weights, 90) > 1


@pytest.mark.parametrize("breaks", [waits_too_long, shares_are_wrong])
def test_random_arrivals_keep_the_bounds_and_first_come_first_served_does_not(breaks: object) -> None:
    assert callable(breaks)
    assert not any(breaks(random.Random(seed), FairShares()) for seed in range(10))
    assert all(breaks(random.Random(seed), Fifo()) for seed in range(10))


def test_jobs_are_forecast_as_they_then_run() -> None:
    async def forecast() -> None:
        draw = random.Random(0)
        arrivals = [replace(arrival, predicted=1.0) for key in "abc" for arrival in flood(draw, key, 8)]
        arrivals = [replace(arrival, priority=draw.choice(("high", "normal", "low"))) for arrival in arrivals]
        queue = queue_of({"b": KeyTerms(weight=2.5)})
        jobs = [queue.add(str(number), arrival.key, arrival.spec) for number, arrival in enumerate(arrivals)]
        running = queue.begin()
        assert running is not None
        expected = {job.id: (queue.ahead(job), queue.estimate_s(job)) for job in jobs}
        now, begun, found = 0.0, list[str](), dict[str, tuple[int, float]]()
        while running is not None:
            begun += [running.id] if running.id not in begun else []
            now += running.spec.step_s
            queue.ran(running, running.spec.step_s)
            queue.image_done(running)
            if running.done_count == running.spec.count:
                found[running.id] = (begun.index(running.id), now)
                queue.end(running, "completed")
            running = queue.begin()
        assert {id_: ahead for id_, (ahead, _) in found.items()} == {id_: ahead for id_, (ahead, _) in expected.items()}
        assert [found[id_][1] for id_ in found] == pytest.approx([expected[id_][1] for id_ in found])

    asyncio.run(forecast())


def test_no_key_has_all_places_and_each_its_terms() -> None:
    terms = {"few": KeyTerms(places=1), "slow": KeyTerms(rate=2), "low": KeyTerms(priority="normal")}
    spec = Arrival(0.0, "", 1.0).spec

    async def fill() -> None:
        queue, number = queue_of(terms, places=8), iter(range(1000))

        def added(key: str, **fields: object) -> str:
            """ "added", or why not."""
            try:
                queue.add(str(next(number)), key, replace(spec, **fields))  # pyright: ignore[reportArgumentType]
            except ProblemError as error:
                return f"{error.problem.status} {error.problem.text}"
            return "added"

        assert [added("few"), added("few")] == [
            "added",
            "429 1 of your jobs wait, the most that may while 7 places are free; retry after 1 s",
        ]
        assert [added("slow"), added("slow")] == ["added"] * 2
        assert added("slow") == "429 this API key may send 2 jobs per minute; retry after 30 s"
        assert added("low", priority="high") == "403 priority high is above the highest of this API key; use normal"
        answers = [added("ada") for _ in range(8)]
        assert answers[:3] == ["added"] * 3
        assert set(answers[3:]) == {
            "429 3 of your jobs wait, the most that may while 2 places are free; retry after 1 s"
        }
        assert [added("bob"), added("bob"), added("low")] == [
            "added",
            answers[3].replace("3 of", "1 of").replace("2 places", "1 places"),
            "added",
        ]
        assert added("cyd") == "429 queue is full (8 requests); retry after 1 s"

    asyncio.run(fill())


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("ada:key-of-ada\n# more\n\nbob : k=e:y \n", {"ada": KeyTerms(), "bob": KeyTerms()}),
        ("ada: k weight=2.5 rate=60 places=8 priority=low", {"ada": KeyTerms(2.5, 60, 8, "low")}),
        ("ada: k\nbob: of two words", None),
        ("ada: k\nbob: k", None),
        ("ada: k\nada: l", None),
        ("ada: k\nbob", None),
        ("ada: k\nbob: l weight=0", None),
        ("ada: k\nbob: l weight=nan", None),
        ("ada: k\nbob: l rate=1.5", None),
        ("ada: k\nbob: l places=0", None),
        ("ada: k\nbob: l priority=urgent", None),
        ("ada: k\nbob: l places=1 places=2", None),
        ("ada: k\nbob: l speed=1", None),
    ],
)
def test_keys_files(tmp_path: Path, text: str, terms: dict[str, KeyTerms] | None) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    file.chmod(0o600)
    if terms is not None:
        assert read_keys(file).terms == terms
        return
    with pytest.raises(ValueError, match=r"^line 2 of --keys \S+ is not NAME:KEY \[weight=.*without spaces$"):
        read_keys(file)


FAR, NEAR, PROXY = "203.0.113.7", "127.0.0.1", "10.1.2.3"


@pytest.mark.parametrize(
    ("trusted", "peer", "forwarded", "key"),
    [
        ((), NEAR, [], ""),
        ((), "::1", [], ""),
        ((), "::ffff:127.0.0.1", [], ""),
        ((), NEAR, [FAR], ""),  # anyone can write the header
        (("10.0.0.0/8",), FAR, ["198.51.100.1"], FAR),
        ((NEAR,), NEAR, [], ""),
        ((NEAR,), NEAR, [FAR], FAR),
        ((NEAR,), NEAR, [f"198.51.100.1, {FAR}"], FAR),  # the client has written the first one
        ((NEAR, "10.0.0.0/8"), NEAR, [f"198.51.100.1, {FAR}, {PROXY}"], FAR),
        (("::1",), "::1", ["2001:db8:1:2:3:4:5:6"], "2001:db8:1:2::/64"),
        ((NEAR,), NEAR, [f"{FAR}, who"], "unknown"),
    ],
)
def test_without_keys_the_address_of_a_client_is_its_key(
    trusted: tuple[str, ...], peer: str, forwarded: list[str], key: str
) -> None:
    found: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found.append(scope["state"]["key"])

    async def call() -> None:
        config = http_server(Gate(app, None, frozenset()), Connections(1), trusted).config
        config.load()
        headers = [(b"host", b"localhost"), *((b"x-forwarded-for", text.encode()) for text in forwarded)]
        scope = {"type": "http", "method": "GET", "path": "/v1/jobs", "client": (peer, 1), "headers": headers}
        await config.loaded_app(scope, None, None)  # pyright: ignore

    asyncio.run(call())
    assert found == [key]


def test_a_server_is_fair_to_its_keys_and_reloads_them(tmp_path: Path) -> None:
    file = Path(keys_in(tmp_path))
    with running(tmp_path, "--keys", str(file)) as front, ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(8))
        ada, bob, cyd = (stack.enter_context(front.client(f"key-of-{name}")) for name in ("ada", "bob", "cyd"))

        def ask(client: httpx.Client, prompt: str, priority: str | None) -> Future[httpx.Response]:
            body = {"prompt": prompt, "priority": priority}
            return pool.submit(lambda: client.post(GENERATIONS, json=body))

        answers = [ask(ada, "hold fairness", "low")]
        until(lambda: front.prompts)
        answers += [ask(ada, f"flood {number}", "high") for number in range(3)]
        until(lambda: len(ada.get("/v1/jobs").json()["data"]) == 4)
        answers.append(ask(bob, "of bob", "low"))
        (job,) = until(lambda: bob.get("/v1/jobs").json()["data"])
        assert job["position"] == 1
        front.release("fairness")
        assert [answer.result().status_code for answer in answers] == [200] * 5
        assert front.prompts[:2] == ["hold fairness", "of bob"]

        file.write_text("cyd: key-of-cyd rate=1 priority=low\n")
        front.process.send_signal(signal.SIGHUP)
        front.event("keys reloaded", keys=1)
        assert bob.get("/v1/jobs").status_code == 401
        asked = [ask(cyd, "of cyd", priority).result() for priority in ("normal", None, "low")]
        codes = [answer.json().get("error", {}).get("code") for answer in asked]
        assert codes == ["forbidden", None, "rate_limit_exceeded"]
        assert 0 < int(asked[2].headers["retry-after"]) <= 60

        file.write_text("cyd: key-of-cyd fast\n")
        assert "line 1 of --keys" in front.event("keys not reloaded, the former ones stay valid")["reason"]
        (job,) = cyd.get("/v1/jobs").json()["data"]
        file.write_text("cyd: new-key-of-cyd\n")  # jobs belong to the name, so that a key can be replaced
        until(lambda: cyd.get("/v1/jobs").status_code == 401)
        assert stack.enter_context(front.client("new-key-of-cyd")).get("/v1/jobs").json()["data"] == [job]
        file.write_text("dan: key-of-cyd\neve: key-of-eve\n")
        front.event("keys reloaded", keys=2)
        assert cyd.get("/v1/jobs").json()["data"] == []
        assert [line["event"] for line in front.events].count("ranks started") == 1
