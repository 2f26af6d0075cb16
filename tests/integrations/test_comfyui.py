"""The nodes for ComfyUI, with a stand-in of its protocol and a server with fake ranks."""

from __future__ import annotations

import ast
import importlib
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from seqpar.cli.main import command
from seqpar.pipelines.image_files import digest
from tests.loading.test_single_file import scaled
from tests.support import pipelines, single_files
from tests.support.comfy_nodes import NODES, Comfy, InterruptProcessingError, load_nodes
from tests.support.fake_replica import SIZE, pixels_of
from tests.support.front import CHILD, PIXELS, ROOT, RUN, Running, running, until


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


def repaint(nodes: Any, model: Any, **inputs: Any) -> None:
    run(nodes.Generate, model=model, positive=run(nodes.TextNode, text="drawn", **inputs))


def test_a_mask_says_what_is_repainted(nodes: Any, server: Running) -> None:
    given, mask = torch.from_numpy(PIXELS.astype(np.float32) / 255.0)[None], torch.zeros(1, *PIXELS.shape[:2])
    mask[..., 4:] = 1
    model = run(nodes.Connect, model="editor")
    repaint(nodes, model, images=given, mask=mask)
    order = server.orders[-1]
    assert order["mask"]["digest"] == digest((mask * 255).to(torch.uint8).numpy().tobytes())
    assert order["images"][0]["digest"] == digest(PIXELS.tobytes())
    for inputs, message in (
        ({"images": None}, "a mask needs one image"),
        ({"mask": torch.ones(2, *PIXELS.shape[:2])}, "an image one mask"),
        ({"mask": torch.zeros(1, 64, 64)}, "the mask selects nothing; paint it"),
        ({"mask": torch.ones(1, 64, 64)}, "mask of 64x64 pixels, expected the image's 10x6"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=message):
            repaint(nodes, model, **{"images": given, "mask": mask, **inputs})
    text, clip = run(nodes.TextNode, text="x", images=given, mask=mask), run(nodes.Connect, model="clip")
    with pytest.raises(ValueError, match="videos take no mask"):
        run(nodes.Video, model=clip, positive=text)


def test_a_controlnet_follows_an_image(nodes: Any, server: Running) -> None:
    image, model = torch.from_numpy(PIXELS.astype(np.float32) / 255.0)[None], run(nodes.Connect, model="editor")
    plain = run(nodes.TextNode, text="drawn")
    both = run(nodes.TextNode, text="drawn", images=image, mask=torch.ones(PIXELS.shape[:2]))

    def with_net(text: Any, **inputs: Any) -> Any:
        return run(nodes.ControlNode, **{"text": text, "name": "pose ", "image": image, "strength": 0.5, **inputs})

    controlled, latents = with_net(plain), {"samples": torch.zeros(1, 4, 5, 6)}
    for node in (nodes.Generate, nodes.Sample):
        run(node, model=model, positive=controlled)
        order = server.orders[-1]
        assert (order["controlnet"], order["control_scale"], order["images"]) == ("pose", 0.5, [])
        assert order["control"]["digest"] == digest(PIXELS.tobytes())
    run(nodes.Generate, model=model, positive=plain)
    assert server.orders[-1]["controlnet"] is None
    for node, text, more, message in (
        (nodes.Generate, with_net(plain, name="none"), {}, "controlnet 'none' is unknown; use pose"),
        (nodes.Generate, with_net(both), {}, "takes no controlnet with image and mask"),
        (nodes.Sample, controlled, {"denoise": 0.5, "latent_image": latents}, "no images or ControlNet in the text"),
        (nodes.Video, controlled, {}, "videos take no mask and no ControlNet"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=message):
            run(node, model=model, positive=text, **more)
    made = len(server.orders)
    for node in (nodes.Generate, nodes.Sample, nodes.Video):
        for negative in (controlled, both, run(nodes.TextNode, text="drawn", images=image)):
            with pytest.raises(ValueError, match="the negative text has images or a ControlNet, which have no effect"):
                run(node, model=model, positive=plain, negative=negative)
    assert len(server.orders) == made
    for text, inputs in ((controlled, {}), (plain, {"image": image.repeat(2, 1, 1, 1)})):
        with pytest.raises(ValueError, match="a text takes one ControlNet, which follows one image"):
            with_net(text, **inputs)


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


def test_samples_latents_and_decodes_them(nodes: Any, comfy: Comfy, server: Running) -> None:
    model, text = run(nodes.Connect, model="editor"), run(nodes.TextNode, text="cats")
    empty = {"samples": torch.zeros(2, 4, 5, 6)}
    made = run(nodes.Sample, model=model, positive=text, seed=7, sampler_name="dpmpp_2m", latent_image=empty)
    assert made["samples"].shape == (2, 4, 5, 6)
    assert [float(latent.mean()) for latent in made["samples"]] == [7, 8]
    order = server.orders[-1]
    assert (order["size"], order["scheduler"]) == ([40, 48], "DPMSolverMultistepScheduler")
    # a part of the noise: so many of more steps
    more = run(nodes.Sample, model=model, positive=text, seed=10, steps=6, denoise=0.6, latent_image=made)
    assert [float(latent.mean()) for latent in more["samples"]] == [17, 19]
    assert [(order["steps"], int(10 - 10 * order["strength"])) for order in server.orders[-2:]] == [(10, 4)] * 2
    images = run(nodes.Decode, model=model, samples=more)
    assert images.shape == (2, 40, 48, 3)
    assert [int(image[0, 0, 0]) for image in as_bytes(images)] == [17, 19]
    # sigmas
    run(nodes.Sample, model=model, positive=text, sigmas=torch.tensor([1.0, 0.5, 0.25, 0.0]))
    assert server.orders[-1]["sigmas"] == [1.0, 0.5, 0.25]
    run(nodes.Sample, model=model, positive=text, sigmas=torch.tensor([0.5, 0.25, 0.0]), latent_image=made)
    order = server.orders[-1]
    assert (order["sigmas"], order["strength"], order["steps"]) == ([0.5, 0.25], 1, None)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"sampler_name": "dpm_fast"}, "sampler dpm_fast has no counterpart; use one of default, euler, heun"),
    ({"scheduler": "karras"}, "scheduler karras has no counterpart; use one of default, simple, or SIGMAS"),
    ({"sigmas": torch.tensor([1.0, 0.5])}, "must end at 0"),
    ({"sigmas": torch.tensor([14.6, 0.0])}, "begin at 14.6, but those of flow matching are at most 1"),
    ({"sigmas": torch.tensor([1.0, 0.0]), "sampler_name": "heun"}, "stepped by euler; got sampler heun"),
    ({"denoise": 0.5}, "needs latents"),
    ({"latent_image": {"samples": torch.zeros(1, 4, 5, 6), "noise_mask": 1}}, "have a mask"),
]


@pytest.mark.parametrize(("inputs", "message"), REFUSED, ids=[message[:20] for _, message in REFUSED])
def test_what_has_no_counterpart_is_refused(nodes: Any, inputs: dict[str, Any], message: str) -> None:
    model, text = run(nodes.Connect, model="editor"), run(nodes.TextNode, text="cats")
    with pytest.raises(ValueError, match=message):
        run(nodes.Sample, model=model, positive=text, **inputs)


def test_a_model_without_latents_says_so(nodes: Any) -> None:
    model, empty = run(nodes.Connect, model="other"), {"samples": torch.zeros(1, 4, 5, 6)}
    with pytest.raises(RuntimeError, match="no latents in requests; use the node"):
        run(nodes.Sample, model=model, positive=run(nodes.TextNode, text="cats"), latent_image=empty)
    with pytest.raises(RuntimeError, match="other has no latents in requests; use images"):
        run(nodes.Decode, model=model, samples=empty)


def test_a_video_has_frames_and_sound(nodes: Any, server: Running) -> None:
    model, text = run(nodes.Connect, model="movie"), run(nodes.TextNode, text="cats")
    video, frames, audio = run(nodes.Video, model=model, positive=text, seed=3, frames=5, width=40, height=24)
    assert (as_bytes(frames) == np.stack([image(3 + index, 24, 40) for index in range(5)])).all()
    assert (audio["waveform"].shape, audio["sample_rate"]) == ((1, 2, 10), 24000)
    assert (video.made_of.frame_rate, video.made_of.images is frames) == (8, True)
    assert server.http.get("/v1/videos").json()["data"] == []
    given = torch.from_numpy(PIXELS.astype(np.float32) / 255.0)[None]
    run(nodes.Video, model=run(nodes.Connect, model="clip"), positive=run(nodes.TextNode, text="x", images=given))
    assert (server.orders[-1]["images"][0]["height"], server.orders[-1]["returns"]) == (6, "arrays")


def test_loras_are_sent_with_their_scales(nodes: Any, server: Running) -> None:
    model = run(nodes.Lora, model=run(nodes.Connect, model="toy"), name="style", strength=0.5)
    model = run(nodes.Lora, model=model, name="lines")
    run(nodes.Generate, model=model, positive=run(nodes.TextNode, text="cats"))
    assert server.orders[-1]["loras"] == [["style", 0.5], ["lines", 1.0]]


@pytest.mark.whole
def test_starts_one_server_at_a_time(nodes: Any, comfy: Comfy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = tmp_path / "said"
    program = (
        f"import sys\nopen({str(said)!r}, 'a').write(repr(sys.argv[1:]) + '\\n')\nsys.argv[1:2] = []\n"
        f"CHILD = {CHILD!r}\nif 'broken' in sys.argv: sys.exit('error: it is broken')\n{RUN}"
    )
    monkeypatch.setenv("SEQPAR_COMMAND", shlex.join([sys.executable, "-c", program]))
    monkeypatch.setenv("FAKE_FOLDER", str(tmp_path))
    monkeypatch.chdir(ROOT)
    pipeline, file, lora = tmp_path / "FLUX", tmp_path / "my flux.safetensors", tmp_path / "style.safetensors"
    (pipeline / "vae").mkdir(parents=True)
    for path in (pipeline / "model_index.json", file, lora):
        path.touch()
    comfy.folders = {"diffusion_models": {file.name: file}, "loras": {"my/style.safetensors": lora}}
    text, started = run(nodes.TextNode, text="cats"), importlib.import_module("seqpar_comfyui.started")
    try:
        model = run(nodes.Start, pipeline=str(pipeline), file=file.name, gpus=2, precision="fp8")
        assert said.exists() is False
        assert run(nodes.Generate, model=model, positive=text, seed=1).shape == (1, *SIZE, 3)
        assert run(nodes.Generate, model=model, positive=text, seed=2).shape == (1, *SIZE, 3)
        first = started.RUNNING[0]
        run(nodes.Generate, model=run(nodes.Lora, model=model, name="style"), positive=text)
        assert first.process.poll() == 0
        (words, again) = map(ast.literal_eval, said.read_text().splitlines())
        assert words[2:] == ["--ranks", "2", "--port", "0", "--precision", "fp8"]
        net = run(nodes.Start, pipeline=str(pipeline), controlnet=f"pose={tmp_path} ")
        run(nodes.Generate, model=net, positive=text)
        *_, last = map(ast.literal_eval, said.read_text().splitlines())
        assert last[-1] == f"--controlnet=pose={tmp_path}"
        assert [Path(x).name for x in (words[1], again[-1])] == ["my_flux.safetensors", "loras"]
        with pytest.raises(RuntimeError, match="has ended: it is broken"):
            run(nodes.Generate, model=run(nodes.Start, pipeline="broken"), positive=text)
        monkeypatch.setenv("SEQPAR_COMMAND", "/no/such/program")
        with pytest.raises(RuntimeError, match=r"cannot be started .*set SEQPAR_COMMAND"):
            run(nodes.Generate, model=run(nodes.Start, pipeline="x"), positive=text)
        with pytest.raises(RuntimeError, match="needs the folder of a pipeline"):
            run(nodes.Generate, model=run(nodes.Start, pipeline="x", file=file.name), positive=text)
    finally:
        started.stop()


@pytest.mark.whole
def test_a_scaled_file_is_served_by_real_ranks(
    nodes: Any, comfy: Comfy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image is that of `seqpar sample` with the weights that the file stands for."""
    pipe, pipeline = pipelines.sd3().to(torch.float32), tmp_path / "sd3"
    pipe.save_pretrained(pipeline)
    files = tmp_path / "scaled.safetensors", pipeline / "meant.safetensors"
    for file, state in zip(files, scaled(single_files.sd3(pipe.transformer), "a scale a weight"), strict=True):
        save_file(single_files.prefixed({key: tensor.contiguous() for key, tensor in state.items()}), file)
    comfy.folders = {"diffusion_models": {files[0].name: files[0]}}
    program = "from seqpar.cli.entry import main\nmain()"
    monkeypatch.setenv("SEQPAR_COMMAND", shlex.join([sys.executable, "-c", program]))
    monkeypatch.chdir(ROOT)
    started = importlib.import_module("seqpar_comfyui.started")
    try:
        model = run(nodes.Start, pipeline=str(pipeline), file=files[0].name)
        text = run(nodes.TextNode, text="a red cat")
        (made,) = as_bytes(run(nodes.Generate, model=model, positive=text, seed=3, steps=2, width=32, height=32))
    finally:
        started.stop()
    flags = ["--steps", "2", "--seed", "3", "--size", "32x32", "--prompt"]
    command(["sample", "--model", str(files[1]), *flags, "a red cat", "--out", str(tmp_path / "sd3.png")])
    with Image.open(tmp_path / "sd3.png") as image:
        assert (made == np.asarray(image.convert("RGB"))).all()


@pytest.mark.parametrize("path", sorted((NODES / "api_workflows").glob("*.json")), ids=lambda path: path.stem)
def test_workflows_have_the_inputs_of_the_nodes(nodes: Any, path: Path) -> None:
    schemas = {schema.node_id: schema for schema in (node.define_schema() for node in nodes.NODES)}
    shown = json.loads((NODES / "example_workflows" / path.name).read_text())
    flow = json.loads(path.read_text())
    assert {str(node["id"]): node["type"] for node in shown["nodes"]} == {
        number: node["class_type"] for number, node in flow.items()
    }
    for node in flow.values():
        if (schema := schemas.get(node["class_type"])) is not None:
            required = {each.id for each in schema.inputs if not each.options.get("optional")}
            assert required <= {*node["inputs"]} <= {each.id for each in schema.inputs}
