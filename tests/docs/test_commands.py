"""Tests that each command of the pages is run by a test or says what it needs, and that its flags exist."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from torch.distributed.run import main as agent

from seqpar.cli.args import COMMANDS
from seqpar.cli.main import sample
from seqpar.serve.api.command import ServeArgs
from seqpar.types.flags import parsed
from tests.cli.processes import LIMIT_S, SCRIPT, environment, seqpar
from tests.support.forks import Forked
from tests.support.pages import ROOT, Block, blocks, every_block, words
from tests.support.pool import server

pytestmark = pytest.mark.slow

HERE = "tests/docs/test_commands.py"
NEEDS = ("needs GPUs", "needs a download", "needs Docker", "needs a cluster")
GATE = re.findall(r"\bblock (\w+)", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))
MINE = [command for block in every_block() if block.mark == f"run by {HERE}" for command in block.commands]


def who(block: Block) -> str | None:
    """Return who runs a block or what it needs; None if it does not say, or names a file that is not there."""
    mark = block.mark or ""
    runs = mark.removeprefix("run by ")
    is_known = (
        mark in NEEDS or (block.page == "README.md" and mark in GATE) or (runs != mark and (ROOT / runs).is_file())
    )
    return mark if is_known else None


def test_each_command_is_run_or_says_what_it_needs() -> None:
    found = every_block()
    assert [f"{block.page}: {block.commands[0]}" for block in found if who(block) is None] == []
    assert len(found) > 40
    assert sum(who(block) not in NEEDS for block in found) >= 8


@pytest.mark.parametrize(
    "text",
    [
        "text\n\n    seqpar plan --gpus 2\n",
        "```bash\npip install x\n```\n",
        "<!-- run by tests/none.py -->\n```bash\npytest\n```\n",
        "<!-- picture -->\n\n    torchrun x.py\n",
        "text\n\n    docker run x\n",
        "text\n\n    A=1 B=/x sbatch x\n",
        "```\nseqpar doctor\n```\n",
    ],
)
def test_a_command_without_a_test_is_found(text: str) -> None:
    (block,) = blocks(text, "docs/a.md")
    assert who(block) is None


def flags(command: str) -> tuple[type, list[str]] | None:
    """Return the flags of a command of ours and its words; None for other programs and for outlines ([--flag])."""
    _, script, rest = command.partition("launch/sample.py")
    ours = re.search(r"(?:^(?:[A-Z]\w*=\S+ )*seqpar|-m seqpar\.cli) (.+)", command)
    if "[" in command or not (script or ours):
        return None
    if script or not ours:
        return COMMANDS["sample"], words(rest.rstrip("'"))
    name, *given = words(ours[1])
    return {**COMMANDS, "serve": ServeArgs}[name], given


def test_the_flags_of_all_commands_exist() -> None:
    found = [(command, flags(command)) for block in every_block() for command in block.commands]
    ours = [(command, *of) for command, of in found if of is not None]
    assert len(ours) > 80
    for command, kind, given in ours:
        parsed(kind, given, command)


def test_a_flag_that_does_not_exist_is_found() -> None:
    ours = flags("seqpar sample --prompt cat --sise 4")
    assert ours is not None
    with pytest.raises(ValueError, match="--sise"):
        parsed(*ours, "seqpar sample")


@pytest.mark.parametrize("command", [command for command in MINE if command.startswith("seqpar")])
def test_a_command_runs(command: str, tmp_path: Path) -> None:
    given = words(re.sub(r" --(out|steps) \S+", "", command))[1:]
    given += ["--steps", "3"] if given[0] in ("sample", "verify") else []
    given += ["--out", str(tmp_path / "out.png")] if given[0] == "sample" else []
    done = seqpar(*given)
    assert done.returncode == 0, done.stderr
    assert given[0] != "sample" or (tmp_path / "out.png").stat().st_size > 1000


def test_two_machines_make_one_picture(tmp_path: Path) -> None:
    """The two commands of docs/multi-node.md, both on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    commands = [command for command in MINE if command.startswith("torchrun")]
    assert len(commands) == 2
    server()
    nodes = list[Forked]()
    for number, command in enumerate(commands):
        given = command.replace("HOST", "127.0.0.1").replace("29500", str(port)).replace("launch/sample.py", SCRIPT)
        flags_of = [*words(given)[1:], "--out", str(tmp_path / "out.png")]
        output, errors = tmp_path / f"{number}", tmp_path / f"errors{number}"
        nodes.append(Forked(agent, flags_of, environment(), output, errors, sample))
    assert [node.wait(LIMIT_S) for node in nodes] == [0, 0], (tmp_path / "errors0").read_text()
    assert "2 x CPU, gloo" in (tmp_path / "0").read_text()
    assert (tmp_path / "out.png").stat().st_size > 1000
    assert "2 x CPU" not in (tmp_path / "1").read_text()
