"""Headless Chromium by its WebDriver, and the page of `seqpar serve` in it."""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selenium.webdriver import Chrome, ChromeOptions, Keys
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select, WebDriverWait

LIMIT_S = 60.0  # for what takes milliseconds unless the machine is busy
PROGRAMS = ("chromium", "chromedriver")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")


def why_no_browser() -> str | None:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"needs {' and '.join(missing)} in PATH" if missing else None


@contextmanager
def browser(folder: Path) -> Generator[Chrome]:
    """Start a browser whose profile is in a folder, and which keeps the messages of its console."""
    chromium, driver = map(shutil.which, PROGRAMS)
    options = ChromeOptions()
    options.binary_location = str(chromium)
    for flag in (*FLAGS, f"--user-data-dir={os.fspath(folder)}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with Chrome(options, Service(driver)) as started:
        yield started


@dataclass(frozen=True)
class Page:
    """The page in a browser."""

    driver: Chrome

    def open(self, url: str) -> None:
        """Open the page of a server and wait for its form."""
        self.driver.get(url)
        self.until(lambda: self.shows("form"))

    def until(self, holds: Callable[[], object]) -> None:
        WebDriverWait(self.driver, LIMIT_S, 0.02).until(lambda _: holds())

    def __getitem__(self, name: str) -> WebElement:
        return self.driver.find_element("id", name)

    def shows(self, name: str) -> bool:
        return self[name].is_displayed()

    def choose(self, name: str, text: str) -> None:
        Select(self[name]).select_by_visible_text(text)

    def offers(self, name: str) -> list[str]:
        return [str(option.text) for option in Select(self[name]).options]

    def fill(self, **texts: object) -> None:
        """Write into fields, in place of what they hold."""
        for name, text in texts.items():
            self[name].clear()
            self[name].send_keys(str(text))

    def ask(self, prompt: str, **texts: object) -> None:
        """Fill fields and press Enter in the prompt."""
        self.fill(**texts, prompt=prompt)
        self["prompt"].send_keys(Keys.ENTER)

    def make(self, prompt: str, **texts: object) -> None:
        """Fill fields, press Enter, and wait for the image."""
        count = len(self.history)
        self.ask(prompt, **texts)
        self.until(lambda: len(self.history) == count + 1 and self.shows("made"))

    @property
    def file(self) -> bytes:
        """The file of the image in the frame; empty if there is none."""
        return base64.b64decode((self["picture"].get_attribute("src") or "").partition(";base64,")[2])

    @property
    def history(self) -> list[WebElement]:
        """The buttons of the images of this visit, newest first."""
        return self["history"].find_elements("tag name", "button")

    def messages(self) -> list[dict[str, Any]]:
        return self.driver.get_log("browser")

    def look(self, width: int, height: int, scheme: str = "light") -> None:
        """Set the size of the window's content in pixels, and whether the user prefers light or dark."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
