"""One server without keys for all tests that leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.front import Running, running


@pytest.fixture(scope="session")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("ranks"), "--queue", "3", "--deadline-s", "100") as started:
        yield started
