"""Ranks that exit, hang or send malformed messages; the end of the server; invalid flags; and spans of jobs."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from seqpar.cli import entry
from seqpar.serve.api import telemetry
from seqpar.serve.api.gate import GENERATIONS
from seqpar.serve.api.keys import read_keys
from tests.serve.test_stream import received
from tests.support.front import Running, running, until


def status_of(front: Running, prompt: str) -> int:
    return front.http.post(GENERATIONS, json={"prompt": prompt}).status_code


def test_a_request_is_retried_once_and_four_that_end_ranks_end_the_server(tmp_path: Path) -> None:
    with running(tmp_path, "--restarts", "4") as front:
        body = {"prompt": "die-once first", "stream": True, "partial_images": 2, "stream_steps": True}
        with front.http.stream("POST", GENERATIONS, json=body) as answer:
            events = list(received(answer))
        assert front.prompts == ["die-once first"] * 2
        previews = [event["partial_image_index"] for event in events if "partial_image_index" in event]
        assert (previews, events[-1]["type"]) == ([0, 1], "image_generation.completed")  # none twice
        assert [event["step"] for event in events if "step" in event] == [1, 1, 2, 3, 4]
        assert "seqpar_restarts_total 1.0" in front.http.get("/metrics").text
        with front.openai("none", retries=5) as client, pytest.raises(openai.InternalServerError) as error:
            client.images.generate(prompt="die")
        assert error.value.response.headers["x-should-retry"] == "false"
        assert front.prompts[2:] == ["die"] * 2
        assert front.event("ranks", line="about to die")["request"] == error.value.request_id
        assert status_of(front, "nonsense") == 500  # the third request: two exits by one request count once
        assert status_of(front, "a cat") == 200
        assert status_of(front, "die") == 503
        assert front.wait() == 1
        assert "error: the ranks exited 4 times in 10 minutes; see the log" in front.lines


def test_ranks_that_ignore_a_cancellation_are_terminated(tmp_path: Path) -> None:
    with running(tmp_path, "--stuck-s", "0.1") as front, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(status_of, front, "deaf")
        until(lambda: front.prompts == ["deaf"])
        front.http.delete(f"/v1/jobs/{front.jobs()[0]['id']}")
        assert answer.result() == 499
        front.event("cancel timed out, terminating ranks")
        os.kill(int(front.event("ranks started")["process"]), signal.SIGKILL)
        assert status_of(front, "a cat") == 200


def test_requests_before_the_ranks_are_ready(tmp_path: Path) -> None:
    (tmp_path / "slow-start").touch()
    with running(tmp_path, wait=False) as front:
        answers = [front.http.get(path) for path in ("/ready", "/v1/models")]
        answers.append(front.http.post(GENERATIONS, json={"prompt": "x"}))
        assert [(x.status_code, x.json()["error"]["code"]) for x in answers] == [(503, "not_ready")] * 3
        assert front.http.get("/health").status_code == 200
        assert [event["path"] for event in front.events if event["event"] == "answered"] == [
            "/ready"
        ]  # a line a minute
        (tmp_path / "slow-start").unlink()
        front.event("ready")


@pytest.mark.parametrize(("held", "grace", "status"), [("hold end", "60", 200), ("wait", "0", 503)])
def test_running_requests_may_finish_and_waiting_ones_may_not(
    tmp_path: Path, temporary: Path, held: str, grace: str, status: int
) -> None:
    """After Ctrl-C; and no folder is left."""
    with running(tmp_path, "--grace-s", grace) as front, ThreadPoolExecutor(2) as pool:
        runs = pool.submit(status_of, front, held)
        until(lambda: front.prompts == [held])
        waits = pool.submit(status_of, front, "waits")
        until(lambda: len(front.jobs()) == 2)
        front.process.send_signal(signal.SIGINT)
        assert waits.result() == 503
        if grace != "0":
            assert front.http.get("/ready").status_code == status_of(front, "new") == 503
        front.release("end")
        assert runs.result() == status
        assert front.wait() == 0
    assert front.lines[-1] == "torch was not loaded"
    assert [*temporary.iterdir()] == []
    assert "finish" in [message["type"] for message in front.heard]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 is reachable from other machines and requires --keys"),
        (["--gpus", "1", "--ranks", "2"], "got --gpus 1 and --ranks 2, expected one of them"),
        (["--ranks", "0"], "got --ranks 0, expected at least 1"),
        (["--port", "70000"], "got --port 70000, expected at most 65535"),
        (["--deadline-s", "nan"], "got --deadline-s nan, expected at least 0"),
        (["--keys", "/nowhere"], "--keys /nowhere cannot be read"),
        (["--jobs", __file__], f"--jobs {__file__} is no folder to write in"),
        (["--name", "a-b"], "got --name a-b, expected ALIAS=MODEL, or one name of 1 to 32 letters and digits"),
        (["--name", "a", "--name", "b"], "got --name a b, expected ALIAS=MODEL, or one name"),
        (["x", "--name", "a=y"], "got --name a=y, expected a= and a model: x"),
        (["x", "--name", "-=x"], "got --name -=x, expected at most 100 letters, digits and . _ / : -"),
        (["x", "y", "--name", "a=x", "a=y"], "several models are named a; name them by --name ALIAS=MODEL"),
        (["x", "y", "--name", "y=x"], "several models are named y; name them by --name ALIAS=MODEL"),
        (["--queue", "0"], "got --queue 0, expected at least 1"),
    ],
)
def test_invalid_flags_are_one_line_and_exit_code_2(
    words: list[str], said: str, temporary: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(sys, "argv", ["seqpar", "serve", *words])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    line = capfd.readouterr().err
    assert (ended.value.code, line.count("\n"), line.startswith(f"error: {said}")) == (2, 1, True), line
    assert [*temporary.iterdir()] == []


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which servers make their private ones."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@pytest.mark.parametrize(("number", "state"), [(signal.SIGHUP, "slow-start"), (signal.SIGQUIT, "ready")])
def test_no_folder_is_left_after_a_signal(tmp_path: Path, temporary: Path, number: int, state: str) -> None:
    (tmp_path / state).touch()
    with running(tmp_path, wait=state == "ready") as front:
        front.event("ranks", line="fake ranks start")
        assert len([*temporary.iterdir()]) == 1
        assert front.end(number) == 0
    assert [*temporary.iterdir()] == []


def test_no_folder_is_left_after_a_failure(tmp_path: Path, temporary: Path) -> None:
    """A port that is taken, and ranks that were never ready."""
    (tmp_path / "refuse").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for words, code, said in ((("--port", port), 1, f"--port {port}: "), ((), 2, "error: no model is given")):
            with running(tmp_path, *words, wait=False) as front:
                assert front.wait() == code
            assert any(said in line for line in front.lines)
    assert [*temporary.iterdir()] == []


def test_a_start_removes_folders_of_killed_servers_when_nothing_of_them_lives(tmp_path: Path, temporary: Path) -> None:
    other = temporary / "seqpar-other"  # not of a server: it has no lock
    other.mkdir()

    def folders() -> set[Path]:
        return {*temporary.iterdir()} - {other}

    with running(tmp_path) as living:
        alive = folders()
        (tmp_path / "killed").mkdir()
        (tmp_path / "killed" / "slow-start").touch()  # these ranks do not see that their server is killed
        with running(tmp_path / "killed", wait=False) as killed:
            killed.event("ranks", line="fake ranks start")
            ranks = int(killed.event("ranks started")["process"])
            assert killed.end(signal.SIGKILL) == -signal.SIGKILL
            left = folders() - alive
            assert len(left) == 1
            with running(tmp_path):
                assert folders() > alive | left
            os.kill(ranks, signal.SIGKILL)
        with running(tmp_path):
            assert len(folders() - alive) == 1
            assert not folders() & left
        assert folders() == alive
        assert living.end() == 0
    assert [*temporary.iterdir()] == [other]


@pytest.mark.parametrize("text", ["", "secret", "a:\n", ":b", "a:b\na:c", "a:b\nc:b"])
def test_files_of_keys(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(ValueError, match="--keys ") as error:
        read_keys(file)
    assert "secret" not in str(error.value).replace(str(file), "")
    file.write_text("a:b")
    keys = read_keys(file)
    assert (keys.name_of("b"), keys.name_of("a"), keys.name_of("")) == ("a", None, None)
    file.chmod(0o640)
    with pytest.raises(ValueError, match="has mode 640, expected 600; run: chmod 600"):
        read_keys(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


# spans ---------------------------------------------------------------------------------------------------------------

SET_UP = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
file = open(FILE, "w", buffering=1)
exporter = ConsoleSpanExporter(out=file, formatter=lambda span: span.to_json(indent=None) + "\\n")
trace.set_tracer_provider(TracerProvider())
trace.get_tracer_provider().add_span_processor(SimpleSpanProcessor(exporter))
"""
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_job_is_a_span_of_its_callers_trace(tmp_path: Path) -> None:
    file = tmp_path / "spans"
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
    with running(tmp_path, before=SET_UP.replace("FILE", repr(str(file)))) as front:
        body = {"prompt": "x", "n": 2, "seed": 5}
        assert front.http.post(GENERATIONS, json=body, headers=headers).status_code == 200
        assert status_of(front, "mistake") == 400
        until(lambda: file.read_text().count('"seqpar.job"') == 2)
    spans: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
    traced = [span for span in spans if span["context"]["trace_id"] == f"0x{TRACE}"]

    def called(name: str) -> list[dict[str, Any]]:
        return [span for span in traced if span["name"] == name]

    (job,), pictures, (queue,) = called("seqpar.job"), called("picture"), called("queue")
    parents = {span["context"]["span_id"]: span["parent_id"] for span in traced}
    above = job["parent_id"]
    while above in parents:  # FastAPI's
        above = parents[above]
    assert above == f"0x{CALLER}"
    assert job["attributes"]["seqpar.pictures"] == 2
    assert {span["parent_id"] for span in (*pictures, queue)} == {job["context"]["span_id"]}
    assert [span["attributes"]["seqpar.seed"] for span in pictures] == [5, 6]
    assert job["start_time"] <= queue["end_time"] <= pictures[0]["start_time"] <= pictures[1]["end_time"]
    assert pictures[0]["context"]["span_id"] in parents.values()
    assert len(called("file")) == 2
    statuses = [span["status"] for span in spans if span["name"] == "seqpar.job"]
    assert {"status_code": "ERROR", "description": "mistake"} in statuses


@pytest.mark.parametrize("missing", ["opentelemetry-api", "an SDK"])
def test_without_opentelemetry_nothing_is_recorded(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing == "opentelemetry-api":
        monkeypatch.setattr(telemetry.importlib.util, "find_spec", lambda name: None)
    else:
        pytest.importorskip("opentelemetry.trace")
    span = telemetry.Span.begun()
    span.part("queue", 0.0, 1.0).parts(0.0, {"steps": 1.0})
    span.end("mistake", model="x")
    assert span.real is None
