"""Bad requests: each has its status, its code and one sentence, and the ranks hear of none."""

from __future__ import annotations

import json
import socket
from typing import Any

import openai
import pytest

from tests.support.front import LIMIT_S, Running

PATH = "/v1/images/generations"
GOOD: dict[str, Any] = {"prompt": "never"}
FIELDS: list[tuple[dict[str, Any], int, str]] = [
    ({"prompt": None}, 400, "got no prompt, expected one; see /openapi.json"),
    ({"prompt": ""}, 400, "got prompt '', "),
    ({"prompt": 3}, 400, "got prompt 3, expected a valid string"),
    ({"prompt": ["a"]}, 400, "got prompt ['a'], expected a valid string"),
    ({"prompt": "x" * 32001}, 400, "got prompt 'xxx"),
    ({"prompt": "\ud800"}, 400, "got prompt "),
    ({"model": "dall-e-2"}, 404, "got a model that is not served, expected one of toy, other"),
    ({"model": 1}, 400, "got model 1, expected a valid string"),
    ({"model": ""}, 404, "got a model that is not served"),
    ({"n": 0}, 400, "got n 0, expected"),
    ({"n": 11}, 400, "got n 11, expected"),
    ({"n": "3"}, 400, "got n '3', expected a valid integer"),
    ({"n": 1.5}, 400, "got n 1.5, expected"),
    ({"n": True}, 400, "got n True, expected"),
    ({"size": "big"}, 400, "got size 'big', expected \"auto\" or"),
    ({"size": "0x16"}, 400, "got size '0x16', expected \"auto\" or"),
    ({"size": "16x-16"}, 400, "got size '16x-16', expected"),
    ({"size": "16X16"}, 400, "got size '16X16', expected"),
    ({"size": "8193x8"}, 400, "got size '8193x8', expected"),
    ({"size": "\u0661x\u0661"}, 400, "got size "),
    ({"size": [16, 16]}, 400, "got size [16, 16], expected a valid string"),
    ({"response_format": "png"}, 400, "got response_format 'png', expected 'b64_json' or 'url'"),
    ({"output_format": "gif"}, 400, "got output_format 'gif', expected 'png', 'jpeg' or 'webp'"),
    ({"output_compression": 101}, 400, "got output_compression 101, expected"),
    ({"output_compression": -1}, 400, "got output_compression -1, expected"),
    ({"seed": -1}, 400, "got seed -1, expected"),
    ({"seed": 2**63}, 400, "got seed 9223372036854775808, expected"),
    ({"seed": 2**63 - 2, "n": 3}, 400, "expected a seed of at most"),
    ({"seed": "1"}, 400, "got seed '1', expected a valid integer"),
    ({"steps": 0}, 400, "got steps 0, expected"),
    ({f"field{i}": i for i in range(99)}, 400, "got unknown fields field0, field1, field2 and 96 more, expected"),
    ({"steps": 1001}, 400, "got steps 1001, expected"),
    ({"guidance": -0.5}, 400, "got guidance -0.5, expected"),
    ({"guidance": float("nan")}, 400, "got guidance nan, expected"),
    ({"guidance": float("inf")}, 400, "got guidance inf, expected"),
    ({"true_guidance": "4"}, 400, "got true_guidance '4', expected a valid number"),
    ({"negative_prompt": 1}, 400, "got negative_prompt 1, expected"),
    ({"negative_prompt": "\udfff"}, 400, "got negative_prompt "),
    ({"scheduler": "os.system"}, 400, "got scheduler 'os.system', "),
    ({"scheduler": {}}, 400, "got scheduler {}, expected"),
    ({"lora": 1}, 400, "got lora"),
    ({"lora": [{"name": "style", "scale": float("inf")}]}, 400, "got lora"),
    ({"lora": [{"name": "style", "file": "/etc/passwd"}]}, 400, "got unknown fields lora.0.file"),
    ({"lora": "/etc/passwd"}, 400, "got other LoRAs, expected some of style, lines, each once"),
    (
        {"lora": [{"name": "style"}, {"name": "style"}]},
        400,
        "got other LoRAs, expected some of style, lines, each once",
    ),
    ({"lora": "style", "model": "other"}, 400, "got other LoRAs, expected none: other has none"),
    ({"deadline_s": 0}, 400, "got deadline_s 0, expected"),
    ({"deadline_s": 101}, 400, "got deadline_s 101, expected at most 100"),
    ({"deadline_s": float("nan")}, 400, "got deadline_s nan, expected"),
    ({"priority": "urgent"}, 400, "got priority 'urgent', expected 'high', 'normal' or 'low'"),
    ({"stream": 1}, 400, "got stream 1, expected"),
    ({"stream": True, "response_format": "url"}, 400, "got stream True, expected False with response_format 'url'"),
    ({"stream": True, "partial_images": 4}, 400, "got partial_images 4, expected"),
    ({"stream": True, "partial_images": -1}, 400, "got partial_images -1, expected"),
    ({"partial_images": 2}, 400, "got partial_images 2, expected 0 without a stream; add stream true"),
    ({"stream_steps": True}, 400, "got stream_steps True, expected False without a stream"),
    ({"streams": True, "mask": 1}, 400, "got unknown fields streams, mask, expected those of /openapi.json"),
    ({"x" * 200: 1}, 400, "got unknown fields xxx"),
    ({"bad\nname": 1}, 400, "got unknown fields bad\\nname"),
]
RAW: list[tuple[bytes, str, int, str]] = [
    (b"", "application/json", 400, "got no body"),
    (b"{", "application/json", 400, "got a body that is not JSON"),
    (b"[]", "application/json", 400, "got body []"),
    (b"null", "application/json", 400, "got "),
    (b'"text"', "application/json", 400, "got body"),
    (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "application/json", 400, "got a "),
    (b"[" * 100_000, "application/json", 400, "got a "),
    (b"\xff\xfe{}", "application/json", 400, "got a "),
    (json.dumps(GOOD).encode(), "text/plain", 415, "got content-type 'text/plain', expected application/json"),
    (b"prompt=x", "application/x-www-form-urlencoded", 415, "got content-type"),
    (json.dumps(GOOD).encode(), "", 415, "got content-type '', expected application/json"),
    (json.dumps({"prompt": "x" * 1_000_001}).encode(), "application/json", 413, "got a body of 10000"),
]
PATHS: list[tuple[str, str, int]] = [
    ("POST", "/", 405),
    ("GET", "/docs", 404),
    ("GET", "/v1/images/edits", 405),
    ("POST", "/v1/images/edits", 415),
    ("GET", PATH, 405),
    ("GET", "/v1/jobs/unknown", 404),
    ("DELETE", "/v1/jobs/unknown", 404),
    ("GET", "/v1/files/..%2f..%2fetc%2fpasswd", 404),
    ("POST", "/metrics", 405),
]


def check(answer: Any, status: int, said: str) -> None:
    """Compare an answer with its status and the sentence in OpenAI's shape, on one line."""
    assert (answer.status_code, set(answer.json())) == (status, {"error"}), answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert said in error["message"]
    assert "\n" not in error["message"]
    assert len(error["message"]) < 400
    assert answer.headers["x-request-id"]


def test_bad_fields(front: Running) -> None:
    with front.http() as http:
        for fields, status, said in FIELDS:
            body = json.dumps({**GOOD, **fields})
            check(http.post(PATH, content=body, headers={"content-type": "application/json"}), status, said)
        for content, kind, status, said in RAW:
            check(http.post(PATH, content=content, headers={"content-type": kind}), status, said)
        for method, path, status in PATHS:
            check(http.request(method, path), status, "got ")
    assert front.prompts == []


def test_the_client_of_openai_raises_its_own_error(front: Running) -> None:
    with front.openai() as client, pytest.raises(openai.BadRequestError, match='expected "auto" or') as error:
        client.images.generate(prompt="never", size="big")  # pyright: ignore
    assert (error.value.param, error.value.code) == ("size", "invalid_value")
    assert error.value.request_id
    assert front.prompts == []


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("host", "evil.example", 403),
        ("host", "127.0.0.1.evil.example", 403),
        ("host", "", 403),
        ("host", "[", 403),
        ("host", "localhost:1", 200),
        ("host", "[::1]:8000", 200),
        ("origin", "https://evil.example", 403),
        ("origin", "null", 403),
        ("origin", "http://[", 403),
        ("origin", "http://127.0.0.1:1", 403),
    ],
)
def test_other_sites_are_refused(front: Running, name: str, value: str, status: int) -> None:
    with front.http() as http:
        for path in ("/", "/v1/models", "/health", "/metrics"):
            answer = http.get(path, headers={name: value})
            assert answer.status_code == status
            assert "access-control-allow-origin" not in answer.headers
        assert http.get("/v1/models", headers={"origin": front.url}).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_a_long_body_is_refused_before_it_is_there(front: Running, chunked: bool) -> None:
    port = front.event("listening")["port"]
    size = "transfer-encoding: chunked" if chunked else "content-length: 2000000"
    head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{size}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), LIMIT_S) as line:
        line.sendall(head.encode())
        if chunked:
            line.sendall(b"f4241\r\n" + b" " * 1_000_001)  # and no end
        assert line.recv(100).startswith(b"HTTP/1.1 413")
    assert front.prompts == []
