"""A plugin of pytest that leaves out cases which name old members of `seqpar`'s folders and no new one.

A case without a member among its parameters runs: it may hold a list of names. Of the cases of one test that name the
same new member, two run: the first and the last, so that the whole is quick. The names of the new
members that have passed tests are printed at the end.
"""

from __future__ import annotations

from collections import defaultdict

import pytest

from tests.support.one_file import members

NEW = {name for names in members().values() for name in names}
PARAMETERS = ("strategy", "transport", "local", "model", "kernel")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the cases of old members alone."""
    kept, groups = set[pytest.Item](), defaultdict[tuple[str, str], list[pytest.Item]](list)
    for item in items:
        named = _named(item)
        kept |= set() if named else {item}
        for member in named & NEW:
            groups[item.nodeid.partition("[")[0], member].append(item)
    for cases in groups.values():
        kept |= {cases[0], cases[-1]}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the new members that were tested."""
    passed = {name for report in terminalreporter.stats.get("passed", ()) for name in NEW if name in report.nodeid}
    terminalreporter.write_line(f"new members tested: {', '.join(sorted(passed))}")


def _named(item: pytest.Item) -> set[str]:
    """Return the members that the parameters of a case name."""
    spec = getattr(item, "callspec", None)
    return {str(spec.params[name]) for name in PARAMETERS if name in spec.params} if spec else set()
