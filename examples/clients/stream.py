"""Images of several prompts at the same time, with previews as they are made, by OpenAI's client (pip install openai).

python examples/clients/stream.py http://localhost:8000 "a green frog" "a red fox"
"""

from __future__ import annotations

import asyncio
import base64
import os
import sys
from pathlib import Path

from openai import AsyncOpenAI


async def generate(client: AsyncOpenAI, prompt: str, name: str) -> None:
    events = await client.images.generate(prompt=prompt, stream=True, partial_images=2)
    async for event in events:
        is_preview = event.type == "image_generation.partial_image"
        file = Path(f"{name}-preview.png" if is_preview else f"{name}.png")
        file.write_bytes(base64.b64decode(event.b64_json))
        print(f"{prompt}: {file}")


async def main(url: str, prompts: list[str]) -> None:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=os.environ.get("SEQPAR_KEY", "none"))
    async with client, asyncio.TaskGroup() as tasks:
        for number, prompt in enumerate(prompts):
            tasks.create_task(generate(client, prompt, f"image{number}"))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2:]))
