"""Tests that docs/schedulers.md matches the installed diffusers, and that common schedulers step on local tokens."""

from __future__ import annotations

from pathlib import Path

import diffusers
import pytest

from docs.tools.schedulers_page import missing, page, row

PAGE = Path(__file__).parents[2] / "docs" / "schedulers.md"


def kept(lines: list[str]) -> list[str]:
    """Lines of what is installed here: the page was made where the packages of all classes were."""
    return [line for line in lines if not line.startswith("|") or line.split("|")[1].strip() not in missing()]


def test_the_page_is_what_the_installed_diffusers_does() -> None:
    committed = PAGE.read_text().splitlines()
    if f"diffusers {diffusers.__version__} " not in committed[2]:
        pytest.skip(f"the page was made with another diffusers than {diffusers.__version__}")
    assert kept(page().splitlines()) == kept(committed)


def test_the_page_was_made_with_the_packages_of_all_classes() -> None:
    """And `NEEDS` names every class that diffusers replaces where its package is missing."""
    assert "is not in diffusers here" not in PAGE.read_text()
    names = {name for name in dir(diffusers) if name.endswith("Scheduler")}
    assert {name for name in names if ".dummy_" in getattr(diffusers, name).__module__} == missing()


def test_every_scheduler_class_has_a_line() -> None:
    lines = PAGE.read_text()
    named = {name for name in dir(diffusers) if name.endswith("Scheduler")}
    if f"diffusers {diffusers.__version__} " in lines:
        assert {line.split("|")[1].strip() for line in lines.splitlines() if "Scheduler |" in line} == named


@pytest.mark.parametrize(
    ("name", "settings", "stepped"),
    [
        ("DPMSolverMultistepScheduler", {}, ("local", "2 states, 2 outputs, residual < 1e-12")),
        ("UniPCMultistepScheduler", {}, ("local", "3 states, 3 outputs, residual < 1e-12")),
        ("EulerDiscreteScheduler", {}, ("local", "1 state, 1 output, residual < 1e-12")),
        ("HeunDiscreteScheduler", {}, ("local", "1 state, 2 outputs, residual < 1e-12")),
        ("DDPMScheduler", {}, ("whole", "because of its clip_sample")),
    ],
)
def test_lines_of_any_diffusers(name: str, settings: dict[str, object], stepped: tuple[str, str]) -> None:
    assert row(name, settings) == stepped


def test_a_scheduler_that_makes_no_latents_is_refused() -> None:
    """Its states are token indices, which every rank would draw differently."""
    assert row("EntropyBoundScheduler", {})[0] == "refused"
