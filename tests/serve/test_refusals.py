"""Bad requests: each has its status, its code and one sentence, and the ranks hear of none."""

from __future__ import annotations

import json
import pickle
import re
import socket
import zlib
from base64 import b64encode
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from safetensors.numpy import save

from seqpar.serve.api.gate import EDITS, FORM, GENERATIONS, JSON, VIDEOS
from tests.mesh.test_messages import Bomb
from tests.support.front import LIMIT_S, PIXELS, Running, file_of, until

WORDS = re.compile(r"--|\n|seqpar\.")  # of the command line, or of Python

IMAGE_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt is required; see /openapi.json"),
    ({"prompt": ""}, "prompt '' should have at least 1 character"),
    ({"prompt": 3}, "prompt 3 should be a valid string"),
    ({"prompt": "x" * 32001}, "prompt 'xxx"),
    ({"prompt": "\ud800"}, "should be a valid string"),
    ({"model": 1}, "model 1 should be a valid string"),
    ({"model": "changer"}, "model changer requires an image; use /v1/images/edits"),
    ({"model": "movie"}, "model movie generates videos; use /v1/videos"),
    ({"n": 0}, "n 0 should be"),
    ({"n": 11}, "n 11 should be"),
    ({"n": "3"}, "n '3' should be a valid integer"),
    ({"n": True}, "n True should be"),
    ({"size": "big"}, "size 'big' must be \"auto\" or"),
    ({"size": "0x16"}, "size '0x16' must be \"auto\" or"),
    ({"size": "16x-16"}, "size '16x-16' must be"),
    ({"size": "16X16"}, "size '16X16' must be"),
    ({"size": "8193x8"}, "size '8193x8' must be"),
    ({"size": "\u0661x\u0661"}, 'must be "auto"'),
    ({"size": [16, 16]}, "size [16, 16] should be a valid string"),
    ({"response_format": "png"}, "response_format 'png' should be 'b64_json', 'url' or 'file'"),
    ({"output_format": "gif"}, "output_format 'gif' should be 'png', 'jpeg', 'webp', 'safetensors' or 'latents'"),
    ({"output_compression": 101}, "output_compression 101 should be"),
    ({"output_compression": -1}, "output_compression -1 should be"),
    ({"seed": -2}, "seed -2 should be"),
    ({"seed": 2**63}, "seed 9223372036854775808 should be"),
    ({"seed": 2**63 - 2, "n": 3}, "seed + n - 1 must be at most"),
    ({"seed": "1"}, "seed '1' should be a valid integer"),
    ({"steps": 0}, "steps 0 should be"),
    ({f"field{i}": i for i in range(99)}, "unknown fields field0, field1, field2 and 96 more; see"),
    ({"steps": 1001}, "steps 1001 should be"),
    ({"guidance": -0.5}, "guidance -0.5 should be"),
    ({"guidance": float("nan")}, "guidance nan should be"),
    ({"true_guidance": "4"}, "true_guidance '4' should be a valid number"),
    ({"negative_prompt": 1}, "negative_prompt 1 should be"),
    ({"negative_prompt": "\udfff"}, "should be a valid string"),
    ({"scheduler": "os.system"}, "scheduler 'os.system' should match"),
    ({"scheduler": {}}, "scheduler {} should be"),
    ({"preset": 4}, "preset 4 should be"),
    ({"preset": "x" * 65}, "preset 'xxx"),
    ({"lora": 1}, "lora"),
    ({"lora": [{"name": "style", "scale": float("inf")}]}, "lora"),
    ({"lora": [{"name": "style", "file": "/etc/passwd"}]}, "unknown fields lora.0.file"),
    ({"lora": "/etc/passwd"}, "unknown or repeated lora; use some of style, lines, each once"),
    ({"lora": [{"name": "style"}] * 2}, "unknown or repeated lora; use some of style, lines, each once"),
    ({"lora": "style", "model": "other"}, "unknown or repeated lora; other has none"),
    ({"deadline_s": 0}, "deadline_s 0 should be"),
    ({"deadline_s": 101}, "got deadline_s 101, expected at most 100"),
    ({"deadline_s": float("nan")}, "deadline_s nan should be"),
    ({"priority": "urgent"}, "priority 'urgent' should be 'high', 'normal' or 'low'"),
    ({"stream": 1}, "stream 1 should be"),
    ({"stream": True, "response_format": "url"}, "stream True is not supported with response_format 'url'"),
    ({"stream": True, "partial_images": 4}, "partial_images 4 should be"),
    ({"stream": True, "partial_images": -1}, "partial_images -1 should be"),
    ({"partial_images": 2}, "partial_images 2 requires stream true"),
    ({"stream_steps": True}, "stream_steps True requires stream true"),
    ({"streams": True, "mask": 1}, "unknown fields streams, mask; did you mean stream?"),
    ({"num_inference_step": 3}, "unknown fields num_inference_step; see /openapi.json"),
    ({"num_inference_steps": 0}, "num_inference_steps 0 should be"),
    ({"num_inference_steps": 4, "steps": 4}, "unknown fields num_inference_steps"),
    ({"width": 64}, "width and height come together, and in place of size"),
    ({"width": 64, "height": 64, "size": "64x64"}, "width and height come together"),
    ({"background": "transparent"}, "background 'transparent' is not supported, because models make opaque images"),
    ({"response_format": "file", "n": 2}, "response_format 'file' is one image; request n 1"),
    ({"lora": {"name": "none", "local_path": "/etc/passwd"}}, "unknown or repeated lora; use some of style, lines"),
    ({"lora": {"scale": 1}}, "lora.0.name is required"),
    ({"x" * 200: 1}, "unknown fields xxx"),
    ({"bad\nname": 1}, "unknown fields bad\\nname"),
]
URL = f"data:image/png;base64,{b64encode(file_of()).decode()}"
TWO = "unknown or repeated lora; use some of high@transformer, low@transformer_2, style@transformer,"
VIDEO_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt is required"),
    ({"seconds": "long"}, "seconds 'long' should be"),
    ({"seconds": 0}, "seconds 0 should be"),
    ({"seconds": "nan"}, "seconds 'nan' should be"),
    ({"seconds": 600}, "seconds 600 at 8 frames per second exceed 4096 frames"),
    ({"seconds": 1, "frames": 9}, "seconds and frames exclude each other"),
    ({"frames": 10}, "got frames 10, expected 1 more than a multiple of 4, such as 9"),
    ({"frames": 0}, "frames 0 should be"),
    ({"fps": 1001}, "fps 1001 should be"),
    ({"n": 2}, "n 2 should be less than or equal to 1"),
    ({"input_reference": "/etc/passwd"}, "input_reference '/etc/passwd' must be a data URL of a PNG, JPEG or WebP"),
    ({"input_reference": {"image_url": "http://127.0.0.1/x.png"}}, "no other URL is read"),
    ({"input_reference": {"file_id": "1"}}, "input_reference {'file_id': '1'} should be a valid string"),
    ({"image": "data:image/gif;base64,R0lGODlh"}, "must be a data URL of a PNG, JPEG or WebP in base64; no other"),
    ({"image": "data:image/png;base64,%%%"}, "image is not base64"),
    ({"image": URL, "input_reference": URL, "model": "clip"}, "model clip takes one image, got 2"),
    ({"image": URL, "model": "movie"}, "model movie takes no images"),
    ({"lora": "style"}, TWO),
    ({"lora": "high@transformer_2"}, TWO),
    ({"lora": [{"name": "high"}, {"name": "high@transformer"}]}, TWO),
    ({"lora": "high@unet"}, TWO),
    ({"model": "toy"}, "model toy generates images; /v1/models lists"),
    ({"model": "clip"}, "model clip requires an image"),
    ({"deadline_s": 4000}, "got deadline_s 4000, expected at most 3600"),
]

CRANES = "got class 'crane', which stands for 0 and 2, expected one of these numbers"
RULES: list[tuple[dict[str, Any], str, str]] = [  # of the ranks: fields, param, text
    ({"size": "65x16"}, "size", "size 65x16 is not divisible by 8; nearest: 64x16, 72x16"),
    ({"size": "3x8"}, "size", "size 3x8 is not divisible by 8; nearest: 8x8"),
    ({"size": "8192x8191"}, "size", "size 8192x8191 is not divisible by 8; nearest: 8192x8184, 8192x8192"),
    ({"size": "4096x4096"}, "size", "needs more memory than the server has for model strict; request a smaller size"),
    ({"size": "1024x1024", "deadline_s": 70}, "size", "predicted to take 100 s, but 70 s remain before the deadline"),
    ({"steps": 1}, "steps", "got steps 1, expected 2 to 1000 with model strict"),
    ({"steps": 3, "scheduler": "PNDMScheduler"}, "steps", "got steps 3, expected 4 to 1000 with PNDMScheduler"),
    ({"steps": 51, "scheduler": "LCMScheduler"}, "steps", "got steps 51, expected 1 to 50 with LCMScheduler"),
    ({"scheduler": "PMDNScheduler"}, "scheduler", "does not fit model strict; use PNDMScheduler, or leave it out"),
    ({"scheduler": "X"}, "scheduler", "use DDIMScheduler, PNDMScheduler, LCMScheduler, or leave it out"),
    ({"scheduler": "X", "model": "toy"}, "scheduler", "scheduler 'X' does not fit model toy; leave it out"),
    ({"preset": "turbo"}, "preset", "preset 'turbo' is unknown; use lightning-4"),
    ({"preset": "turbo", "model": "toy"}, "preset", "preset 'turbo' is unknown; toy has none"),
    ({"preset": "lightning-4", "steps": 8}, "preset", "preset sets steps and scheduler; leave it or them out"),
    ({"true_guidance": 2}, "true_guidance", "model strict takes no true_guidance; leave it out"),
    # other names of fields: those that the client sent
    ({"true_cfg_scale": 2}, "true_cfg_scale", "model strict takes no true_cfg_scale; leave it out"),
    ({"num_inference_steps": 1}, "num_inference_steps", "got num_inference_steps 1, expected 2 to 1000 with"),
    ({"width": 65, "height": 16}, "width", "size 65x16 is not divisible by 8; nearest: 64x16, 72x16"),
    ({"model": "movie", "num_frames": 10}, "num_frames", "got num_frames 10, expected 1 more than a multiple of 4"),
    ({"negative_prompt": "a"}, "negative_prompt", "takes no negative_prompt: it has one branch; leave it out"),
    ({"lora": "style"}, "lora", "unknown or repeated lora; strict has none"),
    ({"controlnet": "pose"}, "controlnet", "controlnet 'pose' is unknown; strict has none"),
    ({"controlnet": "x", "control_image": URL, "model": "editor"}, "controlnet", "is unknown; use pose"),
    ({"controlnet": "pose", "model": "editor"}, "control_image", "controlnet and control_image need each other"),
    ({"control_image": URL}, "control_image", "controlnet and control_image need each other; send both"),
    ({"control_scale": 0.5, "model": "editor"}, "control_scale", "control_scale has no effect without a controlnet"),
    ({"control_image": "file:///etc/passwd"}, "control_image", "no other URL is read"),
    ({"model": "breeds", "prompt": "tenhc"}, "prompt", "got class 'tenhc', expected one of tench, or 0 to 2"),
    ({"model": "breeds", "prompt": "3"}, "prompt", "got class '3', expected one of "),
    ({"model": "breeds", "prompt": "9" * 5000}, "prompt", "got class '9999"),
    ({"model": "breeds", "prompt": "crane"}, "prompt", CRANES),
    ({"model": "movie", "seconds": 600}, "seconds", "seconds 600 at 8 frames per second exceed 4096 frames"),
    ({"model": "movie", "frames": 10}, "frames", "got frames 10, expected 1 more than a multiple of 4, such as 9"),
    ({"model": "movie", "frames": 405}, "frames", "got frames 405, expected 1 to 401 of model movie"),
    ({"model": "movie", "seconds": "60"}, "seconds", "got frames 481, expected 1 to 401 of model movie"),
]


def _chunk(kind: bytes, content: bytes) -> bytes:
    return len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")


def bomb() -> bytes:
    """A small PNG with a header of 100 million pixels."""

    side = (10_000).to_bytes(4, "big")
    header = _chunk(b"IHDR", side + side + bytes([8, 2, 0, 0, 0]))
    return b"\x89PNG\r\n\x1a\n" + header + _chunk(b"IDAT", zlib.compress(bytes(1000))) + _chunk(b"IEND", b"")


def mask_of(rows: int) -> bytes:
    """A mask whose first row is transparent."""
    return file_of((np.full((rows, 10, 4), 255) * (np.arange(rows)[:, None, None] > 0)).astype(np.uint8))


def latents(*shape: int) -> tuple[str, bytes]:
    return "image", save({"latents": np.zeros(shape, np.float32)})


DECODED = {"prompt": "x", "steps": "0"}
PNG, MASK = ("image", file_of()), mask_of(6)
REFERENCE = ("input_reference", file_of())
POSE = {"prompt": "x", "model": "editor", "controlnet": "pose"}
CLIP = {"prompt": "never", "model": "clip"}
FORMS: list[tuple[str, dict[str, Any], list[tuple[str, bytes]], str]] = [
    (EDITS, {"prompt": "x"}, [("mask", MASK)], "image is required"),
    (EDITS, {"prompt": "x", "model": "changer"}, [PNG, ("mask", MASK)], "model changer takes no mask"),
    (EDITS, {"prompt": "x"}, [PNG, PNG, ("mask", MASK)], "model editor takes one image, got 2; send one"),
    (EDITS, {"prompt": "x"}, [PNG, ("mask", MASK), ("mask", MASK)], "got 2 files mask; send a single file"),
    (EDITS, {"prompt": "x"}, [PNG, ("mask", file_of())], "got mask without transparency, expected transparent pixels"),
    (EDITS, {"prompt": "x"}, [PNG, ("mask", mask_of(3))], "got mask of 10x3 pixels, expected the image's 10x6"),
    (EDITS, POSE, [PNG, ("control_image", PNG[1])], "model editor takes no controlnet with image"),
    (EDITS, POSE, [("control_image", b"none")], "got control_image, which is none, expected a picture"),
    (EDITS, {"prompt": "x"}, [PNG, ("mask", b"none")], "got mask, which is none, expected a picture"),
    (EDITS, {"prompt": "x"}, [("image", b"no image")], "got image 1, which is none, expected a picture as PNG, JPEG"),
    (EDITS, {"prompt": "x"}, [("image", file_of(kind="gif"))], "got image 1, which is none"),
    (EDITS, {"prompt": "x"}, [PNG, ("image", file_of()[:-30])], "got image 2, which is broken"),
    (
        EDITS,
        {"prompt": "x"},
        [("image", save({"image": PIXELS[0]}))],
        "image 1 has tensors [('image', 'U8', 10, 3)], exp",
    ),
    (EDITS, {"prompt": "x"}, [("image", save({"image": PIXELS})[:-9])], "image 1 is no safetensors file"),
    (EDITS, DECODED, [latents(1, 4, 1, 1025)], "latents of 8200x8 pixels are too many for model toy; send fewer"),
    (EDITS, DECODED, [latents(1, 4, 2, 3, 3)], "got latents of 2 frames, expected those of one image"),
    (EDITS, {"prompt": "x", "num_inference_steps": "0"}, [PNG], "num_inference_steps 0 decodes latents to an"),
    *(
        (EDITS, DECODED | {name: value}, [latents(1, 4, 1, 1)], f"{name} has no effect on latents that are only")
        for name, value in (("lora", "style"), ("guidance", "3"), ("size", "16x24"), ("strength", "0.5"))
    ),
    (EDITS, {"prompt": "x"}, [("image", bomb())], "got image 1 of 10000x10000 pixels (height x width), expected at"),
    (EDITS, {"prompt": "x"}, [("images", file_of())], "unknown files 'images'; send files as image or image[]"),
    (EDITS, {"prompt": "x"}, [PNG] * 18, "the request cannot be read"),
    (EDITS, {"prompt": "x", "image": "/etc/passwd"}, [PNG], "unknown fields image; see /openapi"),
    (EDITS, {"prompt": ["x", "y"]}, [PNG], "'prompt' is given twice; send it once"),
    (EDITS, {}, [PNG], "prompt is required"),
    (EDITS, {"prompt": "x", "n": "two"}, [PNG], "n 'two' should be"),
    (EDITS, {"prompt": "x", "lora": "{"}, [PNG], "lora '{' should be a valid list"),
    (EDITS, {"prompt": "x", "prompt[text]": "y"}, [PNG], "unknown fields prompt[text]"),
    (EDITS, {"prompt[text]": "y"}, [PNG], "prompt {'text': 'y'} should be a valid string"),
    (EDITS, {"prompt": "x", "strength": "0"}, [PNG], "strength '0' should be"),
    (EDITS, {"prompt": "x", "strength": "nan"}, [PNG], "strength 'nan' should be"),
    (EDITS, {"prompt": "x", "model": "toy"}, [PNG], "model toy takes no images; /v1/models lists"),
    (EDITS, {"prompt": "x", "model": "movie"}, [PNG], "model movie generates videos; use /v1/videos"),
    (VIDEOS, CLIP, [("input_reference", b"no image")], "got image 1, which is none"),
    (VIDEOS, CLIP, [REFERENCE] * 2, "model clip takes one image, got 2; send one"),
    (VIDEOS, CLIP, [("file", file_of())], "unknown files 'file'; send files as input_reference or image"),
    (VIDEOS, CLIP, [REFERENCE, PNG], "model clip takes one image, got 2"),
    (EDITS, {"prompt": "x", "model": "strict"}, [PNG] * 2, "model strict takes one image, got 2; send one"),
    (EDITS, {"prompt": "x", "model": "strict", "negative_prompt": "a"}, [PNG], "without true_guidance over 1; add it"),
    (VIDEOS, {"prompt": "never"}, [REFERENCE], "model movie takes no images"),
]
GOOD, BROKEN_FORM = b'{"prompt": "never"}', f"{FORM}; boundary=x"
RAW: list[tuple[str, bytes, str, int, str]] = [
    (GENERATIONS, b"", JSON, 400, "body is required"),
    (GENERATIONS, b"{", JSON, 400, "the body is not JSON"),
    (GENERATIONS, b"[]", JSON, 400, "body [] should be"),
    (GENERATIONS, b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", JSON, 400, "the body"),
    (GENERATIONS, b"[" * 100_000, JSON, 400, "the body"),
    (GENERATIONS, b"\xff\xfe{}", JSON, 400, "the body"),
    (GENERATIONS, GOOD, "text/plain", 415, "content-type 'text/plain' is not supported; use application/json"),
    (GENERATIONS, b"prompt=x", "application/x-www-form-urlencoded", 415, "is not supported"),
    (GENERATIONS, GOOD, "", 415, "content-type '' is not supported; use application/json"),
    (GENERATIONS, json.dumps({"prompt": "x" * 1_000_001}).encode(), JSON, 413, "body of 10000"),
    (GENERATIONS, b'{"prompt": "never", "model": "dall-e-3"}', JSON, 404, "model not found; use one of toy, other"),
    (GENERATIONS, b'{"prompt": "never", "model": ""}', JSON, 404, "model not found"),
    (EDITS, bytes(50_000_001), BROKEN_FORM, 413, "exceeds the limit"),
    *((EDITS, content, BROKEN_FORM, 400, "") for content in (b"", b"--x", b"--x\r\n\r\n\r\n--x--")),
    (EDITS, GOOD, JSON, 415, "is not supported"),
    (VIDEOS, b"{", JSON, 400, "the body is not JSON"),
]
PATHS: list[tuple[str, str, int]] = [
    ("POST", "/", 405),
    ("GET", "/docs", 404),
    ("GET", EDITS, 405),
    ("POST", EDITS, 415),
    ("GET", GENERATIONS, 405),
    ("GET", "/v1/jobs/unknown", 404),
    ("DELETE", "/v1/jobs/unknown", 404),
    ("GET", "/v1/files/..%2f..%2fetc%2fpasswd", 404),
    ("POST", "/metrics", 405),
    ("GET", f"{VIDEOS}?limit=0", 400),
    ("GET", f"{VIDEOS}?limit=101", 400),
    ("GET", f"{VIDEOS}?order=up", 400),
    ("GET", f"{VIDEOS}?after=nothing", 404),
]


def check(answer: httpx.Response, status: int, said: str, param: str | None = None) -> None:
    """Compare an answer with its status and the sentence in OpenAI's shape, on one line."""
    assert (answer.status_code, set(answer.json())) == (status, {"error"}), answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert said in error["message"]
    assert param is None or param == error["param"]
    assert not WORDS.search(error["message"])
    assert len(error["message"]) < 400
    assert answer.headers["x-request-id"]


def test_bad_requests(front: Running) -> None:
    """They are refused while a job runs and the queue is full, but for files, which are then not decoded."""
    post = front.http.post
    first = post(VIDEOS, json={"prompt": "hold refusals"}).json()["id"]
    until(lambda: any(first == order["id"].partition("/")[0] for order in front.orders))
    before = len(front.heard)
    for path, data, files, said in FORMS:
        check(post(path, data=data, files=files), 400, said)
    check(post(EDITS, data={"prompt": "x", "model": "none"}, files=[PNG]), 404, "model not found")
    twice = {"data": {**POSE, "control_image": URL}, "files": [("control_image", file_of())]}
    check(post(EDITS, **twice), 400, "control_image is a file and a text; send one of them", "control_image")
    odd = [("control_image", save({"image": PIXELS[0]}))]
    check(post(EDITS, data=POSE, files=odd), 400, "control_image has tensors", "control_image")
    broken = {**CLIP, "image": "data:image/png;base64,bm9uZQ=="}
    check(post(VIDEOS, json=broken), 400, "got image 1, which is none", "image")
    waiting = [post(VIDEOS, json={"prompt": "x"}).json()["id"] for _ in range(3)]
    check(post(GENERATIONS, json={"prompt": "x"}), 429, "queue is full (3 requests)")
    for path, rows in ((GENERATIONS, IMAGE_FIELDS), (VIDEOS, VIDEO_FIELDS)):
        for fields, said in rows:
            body = json.dumps({"prompt": "never", **fields})  # httpx would not send NaN
            check(post(path, content=body, headers={"content-type": JSON}), 400, said)
    for fields, param, said in RULES:
        body = {"prompt": "never", "model": "strict", **fields}
        check(post(VIDEOS if body["model"] == "movie" else GENERATIONS, json=body), 400, said, param)
    for path, content, kind, status, said in RAW:
        check(post(path, content=content, headers={"content-type": kind}), status, said)
    for method, path, status in PATHS:
        check(front.http.request(method, path), status, "; see /openapi.json" if status == 405 else "")
    assert len(front.heard) == before
    for id_ in (*waiting, first):
        assert front.http.delete(f"{VIDEOS}/{id_}").status_code == 200


def test_requests_at_the_bounds_of_the_rules_are_taken(front: Running) -> None:
    rows: list[dict[str, Any]] = [
        {"size": "24x16", "scheduler": "PNDMScheduler", "steps": 4},
        {"size": "1024x1024", "deadline_s": 100},  # the step is predicted to take as long
        {"preset": "lightning-4", "guidance": 3.0},
        *({"model": "breeds", "prompt": label} for label in ("cat", "cat, crane", "Tinca tinca", "2")),
    ]
    for fields in rows:
        answer = front.http.post(GENERATIONS, json={"prompt": "x", "model": "strict", **fields})
        assert answer.status_code == 200, answer.text


def test_the_client_of_openai_raises_its_own_errors(front: Running) -> None:
    with pytest.raises(openai.BadRequestError, match='must be "auto" or') as error:
        front.ai.images.generate(prompt="never", size="big")  # pyright: ignore
    assert (error.value.param, error.value.code) == ("size", "invalid_value")
    assert error.value.request_id
    with pytest.raises(openai.NotFoundError):  # before a stream begins
        front.ai.images.generate(prompt="x", model="none", stream=True)


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
    for path in ("/", "/v1/models", "/health", "/metrics"):
        answer = front.http.get(path, headers={name: value})
        assert answer.status_code == status
        assert "access-control-allow-origin" not in answer.headers
    assert front.http.get("/v1/models", headers={"origin": front.url}).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_a_long_body_is_refused_before_it_has_arrived(front: Running, chunked: bool) -> None:
    size = "transfer-encoding: chunked" if chunked else "content-length: 2000000"
    head = f"POST {GENERATIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {JSON}\r\n{size}\r\n\r\n"
    before = len(front.heard)
    with socket.create_connection(("127.0.0.1", front.port), LIMIT_S) as line:
        line.sendall(head.encode())
        if chunked:
            line.sendall(b"f4241\r\n" + b" " * 1_000_001)  # and no end
        assert line.recv(100).startswith(b"HTTP/1.1 413")
    assert len(front.heard) == before


# attacks --------------------------------------------------------------------------------------------------------------

GET, HOST = "GET /v1/models HTTP/1.1\r\n", "host: localhost\r\n"
POST = f"POST {GENERATIONS} HTTP/1.1\r\n{HOST}content-type: {JSON}\r\n"
WHOLE, CHUNKS = GOOD.decode(), f"13\r\n{GOOD.decode()}\r\n0\r\n\r\n"  # the same body; it is taken with right lengths
CHUNKED = f"{POST}transfer-encoding: chunked\r\n\r\n"
TEXTS = [  # whole requests, of which an answer 4xx or nothing comes back
    *(
        f"{POST}content-length: {length}\r\n\r\n{WHOLE}"
        for length in (
            *("19\r\ncontent-length: 20", "19, 20", "-19", "+19", "0x13", "1_9", "19e0", "19.0", "", " ", "\u00b9"),
            *("9" * 19, "9" * 40),
        )
    ),
    *(
        f"{POST}{encoding}\r\n\r\n{CHUNKS}"
        for encoding in (
            "content-length: 19\r\ntransfer-encoding: chunked",
            "transfer-encoding: chunked\r\ncontent-length: 19",
            "transfer-encoding: xchunked",
            "transfer-encoding: identity, chunked",
            "transfer-encoding: chunked, identity",
            "transfer-encoding: chunked\r\ntransfer-encoding: chunked",
            "transfer-encoding : chunked",
            "transfer-encoding:\x0bchunked",
            "content-encoding: gzip",
        )
    ),
    *(
        CHUNKED + chunk
        for chunk in (f"-{CHUNKS}", f"0x{CHUNKS}", f"+{CHUNKS}", f"{'F' * 30}\r\n", CHUNKS.replace("}", "}x"))
    ),
    *(
        GET + head + "\r\n\r\n"
        for head in (
            "x: y",  # no Host
            f"{HOST}{HOST}x: y",
            "host: localhost@evil.example",
            "host: evil.example#localhost",
            "host: evil.example/localhost",
            "host: localhost.evil.example:80",
            "host: localhost\r\n folded",
            "host: localhost\x00",
            "host: \xff",
            f"{HOST}origin: file://",
            f"{HOST}origin: http://localhost.evil.example",
            f"{HOST}origin: http://localhost@evil.example",
            f"{HOST}origin: http://localhost\r\norigin: http://evil.example",
            f"{HOST}no colon",
            f"{HOST}sp ace: x",
            f"{HOST}: x",
            f"{HOST}x: \x00",
            f"{HOST}x: a\rb: c",
            f"{HOST}x: {'y' * 20_000}",
            HOST + "\r\n".join(f"x{i}: y" for i in range(3000)),
        )
    ),
    *(
        f"{line}\r\n{HOST}\r\n"
        for line in (
            "GET /v1/models",
            "GET  HTTP/1.1",
            "G(T / HTTP/1.1",
            "GET http://169.254.169.254/latest HTTP/1.1",
            "CONNECT evil.example:443 HTTP/1.1",
            "TRACE / HTTP/1.1",
            "GET ../../etc/passwd HTTP/1.1",
            "GET /../../etc/passwd HTTP/1.1",
            "GET /v1/files/..%252f..%252fetc%252fpasswd HTTP/1.1",
            "GET /v1/files/%00 HTTP/1.1",
            "GET /v1/files/.. HTTP/1.1",
            f"GET /v1/files/{'a' * 5000} HTTP/1.1",
            f"GET /{'a' * 20_000} HTTP/1.1",
            "GET /v1/jobs/%ff%fe HTTP/1.1",
            "GET /v1/jobs/..%2f..%2fsecret HTTP/1.1",
            "GET /v1/videos/..%2f..%2fetc/content HTTP/1.1",
            "DELETE /v1/videos/%2e%2e%2f%2e%2e HTTP/1.1",
            "GET /v1/models//etc/passwd HTTP/1.1",
            "GET /v1/models/../../etc/passwd HTTP/1.1",
            "GET /v1/models/%2e%2e%2fetc HTTP/1.1",
            "GET /admin/models HTTP/1.1",
            "GET /admin/../admin/models HTTP/1.1",
        )
    ),
    "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + "\x00" * 600 + "\r\n\r\n",
]
FIELDS = [  # JSON beside the prompt
    *(f'"model": {json.dumps(name)}' for name in ("../../etc", "file:///etc", "http://evil.example/", "toy\0", "%2e")),
    *(f'"lora": {json.dumps(name)}' for name in ("../style", "style.safetensors", "style\0", "STYLE", "http://x/")),
    *(f'"{name}": "http://169.254.169.254/"' for name in ("image", "image_url", "url", "reference_url", "callback")),
    *(f'"{name}": "data:image/png;base64,AAAA"' for name in ("image", "mask", "input_reference")),
    *(f'"steps": {number}' for number in ("NaN", "Infinity", "1e400", "-1", "2.5", "9" * 400, "true")),
    *(f'"guidance": {number}' for number in ("-Infinity", "1e999")),
    '"n": 1e9',
    '"seed": -9223372036854775809',
    '"__class__": "os.system"',
    '"__proto__": {"n": 10}',
    '"lora": ' + "[" * 3000 + "]" * 3000,
    '"steps": 3, "steps": 0',
    '"prompt": ["never"]',
]
WEBP = file_of(np.zeros((64, 64, 3), np.uint8), "webp")


def _header(text: bytes, size: int | None = None) -> bytes:
    return (len(text) if size is None else size).to_bytes(8, "little") + text


IMAGES = [  # files that are no images to start from
    pickle.dumps(Bomb(Path("canary"))),
    file_of(kind="jpeg")[:300],
    file_of(kind="jpeg").replace(b"\x00\x06\x00\x0a", b"\xff\xdc\xff\xdc", 1),  # 65500 x 65500 pixels
    WEBP[:-20],
    b"RIFF\x1a\0\0\0WEBPVP8L\x0d\0\0\0\x2f\xff\xff\xff\x0f" + bytes(9),  # 16384 x 16384 pixels
    file_of()[:33] + _chunk(b"zTXt", b"x\0\0" + zlib.compress(bytes(2_000_000))) + file_of()[33:],
    file_of()[:33] + _chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(2_000_000))) + file_of()[33:],
    b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
    b"%!PS-Adobe-3.0 EPSF-3.0\n(/etc/passwd) (r) file\n",
    b"II*\0\x08\0\0\0" + bytes(200),
    _header(b"{}", 2**63),
    _header(b"{", 10**9),
    _header(b"[" * 90_000),
    _header(b'{"image": {"dtype": "U8", "shape": [9, 9, 3], "data_offsets": [0, 9999999]}}') + bytes(243),
    _header(b'{"image": {"dtype": "U8", "shape": [9, 9, 3], "data_offsets": [-243, 0]}}') + bytes(243),
    _header(b'{"image": {"dtype": "U8", "shape": [4294967296, 4294967296, 3], "data_offsets": [0, 0]}}'),
    save({"image": np.zeros((0, 9, 3), np.uint8)}),
    save({"image": np.zeros((9, 9, 4), np.uint8)}),
    save({"image": np.zeros((9, 9, 3), np.float32)}),
    save({"image": PIXELS, "other": PIXELS}),
]


def _told(port: int, text: bytes) -> bytes:
    """The beginning of the answer to a text; b"" if the server closes the connection."""
    with socket.create_connection(("127.0.0.1", port), LIMIT_S) as line, suppress(ConnectionError):
        line.sendall(text)
        return line.recv(12)
    return b""


def test_attacks_are_refused(front: Running) -> None:
    """And nothing reaches the ranks, nothing is unpickled, and the server stays as it was."""
    assert {
        _told(front.port, f"{POST}content-length: 19\r\n\r\n{WHOLE}".encode()),
        _told(front.port, (CHUNKED + CHUNKS).encode()),
    } == {b"HTTP/1.1 200"}
    before = len(front.heard)
    for text in TEXTS:
        told = _told(front.port, text.encode("latin-1"))
        assert told[:10] in (b"", b"HTTP/1.1 4"), (told, text[:200])
    for fields in FIELDS:
        body = f'{{"prompt": "never", {fields}}}'
        answer = front.http.post(GENERATIONS, content=body, headers={"content-type": JSON})
        assert answer.status_code in (400, 404), (answer.text, body[:200])
    for image in IMAGES:
        answer = front.http.post(EDITS, data={"prompt": "x"}, files=[("image", image)])
        check(answer, 400, "image 1")
    parts = b"".join(b'--x\r\ncontent-disposition: form-data; name="a%d"\r\n\r\n\r\n' % i for i in range(5000))
    long = b'--x\r\ncontent-disposition: form-data; name="' + b"y" * 10**6 + b'"\r\n\r\n\r\n--x--'
    for body in (parts + b"--x--", long, b"--x\r\nx\r\n\r\n--x--", parts[:50]):
        assert front.http.post(EDITS, content=body, headers={"content-type": BROKEN_FORM}).status_code == 400
    assert len(TEXTS) + len(FIELDS) + len(IMAGES) + 4 >= 100
    assert len(front.heard) == before
    assert not Path("canary").exists()
    assert front.http.get("/ready").status_code == 200
    assert front.http.post(GENERATIONS, json={"prompt": "after attacks"}).status_code == 200
