"""Reads commands from the pages: README.md, CONTRIBUTING.md, seqpar_demo/ and docs/, without the dated benchmarks.

A comment before a block of commands says who runs it, `<!-- run by FILE -->`, or what it needs (`needs GPUs`,
`needs a download`, `needs Docker`, `needs a cluster`), or in README the name under which `.ci/run` finds it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(
    r"([A-Z]\w*=\S+ )*"
    r"(seqpar (sample|plan|profile|verify|convert|serve|replica|doctor)\b|python3? (-|\w+/)|pytest\b"
    r"|(torchrun|pip|curl|bash|srun|sbatch|ray|hf|mkdocs|docker|kubectl) )"
)
MARK = re.compile(r"<!-- (.+) -->\n*\Z")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?<=\n\n)((?: {4}.*\n|\n)+)")


@dataclass(frozen=True)
class Block:
    """A block with commands. mark: what the comment before it says, or None."""

    page: str
    text: str
    mark: str | None

    @property
    def commands(self) -> list[str]:
        lines = self.text.replace("\\\n", " ").splitlines()
        return [re.sub(r"\s+#.*", "", line).strip() for line in lines if COMMAND.match(line)]


def pages() -> list[Path]:
    docs = sorted((ROOT / "docs").rglob("*.md"))
    others = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "seqpar_demo" / "README.md"]
    return [*others, *(path for path in docs if path.parent.name != "benchmarks")]


def blocks(text: str, page: str) -> Iterator[Block]:
    """Yield the blocks of a page that have commands."""
    fenced = [(match.start(), match[2]) for match in FENCE.finditer(text) if match[1] in ("", "bash")]
    without = FENCE.sub(lambda match: re.sub(r"[^\n]", "x", match[0]), text)  # code in a fence is not indented code
    indented = [
        (match.start(), re.sub(r"^ {4}", "", match[1], flags=re.MULTILINE)) for match in INDENTED.finditer(without)
    ]
    for start, code in sorted(fenced + indented):
        mark = MARK.search(text[:start])
        block = Block(page, code, mark[1] if mark else None)
        if block.commands:
            yield block


def words(command: str) -> list[str]:
    return shlex.split(command.removesuffix("&"))


def every_block() -> list[Block]:
    paths = [(path, str(path.relative_to(ROOT))) for path in pages()]
    return [block for path, name in paths for block in blocks(path.read_text(encoding="utf-8"), name)]
