"""What operators see and change: counts of answers, the access log, routes without threads."""

from __future__ import annotations

import inspect
import socket
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

from fastapi.routing import APIRoute
from prometheus_client.parser import text_string_to_metric_families

from seqpar.serve.api.app import create_app
from seqpar.serve.api.connections import HEAD_BYTES
from seqpar.serve.api.gate import GENERATIONS
from tests.support.front import Running


def samples(front: Running, name: str, label: str) -> Counter[str]:
    """The values of a metric, added up by one of its labels."""
    counts = Counter[str]()
    for metric in text_string_to_metric_families(front.http.get("/metrics").text):
        for sample in metric.samples:
            if sample.name == name:
                counts[sample.labels[label]] += int(sample.value)
    return counts


def test_each_answer_is_counted_and_logged_once(front: Running) -> None:
    known = (("responses", "status"), ("responses", "route"), ("jobs", "end"))
    before, first = [samples(front, f"seqpar_{name}_total", label) for name, label in known], len(front.events)
    calls: list[tuple[str, str, dict[str, Any], int]] = [
        ("GET", "/v1/models", {}, 200),
        ("POST", GENERATIONS, {"json": {"prompt": "counted"}}, 200),
        ("POST", GENERATIONS, {"json": {"prompt": "mistake"}}, 400),
        ("GET", "/no", {}, 404),
        ("GET", "/v1/models", {"headers": {"host": "other.example"}}, 403),
    ]
    for method, path, options, status in calls:
        answer = front.http.request(method, path, **options)
        assert answer.status_code == status
        line = front.event("answered", request=answer.headers["x-request-id"])
        about = {"method": method, "path": path, "status": status, "bytes": len(answer.content), "client": "127.0.0.1"}
        assert about.items() <= line.items()
    for head in (b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nx: " + b"x" * HEAD_BYTES):  # no requests, so not in the log
        with socket.create_connection(("127.0.0.1", front.port)) as line:
            line.sendall(head)
            while line.recv(1000):
                pass
    after = [samples(front, f"seqpar_{name}_total", label) for name, label in known]
    statuses, routes, ends = (new - old for new, old in zip(after, before, strict=True))
    assert statuses == Counter(str(status) for *_, status in calls) + Counter({"400": 1, "431": 1, "200": 3})
    assert routes == {"/metrics": 3, "/v1/models": 1, GENERATIONS: 2, "": 4}
    assert ends == {"completed": 1, "mistake": 1}
    paths = Counter(x["path"] for x in front.events[first:] if x["event"] == "answered")
    assert paths - Counter({"/metrics": 9}) == Counter(path for _, path, *_ in calls)
    for name in ("wait_seconds", "latency_seconds", "steps_per_second"):
        assert samples(front, f"seqpar_{name}_count", "model")["toy"] >= 1


def test_no_route_and_no_dependency_takes_a_thread() -> None:
    server: Any = SimpleNamespace(name="", metrics=SimpleNamespace(answered=None))
    app = cast("Any", create_app(server, None, frozenset())).app.app
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    for route in routes:
        calls = [route.endpoint, *(each.call for each in route.dependant.dependencies)]
        assert all(map(inspect.iscoroutinefunction, calls)), route.path
    assert len(routes) > 10
