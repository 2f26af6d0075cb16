"""Writes docs/benchmarks/index.md from the result lines beside it: a chart, a table of peers, a table per model.

python -m docs.tools.benchmarks_page --write
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
PAGE = FOLDER / "index.md"
BENCHES = ("calls", "scale")
INTRODUCTION = """# Benchmarks

<picture>
<source media="(max-width: 600px) and (prefers-color-scheme: dark)" srcset="../pictures/speed-narrow-dark.svg">
<source media="(max-width: 600px)" srcset="../pictures/speed-narrow-light.svg">
<source media="(prefers-color-scheme: dark)" srcset="../pictures/speed-wide-dark.svg">
<img src="../pictures/speed-wide-light.svg" alt="Seconds of denoising of four models on 1, 2 and 4 GPUs">
</picture>

A bar is the measured time of a call times the calls of a run, without text encoders and VAE, with random weights of the
released sizes. Bars of seqpar and a peer in bf16 are of one machine and day, and one group has one kind of GPUs. fp8 is
`--precision fp8` alone, with attention in bf16. *SGLang was not run: its bars are
[figures that it published](#published-by-others), which include the scheduler's steps. [How fast on
1 to 8 GPUs](../speed.md). Start-up, memory and serving are on the pages of each date ([list](#all-pages)).

"""
TABLES = """## By model

One table per model, newest first. Times are medians in milliseconds, in bf16 with random weights: of a
call of the transformer for models of diffusers, of a step with guidance for DiT and Large-DiT.

- *Other* is the fastest of diffusers' own engine, plain Ulysses and cache-dit in the same file of lines;
  where its run was another one on another machine of the same kind, the page says so.
- *x ceiling* is our time over that of a rank's products by cuBLAS and its attention alone.
- Times of different dates or kinds of GPUs do not compare; their ratios do. An empty cell was not measured.
- "modulation from a table": FLUX.1's own loop, until November 24, computed modulation once per run, outside of a call.
- A date leads to its page, which also says what lost. A command is that of the commit on the page.
"""
PEERS = """## Beside other engines, on two GPUs

Milliseconds per transformer call, bf16, random weights of the released sizes. The best peer is the fastest run of
diffusers' context parallelism or cache-dit, with compiled blocks in a CUDA graph, in the same file of lines. For
HunyuanVideo and Krea 2, seqpar skips the padding of the prompt, which the peers compute. Guided: both branches of
guidance, seqpar's on one GPU each. SGLang, vLLM-Omni and xDiT were not run.

"""
OTHERS = """## Published by others

Not measured here: other machines, prompts and versions than ours. SGLang's CI compares its runs with these values.

| engine | model | GPUs | steps | denoising, s | what |
| --- | --- | --- | ---: | ---: | --- |
"""
AGAIN = """## Measure again

Each table lists the commands that made its lines; `launch/bench.py COMMAND --help` has their flags. They print lines of
JSON, which a page's `.jsonl` collects; then `python -m docs.tools.benchmarks_page --write` and
`python -m docs.tools.speed_chart --write` update this page and the chart.

"""
PUBLISHED = FOLDER / "published.jsonl"
# models of the table of peers; Chroma is left out: its peers run without a CUDA graph, at the speed of the host
TITLES = {
    "cogvideox-5b": "CogVideoX-5B",
    "flux.1-dev": "FLUX.1-dev",
    "flux.2-dev": "FLUX.2-dev",
    "hunyuan-video": "HunyuanVideo",
    "krea-2-prompt": "Krea 2",
    "ltx-2": "LTX-2",
    "ltx-video-2b": "LTX-Video 2B",
    "ltx-video-13b": "LTX-Video 13B",
    "qwen-image": "Qwen-Image",
    "wan2.1-14b": "Wan 2.1 14B",
    "wan2.2-14b": "Wan 2.2 14B",
    "wan2.2-ti2v-5b": "Wan 2.2 5B",
    "z-image": "Z-Image",
}
SPEED_HEAD = """| model | tokens | GPUs | date | best peer | ms | seqpar | speedup | x ceiling |
| --- | --- | --- | --- | --- | ---: | ---: | ---: | ---: |
"""
HEAD = "| date | GPUs | work | seqpar, ms | other, ms | gain | x ceiling | command |"


@dataclass(frozen=True)
class Row:
    """The fastest line of seqpar and of a peer for one work, in one file."""

    file: Path
    gpus: int
    gpu: str
    work: str
    ours: Mapping[str, Any]
    other: Mapping[str, Any] | None
    ceiling: float | None


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of calls and steps of one picture that have a time, but for those of exact mode."""
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        case = line.get("case")
        timed = line.get("bench") in BENCHES and isinstance(case, dict) and "median" in (line.get("ms") or {})
        if timed and case.get("images", 1) == 1 and not any(map(case.get, ("masked", "layers", "exact"))):
            yield line


def rows(path: Path) -> dict[str, list[Row]]:
    works = defaultdict[tuple[Any, ...], dict[str, list[dict[str, Any]]]](lambda: defaultdict(list))
    for line in lines(path):
        case = line["case"]
        gpu = line["env"]["gpu"].removeprefix("NVIDIA ").split()[0]
        works[case["model"], line["gpus"], gpu, _work(case)][case["kind"]].append(line)
    found = defaultdict[str, list[Row]](list)
    for (model, gpus, gpu, work), kinds in works.items():
        if ours := _fastest(kinds["ours"]):
            row = Row(path, gpus, gpu, work, ours, _fastest(kinds["peer"]), _over(ours, kinds["ceiling"]))
            found[model].append(row)
    return found


def _work(case: Mapping[str, Any]) -> str:
    text = f" + {case['text']}" if case.get("text") else ""
    branches = ", both branches" if "both branches" in case["way"] else ""
    return f"{case['tokens']:,}{text} tokens{branches}{eight_bits(case)}"


def eight_bits(case: Mapping[str, Any]) -> str:
    """Return "", ", fp8" for `--precision fp8`, or ", fp8, attention fp8" with `--local-attention fp8`, too."""
    attention = ", attention fp8" if "attention fp8" in case["way"] else ""
    return (f", {case['precision']}" if case.get("precision") else "") + attention


def _fastest(of: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    return min(of, key=lambda line: line["ms"]["median"], default=None)


def _over(line: Mapping[str, Any], ceilings: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the time over the ceiling: what the bench found beside it, or that of the same layout."""
    if (over := line.get("over", line.get("over_ceiling"))) is not None:
        return over
    same = [x["ms"]["median"] for x in ceilings if x["case"].get("layout", "") == line["case"].get("layout")]
    return line["ms"]["median"] / min(same) if same else None


def newest(pattern: str) -> list[Path]:
    """Return the files of benchmarks of this pattern, those of the last date first, of one date the longer name."""
    return sorted(FOLDER.glob(pattern), key=lambda path: path.stem, reverse=True)


def page() -> str:
    """Return the page of all lines."""
    models = defaultdict[str, list[Row]](list)
    for path in newest("*.jsonl"):
        for model, added in rows(path).items():
            models[model] += sorted(added, key=lambda row: (row.work, row.gpus))
    tables = [TABLES, *(_section(model, of) for model, of in _newest_first(models))]
    pages = [(path.name, _title(path)) for path in newest("2*.md")]
    head = INTRODUCTION + PEERS + speed() + "\n" + OTHERS + published() + "\n" + AGAIN
    return "\n".join([head, *tables, "## All pages\n", *(f"- [{title}]({name})" for name, title in pages)]) + "\n"


def published() -> str:
    """Return a row for each figure of other projects."""
    found = map(json.loads, PUBLISHED.read_text(encoding="utf-8").splitlines())
    return "".join(
        f"| {line['engine']} | {line['model']} | {line['gpus']} x {line['gpu']} | {line['steps']} | "
        f"{line['denoising_s']:.4g} | [{line['what']}]({line['source']}) |\n"
        for line in found
    )


def speed() -> str:
    """Return the table of peers: each work's last run on two GPUs beside a peer in a CUDA graph, largest gain first."""
    newest_of = dict[tuple[str, str], Row]()
    for path in newest("*.jsonl"):
        for model, of in rows(path).items():
            if any(row.ours["case"].get("precision") for row in of):
                continue  # its rows in bf16 are only what 8 bits are compared with
            for row in of:
                if model in TITLES and row.gpus == 2:
                    newest_of.setdefault((TITLES[model], row.work), row)
    gains = [
        (row.other["ms"]["median"] / row.ours["ms"]["median"], title, row)
        for (title, _), row in newest_of.items()
        if row.other and "graph" in row.other["case"]["way"]
    ]
    return SPEED_HEAD + "".join(_speed_row(*each) for each in sorted(gains, key=lambda gain: -gain[0]))


def _speed_row(gain: float, title: str, row: Row) -> str:
    assert row.other
    peer, ours = (
        f"{ms:,.{0 if ms >= 1000 else 1}f}" for ms in (line["ms"]["median"] for line in (row.other, row.ours))
    )
    tokens, _, branches = row.work.partition(" tokens, ")
    day = date.fromisoformat(row.file.name[:10])
    cells = (
        f"{title}, guided" if branches else title,
        tokens.removesuffix(" tokens"),
        row.gpu,
        f"[{day:%b} {day.day}]({_page_of(row.file)})",
        row.other["case"]["way"].split()[0],
        *(peer, ours, f"{gain:.2f}", f"{row.ceiling:.2f}"),
    )
    return f"| {' | '.join(cells)} |\n"


def _newest_first(models: Mapping[str, list[Row]]) -> list[tuple[str, list[Row]]]:
    """Return models, those that were measured last first, and of one date in the order of their names."""
    by_name = sorted(models.items())
    return sorted(by_name, key=lambda pair: pair[1][0].file.name[:10], reverse=True)


def _section(model: str, of: list[Row]) -> str:
    """Return the table of a model and, below it, the commands that it numbers."""
    commands = list(dict.fromkeys(row.ours["command"] for row in of))
    rows_of = "".join(_cells(row, 1 + commands.index(row.ours["command"])) for row in of)
    listed = "".join(f"{number}. `{command}`\n" for number, command in enumerate(commands, 1))
    return f"## {model}\n\n{HEAD}\n|{' --- |' * (HEAD.count('|') - 1)}\n{rows_of}\n{listed}"


def _cells(row: Row, command: int) -> str:
    ours, other = (_timed(line) if line else "" for line in (row.ours, row.other))
    gain = f"{row.other['ms']['median'] / row.ours['ms']['median']:.2f} x" if row.other else ""
    ceiling = f"{row.ceiling:.2f}" if row.ceiling else ""
    date = f"[{row.file.name[:10]}]({_page_of(row.file)})"
    cells = (date, f"{row.gpus} x {row.gpu}", row.work, f"**{ours.replace(' ', '** ', 1)}", other, gain, ceiling)
    return f"| {' | '.join(cells)} | {command} |\n"


def _timed(line: Mapping[str, Any]) -> str:
    return f"{line['ms']['median']:.4g} {line['case']['way']}"


def _page_of(lines_of: Path) -> str:
    """Return the page that has the longest common name with a file of lines, or the file itself."""
    names = [path.name for path in FOLDER.glob("2*.md") if lines_of.stem.startswith(path.stem)]
    return max(names, key=len, default=lines_of.name)


def _title(path: Path) -> str:
    return path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page())
