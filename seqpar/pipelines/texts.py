"""Prompts as tensors: rank 0 encodes each distinct text once, frees the encoders, and keeps what it made.

The denoising loop gives rank 0's tensors to all ranks, as it does with every input. Each prompt is encoded alone, so
that its tensors do not depend on others.
Encoders run once a picture, and the memory of other ranks never holds them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from seqpar.loading.garbage import collect
from seqpar.mesh.mesh import Mesh

Encode = Callable[[str], tuple[Tensor, ...]]


class Texts:
    """The prompts of one model as tensors; it keeps those of the last call, so that they are encoded once.

    shapes: name -> shape of each tensor of a prompt. ready: returns a function that encodes one prompt and holds the
    encoders; None for a model with random weights, for which random numbers stand in for encoded prompts. frees:
    whether nothing else holds these encoders, so that their memory is given back after each call.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        ready: Callable[[], Encode] | None,
        mesh: Mesh,
        dtype: torch.dtype,
        *,
        frees: bool,
    ) -> None:
        self.shapes = dict(shapes)
        self._ready, self._mesh, self._dtype, self._frees = ready, mesh, dtype, frees
        self._known: dict[str, tuple[Tensor, ...]] = {}

    def encode(self, prompts: Sequence[str], on_prompt: Callable[[int], None] = lambda index: None) -> None:
        """Encode these prompts on rank 0, and forget all others; other ranks return at once.

        on_prompt(index): called when a prompt is encoded. Raises ValueError on rank 0 if the encoders do not load.
        """
        if not self._mesh.is_main:
            return
        wanted = list(dict.fromkeys(prompts))
        missing = [text for text in wanted if text not in self._known]
        encoded = {text: self._known[text] for text in wanted if text in self._known}
        if missing:
            encoder = self._stand_in if self._ready is None else self._ready()
            for index, text in enumerate(missing):
                with torch.no_grad():
                    encoded[text] = tuple(x.to(self._mesh.device, self._dtype) for x in encoder(text))
                on_prompt(index)
            del encoder
            if self._frees:
                collect()
        self._known = encoded

    def rows(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Return the tensors by name, with a row for each prompt.

        Only rank 0's values count; other ranks return tensors of the same shapes. The prompts must be encoded.
        """
        if self._mesh.is_main:
            texts = (torch.stack(each) for each in zip(*(self._known[text] for text in prompts), strict=True))
        else:
            shapes = ((len(prompts), *shape) for shape in self.shapes.values())
            texts = (torch.zeros(shape, dtype=self._dtype, device=self._mesh.device) for shape in shapes)
        return dict(zip(self.shapes, texts, strict=True))

    def _stand_in(self, text: str) -> tuple[Tensor, ...]:
        """Return random numbers that depend on the prompt."""
        generator = torch.Generator().manual_seed(zlib.crc32(text.encode()))
        return tuple(torch.randn(shape, generator=generator) for shape in self.shapes.values())


def described(tokens: int, source: object, before: str) -> tuple[str, str]:
    """Return title and text of the summary's line about prompts. source: of the encoders, None for random numbers."""
    if source is None:
        return "text", f"{tokens} tokens of random numbers: no text encoder comes with this model"
    return "text", f"{tokens} tokens a prompt, encoded on rank 0 before {before}"
