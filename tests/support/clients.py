"""What people's clients do with a server, each in one function, and a recorder of what they send.

python -m tests.support.clients record OUT URL     # prints the address that clients use in place of URL
python tests/support/clients.py openai URL         # in an environment with the client; imports nothing of seqpar
"""

from __future__ import annotations

import base64
import io
import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

PNG = base64.b64decode(  # 6 x 10 pixels
    "iVBORw0KGgoAAAANSUhEUgAAAAYAAAAKCAIAAAAYbLhkAAAAEklEQVR4nGP4z8CAhtD5g1gIAGuIO8VagDEMAAAAAElFTkSuQmCC"
)
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "clients"
KEPT = ("content-type", "user-agent", "accept")  # headers of a recording
IMAGE: dict[str, Any] = {"model": "toy", "prompt": "a green frog", "size": "64x48"}
HINTS = {"quality": "high", "background": "opaque", "moderation": "low", "user": "someone", "style": "vivid"}


def openai(url: str) -> str:
    """The newest client, with every field that it has for images; videos by whichever version has them."""
    import inspect

    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    assert client.models.retrieve("toy").id in [model.id for model in client.models.list()]
    own: dict[str, Any] = {"n": 2, "output_format": "webp", "output_compression": 80}
    new = {"complexity": "low", "safety_identifier": "someone", "frame_count": 4, "frame_duration_ms": 100}
    new = {name: value for name, value in new.items() if name in inspect.signature(client.images.generate).parameters}
    made: Any = client.images.generate(**IMAGE, **own, **HINTS, **new, extra_body={"seed": 3, "steps": 2})  # pyright: ignore
    assert [image(data.b64_json) for data in made.data] == ["webp"] * 2
    assert {f"{name} is ignored" for name in (*HINTS, *new)} == {*made.warnings}
    events = [*client.images.generate(**IMAGE, stream=True, partial_images=1)]
    assert events[-1].type == "image_generation.completed", events
    lora = {"lora": {"name": "style", "scale": 0.5}}
    edit: Any = {"model": "editor", "prompt": "in red", "input_fidelity": "high"}
    client.images.edit(**edit, image=("a.png", PNG))
    client.images.edit(**edit, image=[("a.png", PNG), ("b.png", PNG)], extra_body=lora)
    if hasattr(client, "videos"):
        video = client.videos.create(model="movie", prompt="it jumps", seconds="4", size="64x48")  # pyright: ignore
        while client.videos.retrieve(video.id).status != "completed":
            time.sleep(0.05)
        assert client.videos.download_content(video.id).content
        assert client.videos.delete(video.id).deleted
    return openai.__version__


def litellm(url: str) -> str:
    from importlib.metadata import version

    import litellm  # pyright: ignore[reportMissingImports]

    to: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": "none"}
    made: Any = litellm.image_generation(**{**IMAGE, "model": "openai/toy"}, n=1, quality="high", **to)
    assert image(made.data[0].b64_json) == "png"
    made = litellm.image_edit(image=io.BytesIO(PNG), prompt="in red", model="openai/editor", **to)
    assert image(made.data[0].b64_json) == "png"
    video: Any = litellm.video_generation("it jumps", model="openai/movie", seconds="4", size="64x48", **to)
    while litellm.video_status(video.id, **to).status != "completed":  # pyright: ignore
        time.sleep(0.05)
    assert litellm.video_content(video.id, **to)
    return version("litellm")


def langchain(url: str) -> str:
    """Its wrapper reads a link, which OpenAI's models of this name returned."""
    from importlib.metadata import version

    from langchain_community.utilities import dalle_image_generator as dalle  # pyright: ignore[reportMissingImports]

    link = dalle.DallEAPIWrapper(api_key="none", base_url=f"{url}/v1", size="64x48").run("a green frog")
    assert urlopen(link).read(4) == b"\x89PNG", link
    return version("langchain-community")


def stream(url: str) -> str:
    """The example with an asynchronous client, in the working directory."""
    import runpy

    sys.argv = ["stream.py", url, "a green frog", "a red fox"]
    runpy.run_path(str(EXAMPLES / "stream.py"), run_name="__main__")
    files = [f"image{number}{kind}.png" for number in (0, 1) for kind in ("-preview", "")]
    assert sorted(path.name for path in Path().glob("*.png")) == files
    return "examples/clients/stream.py"


def gradio(url: str) -> str:
    """The example of a page, asked through its own interface."""
    import runpy

    import gradio  # pyright: ignore[reportMissingImports]
    from gradio_client import Client  # pyright: ignore[reportMissingImports]

    _, address, _ = runpy.run_path(str(EXAMPLES / "gradio_app.py"))["app"](url).launch(prevent_thread_lock=True)
    outputs = Client(address, verbose=False).submit("a green frog", 3, api_name="/generate")
    assert [Path(output).suffix for output in outputs][-1:] == [".webp"], outputs.outputs()
    return gradio.__version__


def litellm_config(url: str) -> str:
    """The example of a configuration, without the proxy that reads it."""
    import os

    import litellm  # pyright: ignore[reportMissingImports]
    import yaml

    os.environ.update(SEQPAR_URL=f"{url}/v1", SEQPAR_KEY="none")
    models = yaml.safe_load((EXAMPLES / "litellm.yaml").read_text())["model_list"]
    models[0]["litellm_params"]["model"] = "openai/toy"
    made: Any = litellm.Router(models).image_generation("a green frog", model=models[0]["model_name"])
    assert image(made.data[0].b64_json) == "png"
    return "examples/clients/litellm.yaml"


def image(text: str) -> str:
    """The kind of an image in base64."""
    file = base64.b64decode(text)
    return "png" if file[:4] == b"\x89PNG" else file[8:12].decode().lower()


def record(out: str, url: str) -> None:
    """Pass requests on, and append those with a body to a file of JSON lines."""

    class Recorder(BaseHTTPRequestHandler):
        def do(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            if body:
                line = {"path": self.path, "headers": {name: headers[name] for name in KEPT if name in headers}}
                with Path(out).open("a") as file:
                    file.write(json.dumps({**line, "body": body.decode("latin-1")}) + "\n")
            passed = {name: value for name, value in headers.items() if name not in ("host", "connection")}
            with urlopen(Request(url + self.path, body or None, passed, method=self.command)) as answer:
                self.send_response(answer.status)
                self.send_header("content-type", answer.headers["content-type"])
                self.end_headers()
                while chunk := answer.read1():
                    self.wfile.write(chunk)

        do_GET = do_POST = do_DELETE = do

    server = ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    name, *words = sys.argv[1:]
    print(globals()[name](*words))
