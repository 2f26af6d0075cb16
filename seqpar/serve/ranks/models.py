"""The models of a server: all that it knows, and those that are loaded, which one message changes on all ranks.

A change is checked before anything is unloaded. If a model does not load, those before are loaded again; if they do
not, the ranks exit, and the API server starts new ones with the models that were loaded before.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace as with_fields

from seqpar.mesh.watch import LostRankError
from seqpar.planner.predict import GIB
from seqpar.serve.messages import ServedModel
from seqpar.serve.ranks.checked import CheckedModel

if TYPE_CHECKING:
    from seqpar.serve.ranks.loop import LoadedModel


class LoadError(Exception):
    """A model did not load, on any rank; those before are loaded again."""


class Models:
    """The models of a server on one rank; all ranks make the same calls.

    known: before weights load. memory: bytes per rank, of which `ranks` share the host's on CPUs. most: models that are
    loaded at once. swaps: whether a model that is loaded takes the place of those that were used least lately. load:
    loads a model; its facts are given if they were found before.
    """

    def __init__(
        self,
        known: Sequence[CheckedModel],
        memory: int,
        most: int | None,
        swaps: bool,
        load: Callable[[CheckedModel, ServedModel | None], LoadedModel],
    ) -> None:
        self._known = {model.name: model for model in known}
        self._memory, self._most, self._swaps, self._load = memory, most or len(known), swaps, load
        self._loaded: dict[str, LoadedModel] = {}  # the one that was used least lately comes first
        self._idle = dict[str, ServedModel]()  # facts of models that are not loaded
        self._found = dict[tuple[str, float | None], ServedModel]()  # by name and room, which takes seconds
        self._seconds = dict[str, float]()  # that the last load of each took
        for name in self._known if swaps else ():
            self._check_fit([name])

    def first(self) -> list[str]:
        """The models to load at the start: as many as `most`, and with `swaps` no more than fit."""
        names = [*self._known][: self._most]
        while self._swaps and self._needed(names) > self._memory:
            names.pop()
        return names

    def start(self, names: Sequence[str], warm: Callable[[str], None]) -> None:
        """Load the first models; an error ends the ranks. Collective."""
        self._check_fit(names)
        self._place(names, warm)

    @property
    def facts(self) -> tuple[ServedModel, ...]:
        """The models as the API describes them."""
        return tuple(map(self._facts_of, self._known))

    def named(self, text: str) -> str:
        """A text with the models' names in requests in place of their paths."""
        for model in self._known.values():
            text = model.public(text)
        return text

    def use(self, name: str) -> LoadedModel:
        """A loaded model, which was then used last; ValueError for another one."""
        if name not in self._loaded:
            why = "loaded" if name in self._known else "served"
            raise ValueError(
                f"model {name} is not {why}; use one of {', '.join(filter(self._loaded.get, self._known))}"
            )
        model = self._loaded[name] = self._loaded.pop(name)
        return model

    def change(self, load: Sequence[str], unload: Sequence[str], warm: Callable[[str], None]) -> None:
        """Unload models, then load others, all or none of them. warm: called with each one that is loaded. Collective.

        The same error on every rank: ValueError for what cannot be done, LoadError if a model does not load.
        """
        before, reason = [*self._loaded], None
        after = self._planned(load, unload)
        try:
            self._place(after, warm)
        except LostRankError:
            raise
        except (ValueError, OSError, FloatingPointError) as error:  # raised identically on all ranks
            reason = str(error)
        if reason is not None:  # outside of `except`, whose traceback holds what was loaded
            try:
                self._place(before, warm)
            except (ValueError, FloatingPointError) as error:  # no answer to the change: the API server counts on them
                raise RuntimeError(f"the models before do not load again: {error}") from error
            raise LoadError(reason)

    def _planned(self, load: Sequence[str], unload: Sequence[str]) -> list[str]:
        """The models that are loaded after a change; ValueError if it cannot be."""
        for name in (*load, *unload):
            if name not in self._known:
                raise ValueError(f"model {name} is not known; use one of {', '.join(self._known)}")
        names = [name for name in self._loaded if name not in {*load, *unload}]
        new = [name for name in dict.fromkeys(load) if name not in unload]
        while self._swaps and names and (len(names + new) > self._most or self._needed(names + new) > self._memory):
            names.pop(0)
        if len(names + new) > self._most:
            raise ValueError(f"at most {self._most} models are loaded at once; unload some of {', '.join(names)}")
        self._check_fit(names + new)
        return names + new

    def _place(self, names: Sequence[str], warm: Callable[[str], None]) -> None:
        """Unload all other models, and load these."""
        others = [name for name in self._loaded if name not in names]
        for name in others:
            self._loaded.pop(name).close()
        if others:
            gc.collect()  # modules and their hooks refer to each other
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            with suppress(AttributeError):  # of libraries other than glibc, which keeps what is freed
                ctypes.CDLL(None).malloc_trim(0)
        for name in names:
            checked = self._limited(name, names)
            found = self._found.get((name, checked.room))
            if name in self._loaded:
                self._loaded[name].limit(checked, found)
            else:
                begun = time.perf_counter()
                self._loaded[name] = self._load(checked, found)
                warm(name)
                self._seconds[name] = time.perf_counter() - begun
            self._found[name, checked.room] = self._idle[name] = self._loaded[name].facts

    def _limited(self, name: str, names: Sequence[str]) -> CheckedModel:
        """A model with the room that it has beside others. names: the loaded ones, with this one."""
        model = self._known[name]
        alone = (self._memory - model.kept) / GIB
        room = alone - (self._needed(names) - model.memory) / GIB
        return replace(model, room=room, alone=alone if self._swaps else None)

    def _facts_of(self, name: str) -> ServedModel:
        if name in self._loaded:
            facts = self._loaded[name].facts
        else:
            if name not in self._idle:
                alone = self._limited(name, [name])
                self._idle[name] = alone.facts(alone.example.default_pixels)
            facts = with_fields(self._idle[name], loaded=False)
        return with_fields(facts, memory=self._known[name].memory, load_s=self._seconds.get(name))

    def _needed(self, names: Sequence[str]) -> int:
        return sum(self._known[name].memory for name in names)

    def _check_fit(self, names: Sequence[str]) -> None:
        if (needed := self._needed(names)) > self._memory:
            shares = ", ".join(f"{name} {self._known[name].memory / GIB:.1f}" for name in names)
            raise ValueError(
                f"the models need {needed / GIB:.1f} GiB on each rank ({shares}), which has "
                f"{self._memory / GIB:.1f} GiB; serve fewer models, or use more GPUs"
            )
