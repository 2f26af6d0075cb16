"""Writes docs/page-*.webp: what the page of `seqpar serve` looks like with a picture of the built-in model of texts.

    python -m tests.support.page_pictures        # needs Chromium and its WebDriver
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

from PIL import Image
from selenium.webdriver import Chrome, Keys

from launch.benches.served import server, until_ready
from tests.support.browser import browser, look, page_of, shown, waiting

DOCS = Path(__file__).parents[2] / "docs"
LORAS = Path(__file__).parents[2] / "seqpar" / "assets"  # with outline.safetensors
PROMPTS = ("a blue frog on yellow", "a red car on white", "a green frog")
WIDE, NARROW = (1280, 900), (390, 844)
QUALITY = 90


def main() -> None:
    """Make pictures in the page, and write what it looks like at two widths, light and dark."""
    with (
        tempfile.TemporaryDirectory() as profile,
        server(("builtin-text", "builtin"), 2, ("--loras", str(LORAS))) as (process, port, _),
        browser(Path(profile)) as driver,
    ):
        until_ready(port)
        page_of(driver, f"http://127.0.0.1:{port}")
        for seed, prompt in enumerate(PROMPTS):
            _make(driver, prompt, seed)
        for scheme in ("light", "dark"):
            for width, height in (WIDE, NARROW):
                look(driver, width, height, scheme)
                _write(driver, DOCS / f"page-{width}-{scheme}.webp")
        process.terminate()


def _make(driver: Chrome, prompt: str, seed: int) -> None:
    for name, text in (("seed", str(seed)), ("prompt", prompt)):
        field = driver.find_element("id", name)
        field.clear()
        field.send_keys(text)
    driver.find_element("id", "prompt").send_keys(Keys.ENTER)
    waiting(driver).until(lambda _: shown(driver, "made") and driver.find_element("id", "caption").text == prompt)


def _write(driver: Chrome, file: Path) -> None:
    """Write the window; on a narrow one from the picture's top."""
    driver.execute_script("document.activeElement.blur()")
    is_wide = driver.execute_script("return innerWidth") >= WIDE[0]
    driver.execute_script("arguments[0].scrollIntoView()", driver.find_element("tag name", "header" if is_wide else "section"))
    Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB").save(file, quality=QUALITY, method=6)
    print(f"{file.name}: {file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
