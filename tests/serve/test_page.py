"""The page at `/` in a real browser: what it offers, asks for and shows, and that nothing in it becomes markup."""

from __future__ import annotations

import base64
import io
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tyro
from PIL import Image
from selenium.common.exceptions import JavascriptException
from selenium.webdriver import Chrome, Keys

from seqpar.cli.args import Args
from seqpar.serve.api.app import PAGE
from seqpar.serve.ranks.checked import sizes_near
from tests.serve.test_stream import enlarged
from tests.support.browser import Page, browser, why_no_browser
from tests.support.fake_replica import pixels_of
from tests.support.front import ROOT, Running, running, until

pytestmark = [pytest.mark.slow, pytest.mark.whole]
PATH = "/v1/images/generations"
MARKUP = """<img src=x onerror="document.title='run'"><script>document.title='run'</script>"""
NEW_LINE = Keys.SHIFT + Keys.ENTER + Keys.NULL
ODD = f'two\nlines, it\'s "$HOME" `id` \\ {MARKUP}'  # what shells and JSON read in other ways
SAID = ("Press Ctrl+C", "Copied")
FORBIDDEN = re.compile(
    r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|Function\(|<[^>]*\son\w+=|//\w+\.\w"
)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """Return a browser for all tests of the file."""
    if (reason := why_no_browser()) is not None:
        pytest.skip(reason)
    with browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture
def empty(driver: Chrome) -> Iterator[Page]:
    """Return the browser; its console must have no message at the end."""
    page = Page(driver)
    yield page
    assert page.messages() == []


@pytest.fixture
def page(empty: Page, front: Running) -> Page:
    """Return the page of fake ranks; see `empty`."""
    empty.open(front.url)
    return empty


def opened(file: bytes) -> Image.Image:
    """Return the picture of a file."""
    return Image.open(io.BytesIO(file))


def pixels(file: bytes) -> bytes:
    """Return the pixels of a file; nothing of an empty one."""
    return opened(file).convert("RGB").tobytes() if file else b""


def asked(front: Running, body: dict[str, Any], key: str | None = None) -> bytes:
    """Return the file of a picture that is asked for without the page."""
    with front.http(key) as http:
        return base64.b64decode(http.post(PATH, json=body).json()["data"][0]["b64_json"])


def test_the_answer_allows_nothing_but_its_own_script(front: Running) -> None:
    with front.http() as http:
        answer = http.get("/")
    rules = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    for name in ("default-src", "base-uri", "form-action", "frame-ancestors", "trusted-types"):
        assert rules.pop(name) == "'none'"
    assert all(re.fullmatch(r"'sha256-[\w+/]{43}='", rules.pop(f"{name}-src")) for name in ("script", "style"))
    assert rules == {"img-src": "data:", "connect-src": "'self'", "require-trusted-types-for": "'script'"}
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert FORBIDDEN.findall(answer.text.replace("http://www.w3.org/2000/svg", "")) == []
    assert FORBIDDEN.search('<b onclick="x">')
    assert FORBIDDEN.search("fetch('https://example.org/x')")


def test_it_offers_what_the_models_can_do(page: Page) -> None:
    assert page.driver.switch_to.active_element == page["prompt"]
    assert page.offers("model") == ["toy", "other", "editor"]  # not what makes videos, or needs a picture
    assert page.offers("size") == ["16x24", "40x24"]
    assert page["loras"].text.split("\n")[1:] == ["style", "lines"]
    page.choose("model", "other")
    assert page.offers("size") == ["16x24"]
    assert not page.shows("loras")
    assert not page.shows("classes")
    fields = page.driver.find_elements("css selector", "#form :is(input, select, textarea, button)")
    assert all(each.accessible_name for each in fields if each.is_displayed())


def test_a_picture_grows_until_it_is_made(page: Page, front: Running) -> None:
    page.choose("size", "40x24")
    style, scale, *_ = page["loras"].find_elements("tag name", "input")
    style.click()
    scale.clear()
    scale.send_keys("0.5")
    page.ask("hold growing", seed=5, steps=3, guidance=2.5)
    page.until(lambda: pixels(page.file) == enlarged(5, 2, (24, 40)))
    assert (page["step"].text, page["progress"].get_attribute("value")) == ("step 1 of 3", "1")
    assert not page.shows("made")
    (front.folder / "growing").touch()
    page.until(lambda: page.shows("made"))
    assert pixels(page.file) == pixels_of(5, 24, 40)
    assert not page.shows("doing")
    assert page["about-picture"].text == "toy · 40x24 · seed 5 · 3 steps · guidance 2.5 · style x 0.5 · 9.0 s"
    order = next(each for each in front.heard if each.get("prompt") == "hold growing")
    facts = {"size": [24, 40], "seed": 5, "steps": 3, "guidance": 2.5, "loras": [["style", 0.5]], "partial_images": 3}
    assert {**order, **facts} == order
    body = {"prompt": "hold growing", "size": "40x24", "seed": 5, "steps": 3, "guidance": 2.5}
    assert page.file == asked(front, {**body, "lora": [{"name": "style", "scale": 0.5}]})


def test_a_prompt_with_markup_stays_text(page: Page) -> None:
    page.make(MARKUP)
    assert page["caption"].text == MARKUP
    assert page.driver.title == "seqpar"
    assert page.driver.find_elements("css selector", "img[src=x], main script") == []


def test_markup_by_a_script_is_refused_and_the_console_says_so(page: Page) -> None:
    """Which shows that the console's messages are seen, and that the policy holds."""
    with pytest.raises(JavascriptException, match="TrustedHTML"):
        page.driver.execute_script("document.body.innerHTML = '<b>'")
    page.driver.execute_script("document.body.style.setProperty('background', 'url(http://127.0.0.1:9/x)')")
    page.until(lambda: any("Content Security Policy" in each["message"] for each in page.messages()))


def copied(page: Page, name: str) -> str:
    """Return what a button copies, into the clipboard, or where the browser denies this by selecting it."""
    button = page.driver.find_element("css selector", f"[data-copies={name}]")
    read = ("return getSelection().toString()", "return navigator.clipboard.readText()")
    texts = list[str]()
    for grants, said, script in zip(([], ["clipboardReadWrite", "clipboardSanitizedWrite"]), SAID, read, strict=True):
        page.driver.execute_cdp_cmd("Browser.grantPermissions", {"permissions": grants})
        button.click()
        page.until(lambda said=said: button.text == said)
        texts.append(page.driver.execute_script(script))
    assert texts[0] == texts[1]
    return texts[0]


def test_the_lines_to_copy_make_the_same_picture(page: Page, tmp_path: Path) -> None:
    page["loras"].find_element("tag name", "input").click()
    page.choose("size", "40x24")
    page.make(ODD.replace("\n", NEW_LINE), seed=7, guidance=1.5)
    assert page["caption"].text == ODD
    command, curl = (copied(page, name) for name in ("command", "curl"))
    subprocess.run(["bash", "-e", "-o", "pipefail", "-c", curl], cwd=tmp_path, check=True)
    assert (tmp_path / "seqpar.png").read_bytes() == page.file
    shell = subprocess.run(
        ["bash", "-c", f'seqpar() {{ printf "%s\\0" "$@"; }}; {command}'],
        env={**os.environ, "LORAS": "/folder"},
        check=True,
        capture_output=True,
        text=True,
    )
    subcommand, *words = shell.stdout.split("\0")[:-1]
    loras = ("/folder/style.safetensors:1",)
    expected = Args("toy", prompt=(ODD,), size="24x40", seed=7, guidance=1.5, lora=loras, ranks=2)
    assert (subcommand, tyro.cli(Args, args=words)) == ("sample", expected)


def test_a_request_that_waits_tells_its_place(page: Page, front: Running) -> None:
    body = {"prompt": "hold place", "stream": True, "partial_images": 1}
    with front.http() as http, http.stream("POST", PATH, json=body):
        until(lambda: "hold place" in front.prompts)
        page.ask("after it")
        page.until(lambda: page["step"].text.startswith("1 request before this one, ready in about "))
        (front.folder / "place").touch()
        page.until(lambda: page.shows("made"))


def test_escape_cancels_and_the_next_picture_is_made(page: Page, front: Running) -> None:
    before = len(front.prompts)
    page.ask("wait")
    until(lambda: front.prompts[before:] == ["wait"])
    page["prompt"].send_keys(Keys.ESCAPE)
    page.until(lambda: page["status"].text == "Cancelled.")
    assert page.history == []
    with front.http() as http:
        job = until(lambda: next(j for j in reversed(http.get("/v1/jobs").json()["data"]) if j["ended"]))
    assert job["state"] == "cancelled"
    page.make("after")
    assert not page.shows("problem")
    page.ask("mistake")
    page.until(lambda: page["problem"].text == "got a prompt that asks for a mistake, expected another one")
    assert page["caption"].text == "after"  # which is shown again


def test_the_history_shows_pictures_again_and_fills_the_form(page: Page) -> None:
    page.make("first", seed=1, steps=2)
    page.make("second", seed=2, steps="")
    second, first = page.history
    first.send_keys(Keys.ENTER)
    assert (page["caption"].text, pixels(page.file)) == ("first", pixels_of(1, 24, 16))
    assert [each.get_attribute("aria-current") for each in (second, first)] == ["false", "true"]
    page["reuse"].click()
    assert [page[name].get_attribute("value") for name in ("prompt", "seed", "steps")] == ["first", "1", "2"]


def test_nothing_is_wider_than_the_window(page: Page) -> None:
    page.make("x" * 300, seed=2**53 - 1)
    for size in ((1280, 900), (390, 844)):
        page.look(*size)
        assert page.driver.execute_script("return document.documentElement.scrollWidth") == size[0]


def test_keys_stay_in_the_tab_and_ranks_that_load_are_waited_for(empty: Page, tmp_path: Path) -> None:
    page, keys, slow = empty, tmp_path / "keys", tmp_path / "slow-start"
    keys.write_text("ada:key-of-ada\n")
    keys.chmod(0o600)
    slow.touch()
    with running(tmp_path, "--keys", str(keys), wait=False) as front:
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
        kept = page.driver.execute_script("return [document.cookie, localStorage.length, document.body.outerHTML]")
        assert kept[:2] == ["", 0]
        assert "key-of-ada" not in kept[2]
    refused = [each["message"] for each in page.messages()]
    assert all("/v1/models - Failed to load resource" in each for each in refused)
    assert [re.findall(" status of ([0-9]+)", each) for each in refused[:3]] == [["401"], ["401"], ["503"]]


def test_a_real_model_is_cancelled_and_makes_the_picture_that_it_makes_for_others(empty: Page, tmp_path: Path) -> None:
    """Other tests compare the bits of a server's ranks with those of the command."""
    page = empty
    with running(tmp_path, "builtin", "--ranks", "1", fake=False) as front, front.http() as http:
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
        until(lambda: 'seqpar_jobs_total{end="cancelled"} 1.0' in http.get("/metrics").text)
        page.choose("size", "56x72")
        page.fill(steps=6, seed=3)
        page["seed"].send_keys(Keys.ENTER)
        page.until(lambda: page.shows("made"))
        body = {"model": "builtin", "prompt": "ice cream", "size": "56x72", "steps": 6, "seed": 3}
        assert page.file == asked(front, body)
        assert (len(page.history), opened(page.file).size) == (1, (56, 72))
        assert page["command"].text.endswith("--classes='ice cream' --size=72x56 --seed=3 --steps=6 --ranks=1")


def test_sizes_have_the_pixels_of_the_models_own() -> None:
    def even(size: tuple[int, int]) -> None:
        if size[0] % 128:
            raise ValueError("no multiple")

    assert sizes_near((0, 0), even) == ()
    large = ((1024, 1024), (896, 1152), (1152, 896), (832, 1280), (1280, 832), (768, 1344), (1344, 768))
    assert sizes_near((1024, 1024), lambda size: None) == large
    assert sizes_near((1000, 1000), even) == ((1000, 1000), (1152, 864))


def test_the_page_is_packaged() -> None:
    assert f'"serve/api/{PAGE}"' in (ROOT / "pyproject.toml").read_text()
