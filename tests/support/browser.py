"""Headless Chromium by its WebDriver, for tests and pictures of the page; no network but that of this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

LIMIT_S = 60.0
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")


def why_no_browser() -> str | None:
    """Return what is missing for a browser, or None."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"needs {' and '.join(missing)} in PATH" if missing else None


@contextmanager
def browser(folder: os.PathLike[str]) -> Generator[webdriver.Chrome]:
    """Start a browser whose profile is in a folder, and which keeps what pages write into its console."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for flag in (*FLAGS, f"--user-data-dir={os.fspath(folder)}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def look(driver: webdriver.Chrome, width: int, height: int, scheme: str, scale: float = 1) -> None:
    """Set the size of the window's content in pixels, and whether the person prefers light or dark."""
    size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def waiting(driver: webdriver.Chrome) -> WebDriverWait[webdriver.Chrome]:
    """Return what waits for a condition, for long: conditions come in milliseconds unless the machine is busy."""
    return WebDriverWait(driver, LIMIT_S, 0.02)


def page_of(driver: webdriver.Chrome, url: str) -> None:
    """Open the page of a server and wait until it knows what it can offer."""
    driver.get(url)
    waiting(driver).until(lambda _: shown(driver, "form"))


def shown(driver: webdriver.Chrome, name: str) -> bool:
    """Return whether the element of an id is displayed."""
    return driver.find_element("id", name).is_displayed()
