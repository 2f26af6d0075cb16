"""Other people's clients: the requests that they send, as recorded, and the packages themselves where they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from seqpar.loading.names import BUILTIN
from seqpar.serve.api.gate import GENERATIONS, VIDEOS
from tests.support import clients
from tests.support.front import LIMIT_S, Running, running, until

# requests.jsonl: raw bodies, recorded by tests/support/clients.py, or in the shape that the pages of SGLang and
# vLLM-Omni describe; `ranks` is what must reach the ranks, `ignored` what the answer names
RECORDED = [json.loads(line) for line in Path(__file__).with_name("requests.jsonl").read_text().splitlines()]

PACKAGES = {"langchain": "langchain_community", "litellm_config": "litellm", "stream": "openai"}
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "GRADIO_ANALYTICS_ENABLED": "False"}


def replayed(front: Running, row: dict[str, Any], *, named: str | None = None) -> Any:
    """The answer to a recorded request. named: in place of the model's name."""
    body = row["body"] if named is None else row["body"].replace('"toy"', f'"{named}"')
    answer = front.http.post(row["path"], content=body.encode("latin-1"), headers={"content-type": row["type"]})
    assert answer.status_code == 200, (row["client"], answer.text)
    assert answer.headers.get("x-ignored", "") == ", ".join(row["ignored"])
    if answer.headers["content-type"] == "image/png":
        return answer.content
    if answer.headers["content-type"].startswith("text/event-stream"):
        return json.loads(answer.text.rpartition("data: ")[2])
    assert answer.json().get("warnings", []) == [f"{name} is ignored" for name in row["ignored"]]
    return answer.json()


def test_recorded_requests_reach_the_ranks(front: Running) -> None:
    for row in RECORDED:
        answer = replayed(front, row)
        if row["path"] == VIDEOS:
            until(lambda id_=answer["id"]: front.http.get(f"{VIDEOS}/{id_}").json()["status"] == "completed")
        order = front.orders[-1]
        assert {**order, **row["ranks"]} == order, row["client"]
        if order["model"] == "dall-e-2":
            assert front.http.get(answer["data"][0]["url"]).status_code == 200


def test_models_by_name_and_by_kind_of_request(front: Running) -> None:
    assert front.ai.models.retrieve("toy").id == "toy"
    assert front.http.get("/v1/models/a/b").json()["error"]["code"] == "model_not_found"


def test_settings_of_open_webui() -> None:
    """With the example as its settings it sent the recorded request."""
    lines = (clients.EXAMPLES / "open-webui.env").read_text().splitlines()
    settings = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    assert (settings["IMAGE_GENERATION_ENGINE"], settings["IMAGES_OPENAI_API_BASE_URL"][-3:]) == ("openai", "/v1")
    body = {"prompt": "a green frog", "n": 1, "size": settings["IMAGE_SIZE"], "response_format": "b64_json"}
    body |= {"model": "toy", **json.loads(settings["IMAGES_OPENAI_PARAMS"])}
    assert body in [json.loads(row["body"]) for row in RECORDED if row["path"] == GENERATIONS]


@pytest.mark.whole
@pytest.mark.hand
@pytest.mark.slow
def test_recorded_requests_make_images_of_the_built_in_model(tmp_path: Path) -> None:
    """A prompt without a model goes to the model of texts, though another one is first; no path becomes public."""
    folder = str(BUILTIN)
    with running(tmp_path, folder, "builtin-text", "--name", "frog=builtin-text", fake=False) as server:
        assert [model.id for model in server.ai.models.list()] == [Path(folder).name, "frog"]
        fields = {"model": Path(folder).name, "prompt": "cat", "true_guidance": 3}
        said = server.http.post(GENERATIONS, json=fields).text
        assert Path(folder).name in said
        assert folder not in said + server.http.get("/v1/models").text
        bodies = [row for row in RECORDED if row["path"] == GENERATIONS]
        rows = [row for row in bodies if "lora" not in row["body"] and "dall-e" not in row["body"]]
        for row in {row["client"]: row for row in rows}.values():
            assert replayed(server, row, named="frog"), row["client"]
        assert {job["model"] for job in server.jobs()} == {"frog"}


@pytest.mark.whole
@pytest.mark.parametrize("client", ["openai", "npm", "langchain", "litellm", "litellm_config", "gradio", "stream"])
def test_clients_work_unchanged(client: str, tmp_path: Path) -> None:
    """CLIENTS_PYTHON: a Python that has the packages, in place of this one; NODE_PATH: a folder with those of npm."""
    python = os.environ.get("CLIENTS_PYTHON", sys.executable)
    package = PACKAGES.get(client, client)
    command = [python, clients.__file__, client]
    if client == "npm":
        command, probe = ["node", str(Path(clients.__file__).with_suffix(".mjs"))], ["node", "-e", "require('openai')"]
    else:
        probe = [python, "-c", f"import importlib.util as u; raise SystemExit(u.find_spec('{package}') is None)"]
    try:
        missing = subprocess.run(probe, capture_output=True, timeout=LIMIT_S).returncode
    except FileNotFoundError:
        missing = True
    if missing:
        pytest.skip(f"{package} is not installed")
    with running(tmp_path) as front:
        how: dict[str, Any] = {"cwd": tmp_path, "env": {**os.environ, **OFFLINE}, "timeout": LIMIT_S}
        done = subprocess.run([*command, front.url], capture_output=True, text=True, **how)
        assert done.returncode == 0, done.stderr[-2000:]
