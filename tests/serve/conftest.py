"""A front without keys for all tests of a file that leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.front import Running, running


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Return a front that is ready, with the flags that tests of a file have in common."""
    with running(tmp_path_factory.mktemp("ranks"), "--queue", "3", "--deadline-s", "100") as started:
        yield started
