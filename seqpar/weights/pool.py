"""The threads of one rank that read a checkpoint: straight to the device, converted there, with a look for NaN.

Reading goes on in the threads while the caller does other work, such as giving what has been read to other ranks.
`seqpar.weights.staging` brings a tensor to the device.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from torch import Tensor

from seqpar.types.keys import KeyMap
from seqpar.weights.checkpoint import Checkpoint
from seqpar.weights.staging import Files, Staging

READERS = 8  # threads a rank at most: one copies less from the page cache, or asks less of a disk, than a GPU takes


@dataclass(frozen=True)
class Reading:
    """Tensors that the threads of a pool read. futures: those not asked for yet. dtypes: those that they get."""

    pool: Pool
    keys: KeyMap
    futures: dict[str, Future[tuple[Tensor, Tensor]]]
    dtypes: Mapping[str, torch.dtype]

    def tensors(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return these tensors on the device, and forget them; ValueError if one does not load or is not finite."""
        pool, results = self.pool, {name: self.futures.pop(name).result() for name in names}
        if pool.device.type == "cuda":
            with pool.told(["its weights"]):
                torch.cuda.synchronize(pool.device)  # an error of a copy is raised here, not by a broadcast
        self._check_finite({name: total for name, (_, total) in results.items()})
        return {name: tensor for name, (tensor, _) in results.items()}

    def _check_finite(self, totals: Mapping[str, Tensor]) -> None:
        """Raise ValueError for the first tensor whose sum is not finite: NaN and infinity stay in a sum."""
        finite = torch.stack([total.double() for total in totals.values()]).isfinite().tolist() if totals else []
        bad = next((name for name, right in zip(totals, finite, strict=True) if not right), None)
        if bad is not None:
            what = f"NaN or infinity in {', '.join(self.keys.sources[bad].keys)}"
            dtype = str(self.dtypes[bad]).removeprefix("torch.")
            expected = f"finite weights in {dtype}; copy the file again, or name another"
            raise ValueError(f"{self.pool.checkpoint.name}: got {what}, expected {expected}")


class Pool:
    """The threads of one rank that read a checkpoint, each with its own staging buffers.

    A context manager, which ends the threads. They copy and convert on the device and never call a collective.
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device, ranks: int) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.checkpoint, self.device = checkpoint, device
        self._local = threading.local()
        # a thread without a core of its own only takes turns; on the CPU an operation has its own threads
        cores = len(os.sched_getaffinity(0)) // ranks
        count = max(1, min(READERS, cores)) if device.type == "cuda" else 1
        self._threads, self._files = ThreadPoolExecutor(count), Files()

    def __enter__(self) -> Pool:
        """Return this pool."""
        return self

    def __exit__(self, *error: object) -> None:
        """End the threads; what was not begun is dropped."""
        with self._files:
            self._threads.shutdown(cancel_futures=True)

    def check_repeats(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Raise ValueError if a key differs from the one whose values it must have."""

        def equal_values(pair: tuple[str, str]) -> bool:
            with self.told(pair):
                one, other = (self._staging().fetch(self.checkpoint, key) for key in pair)
                return torch.equal(one, other)

        same = self._threads.map(equal_values, pairs)
        for (key, twin), equal in zip(pairs, same, strict=True):
            if not equal:
                raise ValueError(
                    f"{self.checkpoint.name}: {key} differs from {twin}, expected equal tensors; such a model "
                    f"conditions each block differently, which is not implemented"
                )

    def begin(self, names: Sequence[str], keys: KeyMap, like: Mapping[str, Tensor]) -> Reading:
        """Let the threads read the tensors of these names, in their order. like: name -> one of the dtype it gets."""

        def made(name: str) -> tuple[Tensor, Tensor]:
            source, dtype = keys.sources[name], like[name].dtype
            with self.told(source.keys):
                parts = (self._staging().fetch(self.checkpoint, key, dtype) for key in source.keys)
                parameter = source.combine(*parts).contiguous()
                return parameter, parameter.sum(dtype=torch.promote_types(dtype, torch.float32))

        futures = {name: self._threads.submit(made, name) for name in names}
        return Reading(self, keys, futures, {name: like[name].dtype for name in names})

    @contextmanager
    def told(self, keys: Sequence[str]) -> Iterator[None]:
        """Turn errors of reading and combining into ValueError, which `Mesh.together` raises on every rank."""
        try:
            yield
        except (SafetensorError, RuntimeError, IndexError) as error:
            raise ValueError(f"{self.checkpoint.name}: got {', '.join(keys)}, which do not load: {error}") from error

    def _staging(self) -> Staging:
        """Return the buffers of this thread, made when it first reads: no initializer of threads can tell its error.

        Without its device, a thread would open a context on the first GPU.
        """
        if not hasattr(self._local, "staging"):
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            self._local.staging = Staging(self.device, self._files)
        return self._local.staging
