"""However a rank fails, the job ends in time with one message and leaves nothing; a late rank harms nothing.

The jobs are those of `launch/bench.py faults`, which runs every fault, on GPUs too. Here a few run side by side.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from launch.benches.fault_job import Job, Outcome, carried_out
from launch.benches.faults import CASES, NOTHING, Case, Deadlines, for_a_while, wrong
from launch.benches.planted import main
from tests.support.forks import Forked
from tests.support.pool import server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc"),
]

# short where a deadline must pass; else long, because ranks of a busy machine may be late. The bench allows 5 s more.
SHORT = Deadlines(first=6.0, later=3.0, more=15.0)
LONG = Deadlines(first=60.0, later=60.0, more=15.0)
STOPPED_S = 1.5
# faults come in the third step
WORDS = ("--model", "builtin", "--classes", "cat", "--steps", "4", "--mesh", "ulysses=2")
SIDE_BY_SIDE = 3
HANGS = "sleep 60"  # a part of a script that does not end in time
# the quick ones of `CASES`, each over the transport that says more
HERE = (
    ("rank 1 stopped in a step", "peer"),
    ("rank 1 stopped in a step", "collective"),
    ("rank 1 stopped in its first exchange", "collective"),
    ("rank 1 never starts", "collective"),
    ("rank 1 leaves with code 0", "peer"),
    ("rank 1 stopped for a while", "peer"),
    ("rank 1 out of memory", "peer"),
    ("rank 1 killed while an arena is made", "peer"),
    ("terminated while the picture is written", "peer"),
    ("starter killed", "collective"),
    ("disk full while the picture is written", "collective"),
)


def case_of(name: str) -> Case:
    """Return the case with this name, as it runs here."""
    if name == NOTHING.name:
        return NOTHING
    return for_a_while(next(case for case in CASES if case.name == name), STOPPED_S)


def deadlines_of(case: Case) -> Deadlines:
    return LONG if case.within == "nothing" else SHORT


def forked(job: Job) -> Forked:
    """Start `seqpar WORDS` with its ranks; `fault_job.by_command` does the same with new Pythons."""
    told = job.folder / "told"
    return Forked(main, job.command(), {**os.environ, **job.settings()}, told, told)


def ended(name: str, transport: str) -> Outcome:
    case = case_of(name)
    words = ("sample", "--ranks", "2", *WORDS, "--transport", transport, *deadlines_of(case).flags())
    with tempfile.TemporaryDirectory(prefix="seqpar-faults-") as folder:
        plant = replace(case.plant, folder=folder)
        return carried_out(Job(words, Path(folder), plant, case.signals, limit_s=90), forked)


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[tuple[str, str], Future[Outcome]]]:
    """Return how the jobs end; some run at the same time, and each starts as soon as another one is gone."""
    server()
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        jobs = ((NOTHING.name, "peer"), *HERE)
        yield {job: pool.submit(ended, *job) for job in jobs}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize(("name", "transport"), HERE, ids=lambda word: word.replace(" ", "-"))
def test_a_fault_ends_in_time_and_leaves_nothing(
    outcomes: dict[tuple[str, str], Future[Outcome]], name: str, transport: str
) -> None:
    clean = outcomes[NOTHING.name, "peer"].result()
    bits = clean.digest
    assert bits is not None, "\n".join(clean.lines)
    outcome = outcomes[name, transport].result()
    assert wrong(case_of(name), outcome, deadlines_of(case_of(name)), bits) == [], "\n".join(outcome.lines)


def test_ranks_that_are_forked_see_no_gpu() -> None:
    """Whatever the machine has: the server they come from may have initialised CUDA."""
    ours, theirs = multiprocessing.Pipe()
    process = server().Process(target=_tell_gpus, args=(theirs,))
    process.start()
    assert ours.recv() == ("", 0)
    process.join()


def _tell_gpus(pipe: Connection) -> None:
    pipe.send((os.environ["CUDA_VISIBLE_DEVICES"], torch.cuda.device_count()))


def scripted(folder: Path, script: str, besides: Callable[[], object] = lambda: None) -> Outcome:
    """Return how a shell script ends, watched as a job; `$0` is its folder. besides: what another program does.

    One that hangs is killed after four seconds, the others have a minute: the machine may be busy.
    """

    def start(job: Job) -> subprocess.Popen[bytes]:
        besides()
        (job.folder / "told").write_text("")
        return subprocess.Popen(["sh", "-c", script, str(job.folder)])

    folder.mkdir()
    return carried_out(Job((), folder, limit_s=4 if HANGS in script else 60), start)


def test_negative_control_what_is_left_is_noticed(tmp_path: Path) -> None:
    """Scripts that end as no job may: the checks above must see each of them."""
    deadlines, killed = Deadlines(0.1, 0.1), replace(NOTHING, code=1, message="error: rank 1")
    scripts = {
        "hang": (HANGS, "left processes after 4 s"),
        "orphan": (f"{HANGS} & sleep 2; exit 1", "left processes after 4 s"),
        "shared": ("echo > /dev/shm/seqpar-test-$$; exit 1", "left /dev/shm/seqpar-test-"),
        "held": ("exec 3> /dev/shm/seqpar-test-held-$$; sleep 2; exit 1", "left /dev/shm/seqpar-test-held-"),
        "temporary": ("echo > $0/tmp/seqpar-x; exit 1", f"left {tmp_path}/temporary/tmp/seqpar-x"),
        "partial": ("echo > $0/out/.picture.part.png; exit 1", f"left {tmp_path}/partial/out/.picture.part.png"),
        "picture": ("echo > $0/out/picture.png; exit 1", "a picture"),
        "code": ("exit 0", "exit code 0, expected 1"),
        "message": ("exit 1", "message '', expected 'error: rank 1'"),
    }
    with ThreadPoolExecutor(len(scripts)) as pool:
        ends = list(pool.map(lambda name: scripted(tmp_path / name, scripts[name][0]), scripts))
    for path in (path for end in ends for path in end.left if path.startswith("/dev/shm/seqpar-test-")):
        Path(path).unlink(missing_ok=True)
    for (_, message), end in zip(scripts.values(), ends, strict=True):
        found = wrong(killed, end, deadlines, None)
        assert any(text.startswith(message) for text in found), (message, found)
    stranger = Path(f"/dev/shm/sem.loky-{os.getpid()}-test")
    assert scripted(tmp_path / "stranger", "sleep 0.1", lambda: stranger.write_text("")).left == ()
    stranger.unlink()
    late = Outcome(1, 9.0, "error: rank 1 waited", (), picture=False)
    assert wrong(killed, late, deadlines, None) == ["gone after 9.0 s, expected 5"]
    assert wrong(NOTHING, replace(late, code=0, picture=True), deadlines, "0000") == ["latents None, expected 0000"]
    assert wrong(killed, replace(late, seconds=5.0), deadlines, None) == []
