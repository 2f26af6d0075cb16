"""Spans of OpenTelemetry, as an SDK that is set up in the front's process gets them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from seqpar.serve.api import telemetry
from tests.support.front import running, until

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
HEADERS = {"traceparent": f"00-{TRACE}-{CALLER}-01"}


def test_a_job_is_a_span_of_its_callers_trace(tmp_path: Path) -> None:
    file = tmp_path / "spans"
    with running(tmp_path, before=SET_UP.replace("FILE", repr(str(file)))) as front, front.http() as http:
        body = {"prompt": "x", "n": 2, "seed": 5}
        assert http.post("/v1/images/generations", json=body, headers=HEADERS).status_code == 200
        assert http.post("/v1/images/generations", json={"prompt": "mistake"}).status_code == 400
        until(lambda: file.read_text().count('"seqpar.job"') == 2)
    every = [json.loads(line) for line in file.read_text().splitlines()]
    mine = [each for each in every if each["context"]["trace_id"] == f"0x{TRACE}"]
    (job,) = named(mine, "seqpar.job")
    pictures, (queue,) = named(mine, "picture"), named(mine, "queue")
    own = {each["context"]["span_id"]: each["parent_id"] for each in mine}
    above = job["parent_id"]
    while above in own:  # FastAPI's
        above = own[above]
    assert above == f"0x{CALLER}"
    assert job["attributes"]["seqpar.pictures"] == 2
    assert {each["parent_id"] for each in (*pictures, queue)} == {job["context"]["span_id"]}
    assert [each["attributes"]["seqpar.seed"] for each in pictures] == [5, 6]
    assert job["start_time"] <= queue["end_time"] <= pictures[0]["start_time"] <= pictures[1]["end_time"]
    parts = [each["name"] for each in mine if each["parent_id"] == pictures[0]["context"]["span_id"]]
    assert parts
    assert len(named(mine, "file")) == 2
    failed = next(each for each in named(every, "seqpar.job") if each is not job and each["status"] != job["status"])
    assert failed["status"] == {"status_code": "ERROR", "description": "mistake"}


def named(every: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Return the spans of a name."""
    return [each for each in every if each["name"] == name]


def test_without_the_api_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry.importlib.util, "find_spec", lambda name: None)
    span = telemetry.Span.begun()
    span.part("queue", 0.0, 1.0).parts(0.0, {"steps": 1.0})
    span.end("mistake", model="x")
    assert span.real is None
