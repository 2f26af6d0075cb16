"""The page at `/` in a real browser: its form, queue and results, and that nothing in it becomes markup."""

from __future__ import annotations

import base64
import io
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from selenium.common.exceptions import JavascriptException
from selenium.webdriver import ActionChains, Keys

from seqpar.cli.args import Args
from seqpar.pipelines.image_files import digest
from seqpar.serve.api.app import PAGE
from seqpar.serve.api.gate import GENERATIONS
from seqpar.types.flags import parsed
from tests.serve.test_stream import enlarged
from tests.support.browser import SAVED, Page, browser, why_no_browser
from tests.support.fake_replica import FACTS, pixels_of
from tests.support.front import LIMIT_S, PIXELS, ROOT, Running, file_of, keys_in, running, until

pytestmark = [pytest.mark.slow, pytest.mark.whole]
MARKUP = """<img src=x onerror="document.title='run'"><script>document.title='run'</script>"""
NEW_LINE = Keys.SHIFT + Keys.ENTER + Keys.NULL
ODD = f'two\nlines, it\'s "$HOME" `id` \\ {MARKUP}'  # special characters of shells and JSON
UNLIKE = ("id", "pixels", "partial_images", "deadline_s")  # of two requests for the same image
OPTIONAL = ("lora", "n", "image", "seconds", "fps", "class", "scheduler", "preset")  # controls that not all models have
OPTIONAL += ("guidance", "true_guidance", "negative_prompt", "strength", "controlnet", "paint")
PAINTED = """
const paper = document.getElementById("paper"), { width, height } = paper;
const { data } = paper.getContext("2d").getImageData(0, 0, width, height);
return data.filter((value, at) => at % 4 === 3 && value > 0).length;
"""
FORBIDDEN = re.compile(
    r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|Function\(|<[^>]*\son\w+=|//\w+\.\w"
)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    if (reason := why_no_browser()) is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("profile")
    with browser(folder) as driver:
        yield Page(driver, folder)


@pytest.fixture
def empty(started: Page) -> Iterator[Page]:
    """The browser; its console must have no message at the end."""
    started.look(1280, 900)
    yield started
    assert started.messages() == []


@pytest.fixture
def page(empty: Page, front: Running) -> Page:
    """The page of fake ranks."""
    empty.open(front.url)
    return empty


def requested(front: Running, **body: Any) -> bytes:
    """The file of an image that is requested without the page."""
    return base64.b64decode(front.http.post(GENERATIONS, json=body).json()["data"][0]["b64_json"])


def values(page: Page, *names: str) -> list[str | None]:
    return [page[name].get_attribute("value") for name in names]


def tick(page: Page, lora: str, scale: float) -> None:
    page.driver.find_element("css selector", f"[data-lora='{lora}']").click()
    weight = page.driver.find_element("css selector", f"[aria-label='Weight of {lora}']")
    weight.clear()
    weight.send_keys(str(scale))


def test_the_answer_allows_nothing_but_its_own_script(front: Running) -> None:
    answer = front.http.get("/")
    rules = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    for name in ("default-src", "base-uri", "form-action", "frame-ancestors", "trusted-types"):
        assert rules.pop(name) == "'none'"
    assert all(re.fullmatch(r"'sha256-[\w+/]{43}='", rules.pop(f"{name}-src")) for name in ("script", "style"))
    expected = {"img-src": "blob: data:", "media-src": "blob:", "connect-src": "'self'"}
    assert rules == {**expected, "require-trusted-types-for": "'script'"}
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert FORBIDDEN.findall(answer.text.replace("http://www.w3.org/2000/svg", "")) == []
    assert FORBIDDEN.search('<b onclick="x">')
    assert FORBIDDEN.search("fetch('https://example.org/x')")
    assert all(part in answer.text for part in (":focus-visible", "function begun"))  # style and script are in it
    assert f'"serve/api/{PAGE.partition(".")[0]}.*"' in (ROOT / "pyproject.toml").read_text()  # it is packaged


def test_it_offers_what_the_models_take(page: Page) -> None:
    assert page.driver.switch_to.active_element == page["prompt"]
    assert page.offers("model") == list(FACTS)
    page["more"].find_element("tag name", "summary").click()
    guided = {"guidance", "true_guidance", "negative_prompt"}
    shown = {
        "toy": {"lora", "n", *guided},
        "editor": {"lora", "image", "n", "controlnet", "scheduler", *guided},
        "changer": {"image", "n", "strength", *guided},
        "movie": {"lora", "seconds", "fps", *guided},
        "clip": {"image", "seconds", "fps", "strength", *guided},
        "filler": {"image", "n", "strength", *guided},
        "strict": {"image", "n", "strength", "guidance", "scheduler", "preset"},
    }
    for model, names in shown.items():
        page.choose("model", model)
        assert {name for name in OPTIONAL if page.shows(name)} == names
        fields = page.driver.find_elements("css selector", "#form :is(input, select, textarea, button)")
        assert all(field.accessible_name for field in fields if field.is_displayed())
    assert page.offers("scheduler") == ["The model's own", "DDIMScheduler", "PNDMScheduler", "LCMScheduler"]
    page.choose("preset", "lightning-4")
    assert not page.shows("steps")
    assert not page.shows("scheduler")
    page.choose("model", "toy")
    assert page.offers("size") == ["16x24", "40x24", "Other"]
    assert page["about-model"].text == "Makes images · precision fp8"


def test_the_last_image_stays_until_a_preview_and_that_until_the_image(page: Page, front: Running) -> None:
    page.make("first", seed=1)
    page.choose("size", "40x24")
    tick(page, "style", 0.5)
    page["more"].find_element("tag name", "summary").click()
    page["growing"].click()
    page.ask("hold still", seed=5, steps=3, guidance=2.5, negative_prompt="rain")
    page.until(lambda: any("step 1 of 3" in text for text in page.jobs))
    assert (page["caption"].text, page.pixels) == ("first", pixels_of(1, 24, 16))
    front.release("still")
    page.until(lambda: page["caption"].text == "hold still")
    page["growing"].click()
    page.ask("hold growing")
    page.until(lambda: page.pixels == enlarged(5, 2, (24, 40)))
    assert not page.shows("made")
    front.release("growing")
    page.until(lambda: page.shows("made") and page.pixels == pixels_of(5, 24, 40))
    about = "toy · 40x24 · seed 5 · 3 steps · guidance 2.5 · style x 0.5 · 9.0 s"
    assert page["about-picture"].text == about
    fields = {"prompt": "hold growing", "seed": 5, "steps": 3, "guidance": 2.5, "negative_prompt": "rain"}
    order = front.orders[-1]
    assert {**order, **fields, "size": [24, 40], "loras": [["style", 0.5]], "partial_images": 3} == order
    assert page.saved() == requested(front, **fields, size="40x24", lora=[{"name": "style", "scale": 0.5}])


def test_several_images_and_a_size_of_ones_own(page: Page, front: Running) -> None:
    page.choose("size", "Other")
    page.make("three", seed=5, n=3, width=8, height=12)
    assert [button.accessible_name for button in page.history] == [f"three, seed {seed}" for seed in (7, 6, 5)]
    page.until(lambda: page.pixels == pixels_of(7, 12, 8))
    page["terminal"].find_element("tag name", "summary").click()
    assert page["command"].text.endswith("--size=12x8 --seed=7 --precision=fp8 --min-psnr=30 --ranks=2")
    page.history[1].click()
    page.until(lambda: page.pixels == pixels_of(6, 12, 8))
    page["reuse"].click()
    assert values(page, "seed", "n", "size", "width", "height") == ["6", "1", "other", "8", "12"]


def test_prompts_queue_with_their_time_and_each_can_be_cancelled(page: Page, front: Running) -> None:
    for prompt in ("hold queue", "second", "mistake", "fourth"):
        page.ask(prompt, seed=1)
        page.until(lambda prompt=prompt: prompt in page.jobs[-1])
    page.until(lambda: re.search(r"step 1 of 4 · \d+\ss so far · about \d+\ss left", page.jobs[0]))
    page.until(lambda: re.search(r"1 request before this one · \d+\ss so far · about \d+\ss left", page.jobs[1]))
    assert "waits in this page" in page.jobs[3]
    page.press("Cancel", "second")
    page.until(lambda: page["status"].text == "Cancelled.")
    until(lambda: "cancelled" in {job["state"] for job in front.jobs()[-4:]})
    front.release("queue")
    page.until(lambda: len(page.jobs) == 1 and len(page.history) == 2)
    assert "got a prompt that asks for a mistake" in page.jobs[0]
    page.press("Edit", "mistake")
    assert values(page, "prompt") == ["mistake"]
    page.press("Dismiss", "mistake")
    page.until(lambda: not page.jobs)
    assert "second" not in front.prompts
    page.ask("hold running")
    page.until(lambda: any("step 1" in text for text in page.jobs))
    page.press("Cancel", "hold running")
    until(lambda: front.jobs()[-1]["state"] == "cancelled")


def test_form_history_and_queue_survive_a_reload(page: Page, front: Running) -> None:
    page.make("kept", seed=1)
    page.choose("model", "movie")
    page.ask("hold film", seed=2)
    until(lambda: "hold film" in front.prompts)
    page.choose("model", "toy")
    tick(page, "lines", 0.3)
    page.ask("images after", seed=3, n=2)
    page.until(lambda: len(page.jobs) == 2)
    page.fill(prompt="a draft", seed="")
    page.driver.refresh()
    page.until(lambda: page.shows("form") and len(page.jobs) == 2)
    assert values(page, "model", "prompt", "seed", "n") == ["toy", "a draft", "", "2"]
    assert page.driver.find_element("css selector", "[data-lora=lines]").is_selected()
    page.until(lambda: page.pixels == pixels_of(1, 24, 16))
    front.release("film")
    page.until(lambda: not page.jobs)
    names = ["hold film, seed 2", "images after, seed 3", "images after, seed 4", "kept, seed 1"]
    assert sorted(button.accessible_name for button in page.history) == names
    assert front.prompts.count("hold film") == 1  # the video went on without the page
    page["clear"].click()
    page.driver.switch_to.alert.accept()
    page.until(lambda: page.history == [])
    page.driver.refresh()
    page.until(lambda: page.shows("form"))
    assert not page.shows("past")


def test_models_that_are_not_in_memory_are_marked(empty: Page, tmp_path: Path) -> None:
    page = empty
    with running(tmp_path, "--swap", "--keys", keys_in(tmp_path, "admin=true")) as front:
        page.driver.get(front.url)
        page.until(lambda: page.shows("unlock"))
        page["key"].send_keys("key-of-ada", Keys.ENTER)
        page.until(lambda: page.shows("form"))
        page.messages()  # of the answer without a key
        assert page.offers("model") == list(FACTS)
        headers = {"authorization": "Bearer key-of-ada"}
        unload = {"unload": list(FACTS)[1:]}
        assert front.http.post("/admin/models", json=unload, headers=headers).status_code == 200
        page.driver.refresh()
        page.until(lambda: page.shows("form"))
        first, *others = FACTS
        assert page.offers("model") == [first, *(f"{name} (not loaded)" for name in others)]
        assert not page.shows("unloaded")
        page.choose("model", "editor (not loaded)")
        assert "The first request loads this model" in page["unloaded"].text
        page.make("a cat", seed=1)
        page.until(lambda: "editor" in page.offers("model"))
        assert not page.shows("unloaded")


def test_errors_stand_at_the_field_that_they_are_about(page: Page, tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    page.choose("model", "changer")
    page.ask("without a file")
    assert page.jobs == []  # the browser asks for one
    page.pick("files", broken)
    page.ask("with it")
    page.until(lambda: page.driver.find_elements("id", "image-wrong"))
    wrong, field = page["image-wrong"], page["image"]
    assert "image 1" in wrong.text
    assert [field.get_attribute(f"aria-{name}") for name in ("invalid", "errormessage")] == ["true", "image-wrong"]
    page["inputs"].find_element("tag name", "button").click()
    assert page.driver.find_elements("id", "image-wrong") == []
    page.choose("model", "strict")
    page.driver.execute_script("document.querySelector('#scheduler option:nth-child(2)').value = 'NoSuch'")
    page["more"].find_element("tag name", "summary").click()
    page.choose("scheduler", "DDIMScheduler")
    page["more"].find_element("tag name", "summary").click()
    page.ask("x")
    page.until(lambda: page.driver.find_elements("id", "scheduler-wrong"))
    assert page.shows("scheduler-wrong")  # it opens the settings again
    assert "NoSuch" in page["scheduler-wrong"].text
    assert page.jobs == []
    errors = [line["message"] for line in page.messages()]  # which the browser logs of every such answer
    assert len(errors) == 2
    assert all(" 400 " in error for error in errors)


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


def check_lines(page: Page, front: Running, folder: Path, expected: Args) -> None:
    """Run the curl line, whose request must be that of the page, and compare the flags of the command."""
    if not page.shows("command"):
        page["terminal"].find_element("tag name", "summary").click()
    command, curl = (copied(page, name) for name in ("command", "curl"))
    subprocess.run(["bash", "-e", "-o", "pipefail", "-c", curl], cwd=folder, check=True, timeout=LIMIT_S)
    ours, theirs = ({**order, **dict.fromkeys(UNLIKE)} for order in front.orders[-2:])
    assert theirs == ours
    assert (folder / expected.out).stat().st_size > 0
    script = f'seqpar() {{ printf "%s\\0" "$@"; }}; {command}'
    variables = {
        **os.environ,
        "LORAS": "/folder",
        "CONTROLNET": "/folder/net",
        "MODEL": expected.model,
    }  # whose names the fake ranks alone know
    shell = subprocess.run(["bash", "-c", script], env=variables, check=True, capture_output=True, text=True)
    subcommand, *words = shell.stdout.split("\0")[:-1]
    flags = replace(expected, precision="fp8", min_psnr=30.0, ranks=2)  # of the fake ranks
    assert (subcommand, parsed(Args, words, "sample")) == ("sample", flags)


def test_the_lines_to_copy_make_the_same_image(page: Page, front: Running, tmp_path: Path) -> None:
    tick(page, "style", 1)
    page["more"].find_element("tag name", "summary").click()
    page.choose("size", "40x24")
    page.make(ODD.replace("\n", NEW_LINE), seed=7, guidance=1.5, negative_prompt="@rain")
    assert page["caption"].text == ODD
    loras = ("/folder/style.safetensors:1",)
    flags: dict[str, Any] = {"prompt": (ODD,), "size": "24x40", "seed": 7, "guidance": 1.5, "lora": loras}
    check_lines(page, front, tmp_path, Args("toy", negative_prompt="@rain", **flags))
    assert (tmp_path / "seqpar.png").read_bytes() == page.saved()


def test_an_edit_takes_files_and_results_and_its_lines_work(page: Page, front: Running, tmp_path: Path) -> None:
    file = tmp_path / 'it\'s "odd", a;b.png'
    file.write_bytes(file_of())
    page.choose("model", "editor")
    assert values(page, "size") == ["16x24"]
    page.pick("files", file)
    assert values(page, "size") == ["auto"]  # the size of the image
    page.make("@edit; it's", seed=3, strength=0.5)
    page.until(lambda: page.pixels == PIXELS.tobytes())
    assert (front.orders[-1]["size"], front.orders[-1]["strength"]) == (None, 0.5)
    expected = Args("editor", prompt=("@edit; it's",), image=(f"./{file.name}",), seed=3, strength=0.5)
    check_lines(page, front, tmp_path, expected)
    assert [link.text for link in page["input-files"].find_elements("tag name", "a")] == [f"Save {file.name}"]
    page.driver.refresh()
    page.until(lambda: page.shows("form") and page.images == [file.name])  # the form has it still
    page.until(lambda: page.shows("made"))
    page["input"].click()
    assert page.images == [file.name, "seqpar-3.png"]
    page.make("two", seed=4)
    assert len(front.orders[-1]["images"]) == 2


def mask_file(page: Page) -> bytes:
    """The file of the mask of the form's only image, which the page offers to save."""
    name = page["input-files"].find_element("partial link text", "-mask.png")
    file = page.folder / SAVED / name.text.removeprefix("Save ")
    file.unlink(missing_ok=True)
    name.click()
    page.until(file.exists)
    return file.read_bytes()


def masked(page: Page) -> np.ndarray:
    """What this mask repaints."""
    return 255 - np.asarray(Image.open(io.BytesIO(mask_file(page))).getchannel("A"))


def strokes(page: Page) -> int:
    """Pixels that are painted in the dialog."""
    return page.driver.execute_script(PAINTED)


def test_a_mask_is_painted_and_erased_by_mouse_and_keys(page: Page, front: Running, tmp_path: Path) -> None:
    photo = tmp_path / "photo.png"
    photo.write_bytes(file_of(np.zeros((60, 80, 3), np.uint8)))
    page.choose("model", "changer")
    page.pick("files", photo)
    assert not page.shows("paint")  # this model only redraws
    page.choose("model", "filler")
    assert page["about-mask"].text == "This model needs a mask: what it repaints."
    page.choose("model", "editor")
    page["paint"].click()
    page.until(lambda: page.driver.switch_to.active_element == page["paper"])
    assert all(page[name].accessible_name for name in ("painter", "paper", "brush", "mask-file"))
    drag = ActionChains(page.driver).move_to_element(page["paper"]).click_and_hold()
    drag.move_by_offset(200, 0).release().perform()
    line = strokes(page)
    page["erase"].send_keys(Keys.ENTER)
    ActionChains(page.driver).move_to_element(page["paper"]).click().perform()
    assert 0 < strokes(page) < line
    page["undo"].send_keys(Keys.ENTER)
    assert strokes(page) == line
    page["blank"].send_keys(Keys.ENTER)
    assert strokes(page) == 0
    page["paper"].send_keys(Keys.CONTROL, "z")
    assert strokes(page) == line
    page["erase"].send_keys(Keys.ENTER)
    page["brush"].send_keys(Keys.HOME)
    page["paper"].send_keys(*[Keys.ARROW_UP] * 30, Keys.SPACE)
    page["paper"].send_keys(Keys.SHIFT, Keys.ARROW_UP, Keys.NULL)
    painted = strokes(page)
    assert painted > line
    page["paper"].send_keys(Keys.ESCAPE)
    page.until(lambda: not page.shows("painter"))
    assert page.driver.switch_to.active_element == page["paint"]
    assert page["paint"].text == "Edit mask"
    page.make("drawn", seed=3)
    page.until(lambda: page["about-picture"].text.endswith("seed 3 · with a mask · 9.0 s"))
    page["terminal"].find_element("tag name", "summary").click()
    mask = masked(page)
    assert (mask.shape, (mask > 0).sum()) == ((60, 80), painted)
    assert mask[30, 45] == 255
    assert mask[5, 5] == 0
    ours = front.orders[-1]
    assert ours["mask"]["digest"] == digest(mask.tobytes())
    photo.write_bytes(photo.read_bytes())  # now it is newer than the choice, which must not matter below
    (tmp_path / "photo-mask.png").write_bytes((page.folder / SAVED / "photo-mask.png").read_bytes())
    subprocess.run(["bash", "-e", "-o", "pipefail", "-c", copied(page, "curl")], cwd=tmp_path, check=True)
    theirs = front.orders[-1]
    assert {**theirs, **dict.fromkeys(UNLIKE)} == {**ours, **dict.fromkeys(UNLIKE)}
    page["unmask"].click()
    page.make("drawn", seed=4)
    assert front.orders[-1]["mask"] is None
    page.history[1].click()
    page["reuse"].click()  # with its mask
    page.make("drawn", seed=5)
    assert front.orders[-1]["mask"] == ours["mask"]


def test_a_finger_paints_and_a_second_one_does_not(page: Page, tmp_path: Path) -> None:
    photo = tmp_path / "photo.png"
    photo.write_bytes(file_of(np.zeros((60, 80, 3), np.uint8)))
    page.look(390, 844)
    page.choose("model", "editor")
    page.pick("files", photo)
    page["paint"].click()
    page.until(lambda: page.driver.switch_to.active_element == page["paper"])
    box = page["paper"].rect
    first, second = ({"x": box["x"] + box["width"] * x, "y": box["y"] + box["height"] / 2} for x in (0.3, 0.7))
    counts = list[int]()
    for kind, points in (("touchStart", [first]), ("touchMove", [{**first, "x": first["x"] + 50}])):
        page.driver.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
        counts.append(strokes(page))
    assert 0 < counts[0] < counts[1]
    both = [{**first, "x": first["x"] + 50, "id": 0}, {**second, "id": 1}]
    page.driver.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": both})
    page.driver.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    assert strokes(page) == counts[1]
    page["painted"].click()
    page.until(lambda: not page.shows("painter"))


@pytest.mark.parametrize("transparent", [True, False])
def test_a_mask_comes_from_a_file(page: Page, front: Running, tmp_path: Path, transparent: bool) -> None:
    file, mask = tmp_path / "photo.png", np.zeros((6, 10), np.uint8)
    mask[:, 4:] = 255
    file.write_bytes(file_of())
    colours = np.dstack([np.zeros((6, 10, 3), np.uint8), 255 - mask]) if transparent else mask
    (tmp_path / "mask.png").write_bytes(file_of(colours))
    (tmp_path / "broken.png").write_bytes(b"none")
    page.choose("model", "editor")
    page.pick("files", file)
    page["paint"].click()
    page.until(lambda: page.driver.switch_to.active_element == page["paper"])
    page["mask-file"].send_keys(str(tmp_path / "broken.png"))
    page.until(lambda: "broken.png is no image" in page["no-mask"].text)
    page["mask-file"].send_keys(str(tmp_path / "mask.png"))
    page.until(lambda: strokes(page) == 36)
    page["painted"].click()
    page.until(lambda: not page.shows("painter"))
    page.until(lambda: page["unmask"].is_displayed())
    page.driver.refresh()  # which keeps images and mask
    page.until(lambda: page.shows("form") and page["unmask"].is_displayed())
    page.make("drawn", seed=1)
    assert front.orders[-1]["mask"]["digest"] == digest(mask.tobytes())
    flags = Args("editor", prompt=("drawn",), image=("./photo.png",), mask="./photo-mask.png", seed=1)
    page["terminal"].find_element("tag name", "summary").click()
    (tmp_path / "photo-mask.png").write_bytes(mask_file(page))
    check_lines(page, front, tmp_path, flags)


def test_a_controlnet_follows_an_image(page: Page, front: Running, tmp_path: Path) -> None:
    file = tmp_path / "pose.png"
    file.write_bytes(file_of())
    page.choose("model", "editor")
    assert not page.shows("control_image")
    page.choose("controlnet", "pose")
    page.ask("drawn")
    assert page.jobs == []  # the browser asks for the image
    page.pick("control_image", file)
    page.make("drawn", seed=1, control_scale=0.5)
    order = front.orders[-1]
    assert (order["controlnet"], order["control_scale"], order["images"]) == ("pose", 0.5, [])
    assert order["control"]["digest"] == digest(PIXELS.tobytes())
    assert "ControlNet pose x 0.5" in page["about-picture"].text
    (tmp_path / "control-pose.png").write_bytes(file.read_bytes())
    flags: dict[str, Any] = {"controlnet": "/folder/net", "control_image": "./control-pose.png", "control_scale": 0.5}
    check_lines(page, front, tmp_path, Args("editor", prompt=("drawn",), seed=1, size="24x16", **flags))
    page.driver.refresh()
    page.until(lambda: page.shows("form") and page["control-inputs"].find_elements("tag name", "img") != [])
    page.until(lambda: page.shows("reuse"))
    page.driver.find_element("css selector", "[aria-label='Remove pose.png']").click()
    page["reuse"].click()
    assert page.driver.find_element("css selector", "#control-inputs img").get_attribute("alt") == "control-pose.png"


def test_a_video_is_played_with_sound_and_its_lines_work(page: Page, front: Running, tmp_path: Path) -> None:
    page.choose("model", "movie")
    tick(page, "high@transformer", 0.8)
    page.make("film", seed=3, seconds=2)
    page.until(lambda: page.driver.execute_script("return document.getElementById('film').videoWidth") == 16)
    page.driver.execute_script("document.getElementById('film').play()")
    heard = "return document.getElementById('film').webkitAudioDecodedByteCount"
    page.until(lambda: page.driver.execute_script(heard) > 0)
    assert page["about-picture"].text.startswith("movie · 16x24 · 17 frames · seed 3")
    assert page.history[0].find_element("tag name", "img").get_property("naturalWidth")
    assert not page.shows("enlarge")
    lora = ("/folder/high.safetensors:0.8@transformer",)
    expected = Args("movie", prompt=("film",), size="24x16", seed=3, frames=17, lora=lora, out=Path("seqpar.mp4"))
    check_lines(page, front, tmp_path, expected)
    first = tmp_path / "first.png"
    first.write_bytes(file_of())
    page.choose("model", "clip")
    page.pick("files", first)
    page.make("film", seed=4, seconds="")
    assert "seed 3" in page["about-picture"].text  # it is played and stays
    page.history[0].click()
    assert (len(front.orders[-1]["images"]), front.orders[-1]["model"]) == (1, "clip")
    expected = Args("clip", prompt=("film",), seed=4, frames=9, image=("./first.png",), out=Path("seqpar.mp4"))
    check_lines(page, front, tmp_path, expected)


def test_full_size_opens_and_closes_by_keys(page: Page) -> None:
    page.make("large", seed=1)
    page["enlarge"].send_keys(Keys.ENTER)
    page.until(lambda: page.shows("large"))
    page["zoom"].send_keys(Keys.ENTER)
    assert page["large"].size == {"width": 16, "height": 24}
    page["zoom"].send_keys(Keys.ESCAPE)
    page.until(lambda: not page.shows("full"))
    assert page.driver.switch_to.active_element == page["enlarge"]


def test_every_control_is_reached_by_tab_and_its_focus_is_seen(page: Page) -> None:
    page.make("focus")
    page["more"].find_element("tag name", "summary").click()
    selector = ":is(input, select, textarea, button, summary, pre, a[href]):not(:disabled)"
    controls = [x for x in page.driver.find_elements("css selector", selector) if x.is_displayed()]
    page["model"].send_keys("")
    reached, outlines = [page.driver.switch_to.active_element], set[str]()
    for _ in controls[1:]:
        page.driver.switch_to.active_element.send_keys(Keys.TAB)
        reached.append(page.driver.switch_to.active_element)
        outlines.add(reached[-1].value_of_css_property("outline-style"))
    assert reached == controls
    assert outlines == {"solid"}


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


def test_nothing_is_wider_than_the_window(page: Page) -> None:
    page["more"].find_element("tag name", "summary").click()
    page.choose("size", "Other")
    page.make("x" * 300, seed=2**53 - 1, width=16, height=16)
    page.ask("mistake" + " x" * 300)
    for size in ((1280, 900), (390, 844)):
        page.look(*size)
        assert page.driver.execute_script("return document.documentElement.scrollWidth") == size[0]
    page["enlarge"].click()
    assert page.driver.execute_script("return document.documentElement.scrollWidth") == 390


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
        assert page["server"].text == "2 ranks on the CPU · key of ada"
        page.make("a cat", seed=3)
        page.until(lambda: page.pixels == pixels_of(3, 24, 16))
        assert '"authorization: Bearer $SEQPAR_KEY"' in str(page["curl"].get_property("textContent"))
        *stored, html = page.driver.execute_script(
            "return [document.cookie, JSON.stringify(localStorage), document.body.outerHTML]"
        )
        assert stored[0] == ""
        assert not any("key-of-ada" in text for text in (stored[1], html))
        page.driver.execute_script("sessionStorage.clear(); location.reload()")
        page.until(lambda: page.shows("unlock"))
        page["key"].send_keys("key-of-bob", Keys.ENTER)
        page.until(lambda: page.shows("form"))
        assert page.history == []  # what ada has made
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
        assert not page.shows("prompt")
        page.choose("class", "ice cream")
        page.fill(steps=900)
        page["generate"].click()
        page.until(lambda: any("step " in text for text in page.jobs))
        page.press("Cancel", "ice cream")
        page.until(lambda: page["status"].text == "Cancelled.")
        assert page.driver.switch_to.active_element == page["generate"]
        until(lambda: 'seqpar_jobs_total{end="cancelled",model="builtin"} 1.0' in front.http.get("/metrics").text)
        page.choose("size", "56x72")
        page.fill(steps=6, seed=3)
        page["seed"].send_keys(Keys.ENTER)
        page.until(lambda: page.shows("made"))
        body: dict[str, Any] = {"prompt": "ice cream", "size": "56x72", "steps": 6, "seed": 3}
        assert page.saved() == requested(front, model="builtin", **body)
        assert not page.shows("input")  # no model takes images
        assert len(page.history) == 1
        assert str(page["command"].get_property("textContent")).endswith(
            "--classes='ice cream' --size=72x56 --seed=3 --steps=6 --ranks=1"
        )
