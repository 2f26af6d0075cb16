"""Writes docs/page-*.webp: what the page of `seqpar serve` looks like with images of the built-in model of texts.

python -m docs.tools.page_pictures        # needs Chromium and its WebDriver
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

from PIL import Image

from launch.benches.served import server, until_ready
from tests.support.browser import Page, browser

ROOT = Path(__file__).parents[2]
LORAS = ROOT / "seqpar_demo"  # with outline.safetensors
PROMPTS = ("a blue frog on yellow", "a red car on white", "a green frog")
SIZES = {(1280, 1140): "header", (390, 844): "section"}  # of the window, and what is at its top
LONG = 1000  # steps of the request in the queue
PAINTED = "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done)));"
QUALITY = 90


def main() -> None:
    """Generate images in the page, queue more, and write what it looks like at two widths, light and dark."""
    flags = ("--loras", str(LORAS))
    with tempfile.TemporaryDirectory() as profile, server(("builtin-text", "builtin"), 2, flags) as (process, port, _):
        until_ready(port)
        with browser(Path(profile)) as driver:
            page = Page(driver, Path(profile))
            page.look(*next(iter(SIZES)))
            page.open(f"http://127.0.0.1:{port}")
            for seed, prompt in enumerate(PROMPTS):
                page.make(prompt, seed=seed, n=2)
            driver.execute_script("document.getElementById('growing').click()")  # without previews the last image stays
            for prompt in ("a yellow car on blue", "a red frog"):
                page.ask(prompt, steps=LONG)
            page.fill(prompt=PROMPTS[-1], steps="")
            page.until(lambda: f"of {LONG}" in page.jobs[0])
            driver.execute_script("document.activeElement.blur()")
            for scheme in ("light", "dark"):
                for (width, height), top in SIZES.items():
                    page.look(width, height, scheme)
                    driver.execute_script("arguments[0].scrollIntoView()", driver.find_element("tag name", top))
                    driver.execute_async_script(PAINTED)
                    _write(driver.get_screenshot_as_png(), ROOT / "docs" / f"page-{width}-{scheme}.webp")
        process.terminate()
        process.wait()


def _write(screenshot: bytes, file: Path) -> None:
    Image.open(io.BytesIO(screenshot)).convert("RGB").save(file, quality=QUALITY, method=6)
    print(f"{file.name}: {file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
