"""The nodes for ComfyUI, with a stand-in of its protocol and a server with fake ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.comfy_nodes import Comfy, InterruptProcessingError, load_nodes
from tests.support.fake_replica import SIZE, pixels_of
from tests.support.front import PIXELS, Running, running, until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("ranks")) as started:
        yield started


@pytest.fixture
def comfy() -> Comfy:
    return Comfy()


@pytest.fixture
def nodes(comfy: Comfy, server: Running, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("SEQPAR_URL", server.url)
    return load_nodes(comfy)


def run(node: Any, **inputs: Any) -> Any:
    """The outputs of a node, one alone without a tuple; inputs that are left out have the schema's defaults."""
    sockets = node.define_schema().inputs
    defaults = {each.id: each.options["default"] for each in sockets if "default" in each.options}
    outputs = node.execute(**defaults | inputs).args
    return outputs[0] if len(outputs) == 1 else outputs


def image(seed: int, height: int = SIZE[0], width: int = SIZE[1]) -> np.ndarray:
    """What the fake ranks generate, as bytes."""
    return np.frombuffer(pixels_of(seed, height, width), np.uint8).reshape(height, width, 3)


def as_bytes(images_BHW3: torch.Tensor) -> np.ndarray:
    assert images_BHW3.dtype == torch.float32
    return np.clip(255.0 * images_BHW3.numpy(), 0, 255).astype(np.uint8)  # as ComfyUI writes a PNG


def test_generates_with_progress_and_previews(nodes: Any, comfy: Comfy, server: Running) -> None:
    model = run(nodes.Connect, model="toy")
    text, negative = run(nodes.TextNode, text="cats"), run(nodes.TextNode, text="dogs")
    made = run(nodes.Generate, model=model, positive=text, seed=5, batch_size=2, previews=1, width=40, height=24)
    assert (as_bytes(made) == np.stack([image(5, 24, 40), image(6, 24, 40)])).all()
    assert [value for value, total, shown in comfy.bar if shown is None and total == 8] == [*range(1, 9)]
    shown = [preview[1].size for _, _, preview in comfy.bar if preview is not None]
    assert shown == [(40, 24)] * 2
    order = server.orders[-1]
    assert (order["steps"], order["guidance"], order["negative_prompt"]) == (None, None, None)
    run(nodes.Generate, model=model, positive=text, negative=negative, steps=3, guidance=2.5)
    order = server.orders[-1]
    assert (order["steps"], order["guidance"], order["negative_prompt"], order["size"]) == (3, 2.5, "dogs", None)


def test_edits_arrays_without_loss(nodes: Any) -> None:
    given = torch.from_numpy(PIXELS.astype(np.float32) / 255.0)[None]
    made = run(
        nodes.Generate, model=run(nodes.Connect, model="editor"), positive=run(nodes.TextNode, text="red", images=given)
    )
    assert (as_bytes(made) == PIXELS).all()


def test_errors_are_the_servers(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = run(nodes.TextNode, text="mistake")
    with pytest.raises(RuntimeError, match="use one of toy, other"):
        run(nodes.Generate, model=run(nodes.Connect, model="none"), positive=text)
    with pytest.raises(RuntimeError, match="asks for a mistake"):
        run(nodes.Generate, model=run(nodes.Connect), positive=text)
    with pytest.raises(RuntimeError, match=r"does not answer .*start it with `seqpar serve`"):
        run(nodes.Generate, model=run(nodes.Connect, url="http://127.0.0.1:9"), positive=text)
    with pytest.raises(RuntimeError, match="no address of a server"):
        run(nodes.Generate, model=run(nodes.Connect, url="somewhere"), positive=text)


def test_an_interrupt_cancels_the_job(nodes: Any, comfy: Comfy, server: Running) -> None:
    comfy.interrupt = 1
    with pytest.raises(InterruptProcessingError):
        run(nodes.Generate, model=run(nodes.Connect), positive=run(nodes.TextNode, text="wait"))
    until(lambda: server.heard[-1]["type"] == "cancel")


def test_a_key_goes_to_one_address(nodes: Any, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQPAR_KEY", "secret")
    assert run(nodes.Connect).server.key == "secret"
    assert run(nodes.Connect, url="http://example.com").server.key is None
    assert "secret" not in repr(run(nodes.Connect))


def test_fingerprints_name_the_server(nodes: Any, server: Running) -> None:
    first = nodes.Connect.fingerprint_inputs("toy", "")
    assert first == nodes.Connect.fingerprint_inputs("toy", "")
    assert str(server.http.get("/v1/models").json()["data"][0]["created"]) in first
