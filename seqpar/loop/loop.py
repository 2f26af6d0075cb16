"""The denoising loop: `sample` for one call, `Sampler` for repeated ones; and the noise that they start from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import numpy as np
import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from seqpar._moved import successors
from seqpar.loading.schedulers import check_clean
from seqpar.loop.distributed import DistributedDiT
from seqpar.loop.interface import Prompt
from seqpar.loop.request import Noise, Request, check_request, check_settings, course, rank_0s, why_not_captured
from seqpar.loop.run import Run
from seqpar.loop.steppers import Decision, decide
from seqpar.types.arguments import check_kind
from seqpar.types.protocols import state_dtype


@successors
def sample(
    dit: DistributedDiT,
    scheduler: Any,
    noise: Noise,
    prompt: Prompt,
    *,
    graph: bool = True,
    on_step: Callable[[int], None] = lambda index: None,
    **settings: Any,
) -> Tensor:
    """Denoise noise into latents (N, C, H, W) of the same shape, complete and equal on every rank.

    scheduler, noise, prompt, settings (steps, guidance, eta, generator ...): the fields of `Request`. Every rank uses
    rank 0's values; those of other ranks must have the same shapes, dtypes and number of steps.
    graph: replay the step as a CUDA graph if possible (`Run.why_no_graph` gives the reason if not).
    on_step(index): called when a step has been queued; on a GPU the step may still be running.
    Raises ValueError for arguments that do not fit, and FloatingPointError, with the step, if the latents stop being
    finite.
    """
    with Sampler(dit, graph=graph) as sampler:
        return sampler(scheduler, noise, prompt, on_step=on_step, **settings)


class Sampler:
    """Reusable sampler: keeps buffers and the CUDA graph between compatible calls.

    Calls are compatible if shapes, number of steps, kind of guidance and number of distinct prompts are the same;
    noise, prompts, schedule and (in place) weights may change. Any other call frees the last run and starts a new one.
    Release it (or use it in a `with` block) before the process group ends, because a graph may hold NCCL's exchanges.
    Each compatible call saves a capture, about three steps.
    """

    def __init__(self, dit: DistributedDiT, *, graph: bool = True) -> None:
        check_kind("dit", dit, DistributedDiT, expected="a seqpar.DistributedDiT; make one of the model")
        check_kind("graph", graph, bool, expected="True or False")
        self.dit = dit
        self._graph = graph
        self._run: Run | None = None
        self._kind: object = None
        self._decision: tuple[object, Decision] | None = None
        self._latents: dict[str, Tensor] | None = None
        self._previews: Collection[int] = ()
        self._on_clean: Callable[[int, Tensor], None] = lambda index, latents: None

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    @torch.inference_mode(False)  # buffers made here must serve calls outside of it, too
    @torch.no_grad()
    def __call__(
        self,
        scheduler: Any,
        noise: Noise,
        prompt: Prompt,
        *,
        on_step: Callable[[int], None] = lambda index: None,
        **settings: Any,
    ) -> Tensor:
        """Denoise noise into latents; see `sample` for the arguments and the errors."""
        self._latents = None

        # 1. check the arguments of all ranks; rank 0's request and its schedule
        check_settings(self.dit, settings)
        request = Request(scheduler, noise, prompt, **settings)
        check_request(self.dit, request, on_step)
        if self._previews:
            self.dit.mesh.on_all_ranks(lambda: check_clean(scheduler))
        agreed = course(rank_0s(self.dit.mesh, request), self._decided)

        # 2. the last run, restarted, if it can serve this request on every rank; otherwise a new one
        kind = (agreed.kind, self.dit.state)
        reusable = all(self.dit.mesh.collect(self._run is not None and self._kind == kind, bool))
        if self._run is None or not reusable or not self._run.restart(agreed):
            self.release()
            self._run, self._kind = Run(self.dit, agreed), kind
        run, captured = self._run, self._graph and why_not_captured(self.dit, agreed.decision) is None

        # 3. the steps, on this rank's tokens
        for index in range(len(agreed.timesteps_S)):
            try:
                if captured:
                    run.capture()
                before = run.tokens.clone() if index in self._previews else None
                run.step()
            except ValueError as error:  # arguments were checked, so it is not the caller's
                raise RuntimeError(f"step {index + 1} failed: {error}") from error
            if before is not None:
                self.dit.wait()  # before a collective, as below
                self._on_clean(index, run.clean(before))
            on_step(index)

        # 4. the latents, gathered
        self.dit.wait()  # before the next collective, which would wait for a rank that has died
        # copies, because without a gather a stream of tokens is the buffer that the next call writes to
        self._latents = {name: x.clone() for name, x in run.latents().items()}
        if (bad := run.first_bad()) < len(run.timesteps):
            raise FloatingPointError(
                f"latents stopped being finite at step {bad + 1} of {len(run.timesteps)} (timestep "
                f"{run.timesteps[bad].item():g}); try dtype fp32, a lower guidance, or check the weights"
            )
        return self._latents[self.dit.model.STATE[0]]

    def streams(self) -> dict[str, Tensor]:
        """The denoised streams after the last call, complete on every rank."""
        if self._latents is None:
            raise ValueError("this sampler has no run yet; call it first")
        return dict(self._latents)

    @contextmanager
    def estimating(self, evaluations: Collection[int], on_clean: Callable[[int, Tensor], None]) -> Iterator[None]:
        """While entered, calls estimate the clean latents after these evaluations, by their index.

        on_clean(index, latents): called on every rank, with the first stream's estimate, complete. Only these
        evaluations are gathered; the result has the same bits. Calls raise ValueError for a scheduler whose clean
        latents are unknown (`seqpar.loading.schedulers`). Collective: enter on all ranks with the same evaluations.
        """
        before = self._previews, self._on_clean
        self._previews, self._on_clean = evaluations, on_clean
        try:
            yield
        finally:
            self._previews, self._on_clean = before

    def release(self) -> None:
        """Free the last run with its buffers and CUDA graph."""
        if self._run is not None:
            self._run.release()
        self._run = self._kind = self._latents = None

    def _decided(self, scheduler: Any, options: Mapping[str, Any]) -> Decision:
        """`decide`, cached for an equal scheduler: tracing 50 steps takes 60 ms, in which the GPU would idle."""
        key = type(scheduler), _value(vars(scheduler)), _value(sorted(options.items()))
        if self._decision is None or self._decision[0] != key:
            self._decision = key, decide(scheduler, options)
        return self._decision[1]


PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)  # equal if their repr is


def _value(value: Any) -> Any:
    """An object that is equal only for equal values, and for a value of unknown type equal to nothing else."""
    if isinstance(value, Mapping):
        return [(_value(name), _value(item)) for name, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [_value(item) for item in value]
    if isinstance(value, Tensor):
        bits = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return value.dtype, tuple(value.shape), bits.numpy().tobytes()
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, FunctionType) and value.__closure__ is None:
        return value
    return (type(value), repr(value)) if type(value) in PLAIN else object()


def digest(latents: Tensor) -> str:
    """16 hex digits of a hash over all bits, to compare runs on different meshes or machines."""
    return hashlib.sha256(latents.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


# Noise -------------------------------------------------------------------------------------------------------------


def draw_noise(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """Noise in fp32, drawn on the CPU for all images at once: the same bits on any number and kind of ranks.

    dtype: in which it is drawn. Some versions of torch draw other numbers in bf16 than in fp32 from the same seed.
    """
    return randn_tensor(shape, generator=generator, device=torch.device("cpu"), dtype=dtype).to(state_dtype(dtype))


def draw_steps(
    shapes: Mapping[str, tuple[int, ...]], count: int, generator: torch.Generator, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Noise (count, *shape) of each stream, by `count` turns of `draw_noise` for all streams."""
    turns = [{name: draw_noise(shape, generator, dtype) for name, shape in shapes.items()} for _ in range(count)]
    return {name: torch.stack([turn[name] for turn in turns]) for name in shapes}
