"""Tests that pages which are made from data are up to date, and that pictures and quoted messages tell what is so."""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from docs.tools import benchmarks_page, speed_chart, speed_page, strategy_pictures
from docs.tools.strategy_pictures import PICTURES, RANKS, TOKENS, Message, Moment, messages
from seqpar.families._find import FILES, FUSED
from seqpar.loop.models import large_dit
from seqpar.planner.costs import layers
from seqpar.types.facts import Layout
from tests.support.pages import COMMAND, FENCE, ROOT, pages

WORK = replace(large_dit.work(large_dit.SIZES["large-dit-7b"]), heads=4, kv_heads=4)
SIZES = {"ulysses": (1, 4), "ring": (4, 1), "usp": (2, 2), "kv_gather": (1, 4), "kv_first": (1, 4)}
README = ROOT / "README.md"
TROUBLE = ROOT / "docs" / "troubleshooting.md"


def test_the_page_of_benchmarks_is_made_of_the_lines() -> None:
    written = benchmarks_page.PAGE.read_text(encoding="utf-8")
    assert written == benchmarks_page.page(), "python -m docs.tools.benchmarks_page --write"
    rows = re.findall(r"^\| ([^|,]+).*\| (1\.\d\d) \| [\d.]+ \|$", benchmarks_page.speed(), re.MULTILINE)
    gains = sorted(float(gain) for _, gain in rows)
    claim = f"{gains[0]:.2f} to {gains[-1]:.2f} x as fast as the faster of diffusers and cache-dit"
    assert f"{claim}, for {len({model.strip() for model, _ in rows})} models" in README.read_text(encoding="utf-8")


def test_the_page_of_speed_is_made_of_the_lines_and_the_planner() -> None:
    assert speed_page.PAGE.read_text(encoding="utf-8") == speed_page.page(), "python -m docs.tools.speed_page --write"


def test_fp8_in_chart_and_table_is_the_option_alone() -> None:
    """README, chart and table agree, and attention in 8 bits has rows of its own."""
    flux = speed_chart.RUNS[0]
    for gpus in speed_chart.GPUS:
        alone, both = (speed_page.measured(flux.model, gpus, of) for of in ("fp8", speed_page.ATTENTION))
        assert alone
        assert both
        assert "attention" not in alone.ours["case"]["way"]
        assert "attention fp8" in both.ours["case"]["way"]
        (bar,) = [bar for bar in speed_chart.bars(flux) if (bar.gpus, bar.kind) == (gpus, "ours8")]
        assert bar.seconds == alone.ours["ms"]["median"] / 1e3 * flux.calls
    plain, eight = (speed_page.measured(flux.model, 1, of) for of in ("bf16", "fp8"))
    assert plain
    assert eight
    claim = f"from {plain.ours['ms']['median']:.0f} to {eight.ours['ms']['median']:.1f} ms"
    assert claim in README.read_text(encoding="utf-8")


def test_a_bar_of_8_bits_has_bf16_of_its_gpus_beside_it() -> None:
    for run in speed_chart.RUNS:
        bars = {(bar.gpus, bar.gpu, bar.kind) for bar in speed_chart.bars(run)}
        assert bars >= {(gpus, gpu, "ours") for gpus, gpu, kind in bars if kind == "ours8"}, run.title


def test_the_pictures_are_made_of_the_data() -> None:
    for program in (strategy_pictures, speed_chart):
        for name, text in program.pictures().items():
            written = (ROOT / "docs" / "pictures" / f"{name}.svg").read_text(encoding="utf-8")
            assert written == text, f"python -m {program.__name__} --write"


class Sent(NamedTuple):
    """What a rank sends and receives in one exchange, and to how many ranks it sends."""

    sent: int
    received: int
    messages: int


def drawn(moments: tuple[Moment, ...]) -> list[list[Sent]]:
    """Return what each rank sends and receives in each exchange that a picture shows."""
    return [by_rank(sent) for before, after in pairwise(moments) if (sent := messages(before, after))]


def by_rank(sent: list[Message]) -> list[Sent]:
    amounts = [(message, len(message.cells) * len(message.tensor.split())) for message in sent]
    return [
        Sent(
            sum(amount for message, amount in amounts if message.sender == rank),
            sum(amount for message, amount in amounts if message.receiver == rank),
            len({message.receiver for message in sent if message.sender == rank}),
        )
        for rank in RANKS
    ]


def told(name: str) -> list[list[Sent]]:
    """Return what each rank sends and receives in each exchange as the strategy's facts say."""
    ring, ulysses = SIZES[name]
    of = layers(WORK, Layout(1, 1, ring, ulysses, name, "gloo"), 4)
    exchanges = zip(*(layer.moves for layer in of), strict=True)
    return [[Sent(move.sent, move.received, move.messages) for move in moves] for moves in exchanges]


def sums(exchanges: list[list[Sent]]) -> list[Sent]:
    """Return the sums over exchanges: kv_first sends in two parts what its facts call one exchange."""
    ranks = zip(*exchanges, strict=True)
    return [Sent(sum(x.sent for x in of), sum(x.received for x in of), of[0].messages) for of in ranks]


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_shows_what_the_strategy_sends(name: str) -> None:
    shown, facts = drawn(PICTURES[name]), told(name)
    assert (sums(shown) if name == "kv_first" else shown) == (sums(facts) if name == "kv_first" else facts)
    assert sums(shown) != sums(told("ring" if name == "ulysses" else "ulysses"))
    assert PICTURES[name][-1].held["out"] == TOKENS


@pytest.mark.parametrize("name", PICTURES)
def test_in_a_picture_each_query_meets_all_keys(name: str) -> None:
    met = Counter[tuple[int, int, int]]()  # a query's token and head, and a key's token
    for moment in PICTURES[name]:
        for rank, queries in enumerate(moment.held.get("q", ())):
            keys = moment.held.get("k v", moment.held.get("v", ()))[rank]
            met.update({(*query, token) for query in queries for token, head in keys if head == query[1]})
    assert len(met) == len(RANKS) ** 3


@cache
def texts() -> str:
    """Return all texts of the package, each on a line; what is filled in is left out."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "seqpar").rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return "\n".join(node.value for node in nodes if isinstance(node.value, str))


def missing(quoted: str) -> list[str]:
    """Return the parts of a quoted message that stand in no text of the package."""
    parts = (part.strip(" ;,") for part in quoted.split("..."))
    return [part for part in parts if len(part) > 5 and part not in texts()]


def test_quoted_messages_are_those_of_the_code() -> None:
    page = TROUBLE.read_text(encoding="utf-8")
    quotes = [quote[2:].replace("\n> ", " ").strip() for quote in re.findall(r"(?:^> .+\n)+", page, re.MULTILINE)]
    spans = [span for span in re.findall(r"`([^`\n]+)`", page) if len(span.split()) > 3 and not COMMAND.match(span)]
    assert len(quotes) >= 6
    assert len(spans) >= 12
    assert [part for quoted in (*quotes, *spans) for part in missing(quoted)] == []
    assert missing("got ... processes on a machine with no GPUs at all, expected more")


INSTALLED = re.compile(r"pip install[^\n`&;]*[ '\"]seqpar\b")  # by the name of a package, which is not published


def test_nothing_installs_a_name_that_is_not_published() -> None:
    assert INSTALLED.search("pip install -q 'seqpar[ray]'")
    folders = ("docs", "examples", "launch", "seqpar")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    texts = [path for path in (*paths, *ROOT.glob("*.md")) if path.suffix in (".md", ".py", ".yaml", ".ipynb", "")]
    assert len(texts) > 200
    assert [path.name for path in texts if INSTALLED.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("page", [README, ROOT / "docs" / "models.md"], ids=lambda page: page.name)
def test_every_model_has_its_way(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [path.name for path in (ROOT / "docs" / "models").glob("*.md") if f"models/{path.name}" not in text] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "models").glob("*.md")), ids=lambda page: page.stem)
def test_a_models_page_has_command_memory_time_and_licence(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for section in ("Commands", "Memory", "Time", "Licence of the weights"):
        assert re.search(rf"^## {section}\n\n\S", text, re.MULTILINE), section


def test_the_readme_is_short_and_says_which_families_have_fused_kernels() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    rows = re.findall(r"^\| .+ \| (yes|no) \| \[.+\]\(docs/(\S+)\) \|$", text, re.MULTILINE)
    fused = {Path(path).stem.replace("-", "_") for answer, path in rows if answer == "yes"}
    assert fused - {"unidiffuser", "README"} == FUSED - {"ltx2"}  # on the page of ltx
    assert {path for answer, path in rows if answer == "no"} == {"models/others.md"}


def test_lines_of_python_on_pages_are_short() -> None:
    """A comment behind code is not read past the edge of a screen."""
    blocks = [(path.name, found) for path in pages() for found in FENCE.finditer(path.read_text(encoding="utf-8"))]
    python = [(name, line) for name, block in blocks if block[1] == "python" for line in block[2].splitlines()]
    assert len(python) > 50
    assert [(name, line) for name, line in python if len(line) > 120] == []


def unlisted(table: str) -> set[str]:
    """Return the families without fused kernels that a table does not name, by the first word of their files' names."""
    return {name for name in FILES.keys() - FUSED if re.split(r"[_\d]", name)[0] not in table.lower()}


def test_the_readme_lists_the_families_without_fused_kernels() -> None:
    table = "".join(re.findall(r"^\| .+ \| no \| .+\n", README.read_text(encoding="utf-8"), re.MULTILINE))
    assert unlisted(table) == set()
    assert unlisted(table.replace("Mochi, ", "")) == {"mochi"}
