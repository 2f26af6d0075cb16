"""Headless Chromium by its WebDriver, and the page of `seqpar serve` in it."""

from __future__ import annotations

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
SAVED = "saved"  # a folder in that of a browser's profile
PIXELS = """
const image = document.getElementById("picture"), canvas = document.createElement("canvas");
[canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
if (image.hidden || canvas.width === 0) return [];
const context = canvas.getContext("2d");
context.drawImage(image, 0, 0);
return [...context.getImageData(0, 0, canvas.width, canvas.height).data].filter((_, index) => index % 4 < 3);
"""
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
    options.add_experimental_option("prefs", {"download.default_directory": os.fspath(folder / SAVED)})
    with Chrome(options, Service(driver)) as started:
        yield started


@dataclass(frozen=True)
class Page:
    """The page in a browser. folder: of its profile."""

    driver: Chrome
    folder: Path

    def open(self, url: str) -> None:
        """Open the page of a server, of which the browser remembers nothing, and wait for its form."""
        self.driver.get("about:blank")
        self.driver.execute_cdp_cmd("Storage.clearDataForOrigin", {"origin": url, "storageTypes": "all"})
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

    def pick(self, name: str, file: Path) -> None:
        """Choose a file, and wait until the form lists it."""
        count = len(self.driver.find_elements("css selector", ".inputs img"))
        self[name].send_keys(os.fspath(file))
        self.until(lambda: len(self.driver.find_elements("css selector", ".inputs img")) > count)

    def ask(self, prompt: str, **texts: object) -> None:
        """Fill fields and press Enter in the prompt."""
        self.fill(**texts, prompt=prompt)
        self["prompt"].send_keys(Keys.ENTER)

    def make(self, prompt: str, **texts: object) -> None:
        """Fill fields, press Enter, and wait for the image or video."""
        count = len(self.history)
        self.ask(prompt, **texts)
        self.until(lambda: len(self.history) > count and not self.jobs)

    def saved(self) -> bytes:
        """The file of the result in the frame, by its link."""
        file = self.folder / SAVED / str(self["save"].get_attribute("download"))
        file.unlink(missing_ok=True)
        self["save"].click()
        self.until(file.exists)  # it appears whole
        return file.read_bytes()

    @property
    def pixels(self) -> bytes:
        """The image in the frame as rows of RGB bytes; empty if there is none."""
        return bytes(self.driver.execute_script(PIXELS))

    @property
    def history(self) -> list[WebElement]:
        """The buttons of results, newest first."""
        return self["history"].find_elements("tag name", "button")

    @property
    def images(self) -> list[str | None]:
        """Names of the form's input images."""
        return [image.get_attribute("alt") for image in self["inputs"].find_elements("tag name", "img")]

    @property
    def jobs(self) -> list[str]:
        """Texts of the queue, a prompt and what is said of it each."""
        return self.driver.execute_script("return [...document.querySelectorAll('#jobs li')].map((x) => x.innerText)")

    def press(self, text: str, prompt: str) -> None:
        """Press a button of a prompt in the queue."""
        self["jobs"].find_element("css selector", f"[aria-label='{text}: {prompt}']").click()

    def messages(self) -> list[dict[str, Any]]:
        return self.driver.get_log("browser")

    def look(self, width: int, height: int, scheme: str = "light") -> None:
        """Set the size of the window's content in pixels, and whether the user prefers light or dark."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
