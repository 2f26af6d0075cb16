"""A page with Gradio that shows previews while an image is made (pip install gradio openai).

python examples/clients/gradio_app.py http://localhost:8000
"""

from __future__ import annotations

import base64
import io
import os
import sys
from collections.abc import Iterator

import gradio  # pyright: ignore[reportMissingImports]
from openai import OpenAI
from PIL import Image


def app(url: str) -> gradio.Interface:
    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("SEQPAR_KEY", "none"))

    def generate(prompt: str, seed: float) -> Iterator[Image.Image]:
        more = {"seed": int(seed)}  # -1: a random one
        for event in client.images.generate(prompt=prompt, stream=True, partial_images=3, extra_body=more):
            yield Image.open(io.BytesIO(base64.b64decode(event.b64_json)))

    inputs = [gradio.Textbox(label="Prompt"), gradio.Number(-1, label="Seed", precision=0)]
    return gradio.Interface(generate, inputs, gradio.Image(label="Image"), flagging_mode="never", api_name="generate")


if __name__ == "__main__":
    app(sys.argv[1]).launch()
