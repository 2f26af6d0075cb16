"""The page at `/` in a real browser: its form, requests and images, and that nothing in it becomes markup."""

from __future__ import annotations

import base64
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.common.exceptions import JavascriptException
from selenium.webdriver import Chrome, Keys

from seqpar.cli.args import Args
from seqpar.serve.api.app import PAGE
from seqpar.serve.api.gate import GENERATIONS
from seqpar.types.flags import parsed
from tests.serve.test_stream import enlarged
from tests.support.browser import Page, browser, why_no_browser
from tests.support.fake_replica import pixels_of
from tests.support.front import ROOT, Running, keys_in, opened, running, until

pytestmark = [pytest.mark.slow, pytest.mark.whole]
MARKUP = """<img src=x onerror="document.title='run'"><script>document.title='run'</script>"""
NEW_LINE = Keys.SHIFT + Keys.ENTER + Keys.NULL
ODD = f'two\nlines, it\'s "$HOME" `id` \\ {MARKUP}'  # special characters of shells and JSON
FORBIDDEN = re.compile(
    r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|Function\(|<[^>]*\son\w+=|//\w+\.\w"
)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    if (reason := why_no_browser()) is not None:
        pytest.skip(reason)
    with browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture
def empty(driver: Chrome) -> Iterator[Page]:
    """The browser; its console must have no message at the end."""
    page = Page(driver)
    yield page
    assert page.messages() == []


@pytest.fixture
def page(empty: Page, front: Running) -> Page:
    """The page of fake ranks."""
    empty.open(front.url)
    return empty


def pixels(file: bytes) -> bytes:
    return opened(file).convert("RGB").tobytes() if file else b""


def requested(front: Running, **body: Any) -> bytes:
    """The file of an image that is requested without the page."""
    return base64.b64decode(front.http.post(GENERATIONS, json=body).json()["data"][0]["b64_json"])


def test_the_answer_allows_nothing_but_its_own_script(front: Running) -> None:
    answer = front.http.get("/")
    rules = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    for name in ("default-src", "base-uri", "form-action", "frame-ancestors", "trusted-types"):
        assert rules.pop(name) == "'none'"
    assert all(re.fullmatch(r"'sha256-[\w+/]{43}='", rules.pop(f"{name}-src")) for name in ("script", "style"))
    assert rules == {"img-src": "data:", "connect-src": "'self'", "require-trusted-types-for": "'script'"}
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert FORBIDDEN.findall(answer.text.replace("http://www.w3.org/2000/svg", "")) == []
    assert FORBIDDEN.search('<b onclick="x">')
    assert FORBIDDEN.search("fetch('https://example.org/x')")
    assert f'"serve/api/{PAGE}"' in (ROOT / "pyproject.toml").read_text()  # it is packaged


def test_it_offers_what_the_models_support(page: Page) -> None:
    assert page.driver.switch_to.active_element == page["prompt"]
    # no models that generate videos or require an image
    assert page.offers("model") == ["toy", "other", "editor", "strict", "breeds"]
    assert page.offers("size") == ["16x24", "40x24"]
    assert page["loras"].text.split("\n")[1:] == ["style", "lines"]
    page.choose("model", "other")
    assert page.offers("size") == ["16x24"]
    assert not page.shows("loras")
    assert not page.shows("classes")
    fields = page.driver.find_elements("css selector", "#form :is(input, select, textarea, button)")
    assert all(field.accessible_name for field in fields if field.is_displayed())


def test_previews_are_shown_until_the_image_is_made(page: Page, front: Running) -> None:
    page.choose("size", "40x24")
    style, scale, *_ = page["loras"].find_elements("tag name", "input")
    style.click()
    scale.clear()
    scale.send_keys("0.5")
    page.ask("hold growing", seed=5, steps=3, guidance=2.5)
    page.until(lambda: pixels(page.file) == enlarged(5, 2, (24, 40)))
    assert (page["step"].text, page["progress"].get_attribute("value")) == ("step 1 of 3", "1")
    assert not page.shows("made")
    front.release("growing")
    page.until(lambda: page.shows("made"))
    assert pixels(page.file) == pixels_of(5, 24, 40)
    assert not page.shows("doing")
    assert page["about-picture"].text == "toy · 40x24 · seed 5 · 3 steps · guidance 2.5 · style x 0.5 · 9.0 s"
    order, fields = front.orders[-1], {"prompt": "hold growing", "seed": 5, "steps": 3, "guidance": 2.5}
    assert {**order, **fields, "size": [24, 40], "loras": [["style", 0.5]], "partial_images": 3} == order
    assert page.file == requested(front, **fields, size="40x24", lora=[{"name": "style", "scale": 0.5}])


def test_a_prompt_with_markup_stays_text(page: Page) -> None:
    page.make(MARKUP)
    assert page["caption"].text == MARKUP
    assert page.driver.title == "seqpar"
    assert page.driver.find_elements("css selector", "img[src=x], main script") == []


def test_markup_by_a_script_is_refused_and_the_console_says_so(page: Page) -> None:
    """Negative control: messages of the console are seen, and the policy holds."""
    with pytest.raises(JavascriptException, match="TrustedHTML"):
        page.driver.execute_script("document.body.innerHTML = '<b>'")
    page.driver.execute_script("document.body.style.setProperty('background', 'url(http://127.0.0.1:9/x)')")
    page.until(lambda: any("Content Security Policy" in line["message"] for line in page.messages()))


def copied(page: Page, name: str) -> str:
    """The text that a button copies into the clipboard, or, where the browser denies this, selects."""
    button = page.driver.find_element("css selector", f"[data-copies={name}]")
    texts = list[str]()
    for grants, label, script in (
        ([], "Press Ctrl+C", "return getSelection().toString()"),
        (["clipboardReadWrite", "clipboardSanitizedWrite"], "Copied", "return navigator.clipboard.readText()"),
    ):
        page.driver.execute_cdp_cmd("Browser.grantPermissions", {"permissions": grants})
        button.click()
        page.until(lambda label=label: button.text == label)
        texts.append(page.driver.execute_script(script))
    assert texts[0] == texts[1]
    return texts[0]


def test_the_lines_to_copy_make_the_same_image(page: Page, tmp_path: Path) -> None:
    page["loras"].find_element("tag name", "input").click()
    page.choose("size", "40x24")
    page.make(ODD.replace("\n", NEW_LINE), seed=7, guidance=1.5)
    assert page["caption"].text == ODD
    command, curl = (copied(page, name) for name in ("command", "curl"))
    subprocess.run(["bash", "-e", "-o", "pipefail", "-c", curl], cwd=tmp_path, check=True)
    assert (tmp_path / "seqpar.png").read_bytes() == page.file
    script, variables = f'seqpar() {{ printf "%s\\0" "$@"; }}; {command}', {**os.environ, "LORAS": "/folder"}
    shell = subprocess.run(["bash", "-c", script], env=variables, check=True, capture_output=True, text=True)
    subcommand, *words = shell.stdout.split("\0")[:-1]
    loras = ("/folder/style.safetensors:1",)
    expected = Args("toy", prompt=(ODD,), size="24x40", seed=7, guidance=1.5, lora=loras, ranks=2)
    assert (subcommand, parsed(Args, words, "sample")) == ("sample", expected)


def test_a_waiting_request_shows_its_position(page: Page, front: Running) -> None:
    body = {"prompt": "hold place", "stream": True, "partial_images": 1}
    with front.http.stream("POST", GENERATIONS, json=body):
        until(lambda: "hold place" in front.prompts)
        page.ask("after it")
        page.until(lambda: page["step"].text.startswith("1 request before this one, ready in about "))
        front.release("place")
        page.until(lambda: page.shows("made"))


def test_escape_cancels_and_the_next_image_is_made(page: Page, front: Running) -> None:
    before = len(front.prompts)
    page.ask("wait")
    until(lambda: front.prompts[before:] == ["wait"])
    page["prompt"].send_keys(Keys.ESCAPE)
    page.until(lambda: page["status"].text == "Cancelled.")
    assert page.history == []
    until(lambda: front.jobs()[-1]["state"] == "cancelled")
    page.make("after")
    assert not page.shows("problem")
    page.ask("mistake")
    page.until(lambda: page["problem"].text == "got a prompt that asks for a mistake")
    assert page["caption"].text == "after"  # which is shown again


def test_the_history_shows_images_again_and_fills_the_form(page: Page) -> None:
    page.make("first", seed=1, steps=2)
    page.make("second", seed=2, steps="")
    second, first = page.history
    first.send_keys(Keys.ENTER)
    assert (page["caption"].text, pixels(page.file)) == ("first", pixels_of(1, 24, 16))
    assert [button.get_attribute("aria-current") for button in (second, first)] == ["false", "true"]
    page["reuse"].click()
    assert [page[name].get_attribute("value") for name in ("prompt", "seed", "steps")] == ["first", "1", "2"]


def test_nothing_is_wider_than_the_window(page: Page) -> None:
    page.make("x" * 300, seed=2**53 - 1)
    for size in ((1280, 900), (390, 844)):
        page.look(*size)
        assert page.driver.execute_script("return document.documentElement.scrollWidth") == size[0]


def test_keys_stay_in_the_tab_and_loading_ranks_are_waited_for(empty: Page, tmp_path: Path) -> None:
    page, slow = empty, tmp_path / "slow-start"
    slow.touch()
    with running(tmp_path, "--keys", keys_in(tmp_path), wait=False) as front:
        page.driver.get(front.url)
        page.until(lambda: page.shows("unlock"))
        assert page["key"].get_attribute("type") == "password"
        page["key"].send_keys("wrong", Keys.ENTER)
        page.until(lambda: page["refused"].text == "This server does not know that key.")
        page["key"].send_keys("key-of-ada", Keys.ENTER)
        page.until(lambda: page["server"].text == "The ranks load their models.")
        assert not page.shows("unlock")
        slow.unlink()
        page.until(lambda: page.shows("form"))
        page.make("a cat", seed=3)
        assert pixels(page.file) == pixels_of(3, 24, 16)
        assert '"authorization: Bearer $SEQPAR_KEY"' in page["curl"].text
        *stored, html = page.driver.execute_script(
            "return [document.cookie, localStorage.length, document.body.outerHTML]"
        )
        assert (stored, "key-of-ada" in html) == (["", 0], False)
    refused = [line["message"] for line in page.messages()]
    assert all("/v1/models - Failed to load resource" in line for line in refused)
    assert [re.findall(" status of ([0-9]+)", line) for line in refused[:3]] == [["401"], ["401"], ["503"]]


def test_a_real_model_is_cancelled_and_makes_the_image_that_other_clients_get(empty: Page, tmp_path: Path) -> None:
    """test_ranks.py compares the bits of a server's ranks with the command's."""
    page = empty
    with running(tmp_path, "builtin", "--ranks", "1", fake=False) as front:
        page.open(front.url)
        assert page["server"].text == "1 rank on the CPU"
        assert page.offers("size")[:3] == ["64x64", "72x56", "56x72"]
        assert {"cat", "ice cream"} < set(page.offers("class"))
        assert not page.shows("texts")
        page.choose("class", "ice cream")
        page.fill(steps=900)
        page["generate"].click()
        page.until(lambda: page["step"].text.startswith("step "))
        assert page.driver.switch_to.active_element == page["cancel"]
        page["cancel"].click()
        page.until(lambda: page["status"].text == "Cancelled.")
        until(lambda: 'seqpar_jobs_total{end="cancelled"} 1.0' in front.http.get("/metrics").text)
        page.choose("size", "56x72")
        page.fill(steps=6, seed=3)
        page["seed"].send_keys(Keys.ENTER)
        page.until(lambda: page.shows("made"))
        assert page.file == requested(front, model="builtin", prompt="ice cream", size="56x72", steps=6, seed=3)
        assert (len(page.history), opened(page.file).size) == (1, (56, 72))
        assert page["command"].text.endswith("--classes='ice cream' --size=72x56 --seed=3 --steps=6 --ranks=1")
