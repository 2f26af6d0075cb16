"""Tests of the built site: no warning, nothing fetched from elsewhere, and a stranger's questions answered at once."""

from __future__ import annotations

import html
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from posixpath import normpath
from typing import Any
from urllib.parse import unquote

import pytest

from tests.support.pages import ROOT

pytestmark = pytest.mark.whole
# question -> the page and section that answers it, and words that it has
QUESTIONS = {
    "install": ("install.html", "install", "pip install -e ."),
    "which GPUs": ("install.html", "gpus", "RTX 40"),
    "how fast on my cards": ("speed.html", "on-your-machine", "--card"),
    "beside others": ("benchmarks/index.html", "beside-other-engines-on-two-gpus", "cache-dit"),
    "memory in 8 bits": ("precision.html", "memory", "GB"),
    "what runs": ("your-code.html", "what-runs-how", "TeaCache"),
    "FLUX on 2 GPUs": ("models/flux.html", "commands", "seqpar sample --gpus 2 --model black-forest"),
    "out of memory": ("troubleshooting.html", "out-of-memory", "--vae tiled"),
    "wrong picture": ("troubleshooting.html", "a-wrong-or-another-picture", "--verify"),
    "LoRA": ("your-code.html", "adapters-your-own-blocks-offload", "load_lora_weights"),
    "serve": ("serving.html", "serving", "seqpar serve"),
    "cancel": ("http-api.html", "cancel-deadlines-priority", "DELETE"),
    "exact": ("verifying.html", "exact-mode", "--exact"),
    "several machines": ("multi-node.html", "two-machines", "--nnodes=2"),
    "Slurm": ("multi-node.html", "slurm", "srun"),
}
CLICKS = 2
FETCHED = re.compile(r"<(?:script|link|img|iframe|source|video)\b[^>]*?\b(?:src|href)=[\"']?((?:https?:)?//[^\"'\s>]+)")
IN_STYLES = re.compile(r"(?:url\(|@import )[\"']?((?:https?:)?//[^)\"']+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the built site; warnings of the builder, as of links that lead nowhere, are errors."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def fetched(folder: Path) -> list[str]:
    """Return what pages and styles of a folder fetch from elsewhere."""
    pages = [found for page in folder.rglob("*.html") for found in FETCHED.findall(page.read_text(encoding="utf-8"))]
    styles = [
        found for style in folder.rglob("*.css") for found in IN_STYLES.findall(style.read_text(encoding="utf-8"))
    ]
    return pages + styles


def test_nothing_is_fetched_from_elsewhere(site: Path, tmp_path: Path) -> None:
    assert len([*site.rglob("*.html")]) > 60
    assert fetched(site) == []
    Path(tmp_path, "a.html").write_text('<script defer src="https://cdn.example/x.js"></script><img src=//b.example/c>')
    Path(tmp_path, "a.css").write_text("a{background:url(https://d.example/e)}")
    assert fetched(tmp_path) == ["https://cdn.example/x.js", "//b.example/c", "https://d.example/e"]


def links(site: Path, page: str) -> Iterator[str]:
    """Yield page#section of each link in the text of a page."""
    text = (site / page).read_text(encoding="utf-8")
    article = text[text.index("<article") : text.index("</article>")]
    for link in re.findall(r"<a\b[^>]*?href=\"([^\"]+)\"", article):
        path, _, section = unquote(html.unescape(link)).partition("#")
        if not re.match(r"[a-z]+:", path):
            yield f"{normpath(Path(page).parent / path) if path else page}#{section}"


def clicks(site: Path, page: str, section: str) -> int | None:
    """Return after how many clicks from the first page a section is reached; None if not after `CLICKS`."""
    reached = {"index.html"}
    for count in range(1, CLICKS + 1):
        following = {link for here in reached for link in links(site, here)}
        if f"{page}#{section}" in following:
            return count
        reached = {path for link in following if (path := link.partition("#")[0]).endswith(".html")}
    return None


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_stranger_finds_the_answer(site: Path, question: str) -> None:
    page, section, words = QUESTIONS[question]
    count = clicks(site, page, section) if section != Path(page).stem else clicks(site, page, "")
    assert count is not None
    text = (site / page).read_text(encoding="utf-8").partition(f'id="{section}"')[2]
    assert words in html.unescape(re.sub(r"<[^>]+>", "", text))[:6000]


def test_a_section_that_no_page_links_to_is_not_found(site: Path) -> None:
    assert clicks(site, "serving.html", "no-such-section") is None


def test_links_that_lead_nowhere_are_warnings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    docs, wrong = tmp_path / "docs", ("b.md", "#nowhere", "../seqpar/none.py", "index.md#x")
    docs.mkdir()
    (docs / "index.md").write_text("# A\n\n[a](index.md#a)\n" + "".join(f"[b]({link})\n" for link in wrong))
    changed: dict[str, Any] = {"docs_dir": str(docs), "site_dir": str(tmp_path / "site"), "nav": [{"A": "index.md"}]}
    build(load_config(str(ROOT / "mkdocs.yml"), plugins=[], extra_css=[], strict=False, **changed))
    messages = (record.message for record in caplog.records if record.levelno >= logging.WARNING)
    mine = [text for text in messages if text.startswith("Doc file 'index.md'")]
    assert len(mine) == len(wrong), mine
    assert sum("not found" in text for text in mine) == sum("anchor" in text for text in mine) == 2
