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
    ({"prompt": None}, 400, "prompt is required; see /openapi.json"),
    ({"prompt": ""}, 400, "prompt '' should have at least 1 character"),
    ({"prompt": 3}, 400, "prompt 3 should be a valid string"),
    ({"prompt": ["a"]}, 400, "prompt ['a'] should be a valid string"),
    ({"prompt": "x" * 32001}, 400, "prompt 'xxx"),
    ({"prompt": "\ud800"}, 400, "should be a valid string"),
    ({"model": "dall-e-2"}, 404, "model not found; use one of toy, other"),
    ({"model": 1}, 400, "model 1 should be a valid string"),
    ({"model": ""}, 404, "model not found"),
    ({"n": 0}, 400, "n 0 should be"),
    ({"n": 11}, 400, "n 11 should be"),
    ({"n": "3"}, 400, "n '3' should be a valid integer"),
    ({"n": 1.5}, 400, "n 1.5 should be"),
    ({"n": True}, 400, "n True should be"),
    ({"size": "big"}, 400, "size 'big' must be \"auto\" or"),
    ({"size": "0x16"}, 400, "size '0x16' must be \"auto\" or"),
    ({"size": "16x-16"}, 400, "size '16x-16' must be"),
    ({"size": "16X16"}, 400, "size '16X16' must be"),
    ({"size": "8193x8"}, 400, "size '8193x8' must be"),
    ({"size": "\u0661x\u0661"}, 400, 'must be "auto"'),
    ({"size": [16, 16]}, 400, "size [16, 16] should be a valid string"),
    ({"response_format": "png"}, 400, "response_format 'png' should be 'b64_json' or 'url'"),
    ({"output_format": "gif"}, 400, "output_format 'gif' should be 'png', 'jpeg' or 'webp'"),
    ({"output_compression": 101}, 400, "output_compression 101 should be"),
    ({"output_compression": -1}, 400, "output_compression -1 should be"),
    ({"seed": -1}, 400, "seed -1 should be"),
    ({"seed": 2**63}, 400, "seed 9223372036854775808 should be"),
    ({"seed": 2**63 - 2, "n": 3}, 400, "seed + n - 1 must be at most"),
    ({"seed": "1"}, 400, "seed '1' should be a valid integer"),
    ({"steps": 0}, 400, "steps 0 should be"),
    ({f"field{i}": i for i in range(99)}, 400, "unknown fields field0, field1, field2 and 96 more; see"),
    ({"steps": 1001}, 400, "steps 1001 should be"),
    ({"guidance": -0.5}, 400, "guidance -0.5 should be"),
    ({"guidance": float("nan")}, 400, "guidance nan should be"),
    ({"guidance": float("inf")}, 400, "guidance inf should be"),
    ({"true_guidance": "4"}, 400, "true_guidance '4' should be a valid number"),
    ({"negative_prompt": 1}, 400, "negative_prompt 1 should be"),
    ({"negative_prompt": "\udfff"}, 400, "should be a valid string"),
    ({"scheduler": "os.system"}, 400, "scheduler 'os.system' should match"),
    ({"scheduler": {}}, 400, "scheduler {} should be"),
    ({"lora": 1}, 400, "lora"),
    ({"lora": [{"name": "style", "scale": float("inf")}]}, 400, "lora"),
    ({"lora": [{"name": "style", "file": "/etc/passwd"}]}, 400, "unknown fields lora.0.file"),
    ({"lora": "/etc/passwd"}, 400, "unknown or repeated lora; use some of style, lines, each once"),
    (
        {"lora": [{"name": "style"}, {"name": "style"}]},
        400,
        "unknown or repeated lora; use some of style, lines, each once",
    ),
    ({"lora": "style", "model": "other"}, 400, "unknown or repeated lora; other has none"),
    ({"deadline_s": 0}, 400, "deadline_s 0 should be"),
    ({"deadline_s": 101}, 400, "got deadline_s 101, expected at most 100"),
    ({"deadline_s": float("nan")}, 400, "deadline_s nan should be"),
    ({"priority": "urgent"}, 400, "priority 'urgent' should be 'high', 'normal' or 'low'"),
    ({"stream": 1}, 400, "stream 1 should be"),
    ({"stream": True, "response_format": "url"}, 400, "stream True is not supported with response_format 'url'"),
    ({"stream": True, "partial_images": 4}, 400, "partial_images 4 should be"),
    ({"stream": True, "partial_images": -1}, 400, "partial_images -1 should be"),
    ({"partial_images": 2}, 400, "partial_images 2 requires stream true"),
    ({"stream_steps": True}, 400, "stream_steps True requires stream true"),
    ({"streams": True, "mask": 1}, 400, "unknown fields streams, mask; see /openapi.json"),
    ({"x" * 200: 1}, 400, "unknown fields xxx"),
    ({"bad\nname": 1}, 400, "unknown fields bad\\nname"),
]
RAW: list[tuple[bytes, str, int, str]] = [
    (b"", "application/json", 400, "body is required"),
    (b"{", "application/json", 400, "the body is not JSON"),
    (b"[]", "application/json", 400, "body [] should be"),
    (b"null", "application/json", 400, "body None should be"),
    (b'"text"', "application/json", 400, "body 'text' should be"),
    (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "application/json", 400, "the body"),
    (b"[" * 100_000, "application/json", 400, "the body"),
    (b"\xff\xfe{}", "application/json", 400, "the body"),
    (json.dumps(GOOD).encode(), "text/plain", 415, "content-type 'text/plain' is not supported; use application/json"),
    (b"prompt=x", "application/x-www-form-urlencoded", 415, "is not supported"),
    (json.dumps(GOOD).encode(), "", 415, "content-type '' is not supported; use application/json"),
    (json.dumps({"prompt": "x" * 1_000_001}).encode(), "application/json", 413, "body of 10000"),
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
            check(http.request(method, path), status, "; see /openapi.json" if status == 405 else "")
    assert front.prompts == []


def test_the_client_of_openai_raises_its_own_error(front: Running) -> None:
    with front.openai() as client, pytest.raises(openai.BadRequestError, match='must be "auto" or') as error:
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
