"""The denoising loop: it predicts, guides and steps on this rank's tokens; `seqpar.loop.run` does the work."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any, Unpack

import numpy as np
import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from seqpar.loading.clean import check_clean
from seqpar.loop.arguments import check_model, check_request, check_settings
from seqpar.loop.checks import why_not_captured
from seqpar.loop.distributed import DistributedDiT
from seqpar.loop.request import Course, Request, Settings, course, rank_0s
from seqpar.loop.run import Run
from seqpar.loop.steppers import Decision, decide
from seqpar.loop.streams import Prompt
from seqpar.types.arguments import check_kind
from seqpar.types.protocols import state_dtype

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)  # repr tells all of these
Noise = Tensor | Mapping[str, Tensor]


def sample(
    dit: DistributedDiT,
    scheduler: Any,
    noise: Noise,
    prompt: Prompt,
    *,
    graph: bool = True,
    on_step: Callable[[int], None] = lambda index: None,
    **settings: Unpack[Settings],
) -> Tensor:
    """Denoise noise into latents (N, C, H, W) of the same shape, complete and equal on every rank.

    scheduler, noise, prompt and settings (steps, guidance, eta, generator ...): see `Request`. Every rank uses rank 0's
    values; those of other ranks must have the same shapes, dtypes and number of steps.
    graph: replay the step as a CUDA graph if possible (`Run.why_no_graph` gives the reason if not).
    on_step(index): called when a step has been queued; on a GPU the step may still be running.
    Raises ValueError for arguments that do not fit, and FloatingPointError if the latents stop being finite (it names
    the step).
    """
    with Sampler(dit, graph=graph) as sampler:
        return sampler(scheduler, noise, prompt, on_step=on_step, **settings)


class Sampler:
    """Reusable sampler: keeps buffers and the CUDA graph between compatible calls.

    Calls are compatible if shapes, number of steps, kind of guidance and number of distinct prompts are the same;
    noise, prompts, schedule and (in place) weights may change. Any other call frees the last run and starts a new one.
    Release it (or use it in a `with` block) before the process group ends, because a graph may hold NCCL's exchanges.
    When it wins: for repeated calls; each one saves a capture, which costs about three steps, a tenth of a run of 25.
    """

    def __init__(self, dit: DistributedDiT, *, graph: bool = True) -> None:
        check_model(dit)
        check_kind("graph", graph, bool, expected="True or False")
        self.dit = dit
        self._graph = graph
        self._run: Run | None = None
        self._kind: object = None
        self._decision: tuple[object, Decision] | None = None
        self._latents: dict[str, Tensor] | None = None
        self._shown: Collection[int] = ()
        self._on_clean: Callable[[int, Tensor], None] = lambda index, latents: None

    @contextmanager
    def estimating(self, evaluations: Collection[int], on_clean: Callable[[int, Tensor], None]) -> Iterator[None]:
        """While it is entered, calls estimate the clean latents after these evaluations, by their index.

        on_clean(index, latents): called on every rank, with the first stream's estimate, complete. Only these
        evaluations are gathered; the result has the same bits. Every rank must enter it with the same evaluations.
        Calls raise ValueError for a scheduler whose clean latents are not known (`seqpar.loading.clean`).
        """
        before = self._shown, self._on_clean
        self._shown, self._on_clean = evaluations, on_clean
        try:
            yield
        finally:
            self._shown, self._on_clean = before

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
        **settings: Unpack[Settings],
    ) -> Tensor:
        """Denoise noise into latents; see `sample` for the arguments and the errors."""
        self._latents = None
        check_settings(self.dit, settings)
        request = Request(scheduler, noise, prompt, **settings)
        check_request(self.dit, request, on_step)
        if self._shown:
            self.dit.mesh.together(lambda: check_clean(scheduler))
        agreed = course(rank_0s(self.dit.mesh, request), self._decided)
        run, captured = self._ready(agreed), self._graph and why_not_captured(self.dit, agreed.decision) is None
        for index in range(len(agreed.timesteps_S)):
            self._step(run, index, captured)
            on_step(index)
        self.dit.wait()  # before the next collective, which would wait for a rank that has died
        # copies, because without a gather a stream of tokens is the buffer that the next call writes to
        self._latents = {name: x.clone() for name, x in run.latents().items()}
        check_finite(run.first_bad(), run.timesteps)
        return self._latents[self.dit.model.STATE[0]]

    def _step(self, run: Run, index: int, captured: bool) -> None:
        """Queue a step, as a graph if it can be captured, and estimate its clean latents where that is wished."""
        with _checked_before(index):
            if captured:
                run.capture()
            before = run.tokens.clone() if index in self._shown else None
            run.step()
        if before is not None:
            self.dit.wait()  # before a collective, as at the end
            self._on_clean(index, run.clean(before))

    def _decided(self, scheduler: Any, options: Mapping[str, Any], begin: int) -> Decision:
        """Return what `decide` returns, kept for the next call with an equal scheduler.

        Tracing 50 steps takes 60 ms, in which the GPU would wait for the host.
        """
        key = type(scheduler), _written(vars(scheduler)), _written(sorted(options.items())), begin
        if self._decision is None or self._decision[0] != key:
            self._decision = key, decide(scheduler, options, begin)
        return self._decision[1]

    def streams(self) -> dict[str, Tensor]:
        """Return every stream of the state after the last call, complete on every rank."""
        if self._latents is None:
            raise ValueError("got a sampler without a run, expected one that was called")
        return dict(self._latents)

    def _ready(self, course: Course) -> Run:
        """Return the kept run, restarted, if it can serve this course on every rank; otherwise a new run."""
        kind = (course.kind, self.dit.state)
        kept = all(self.dit.mesh.collect(self._run is not None and self._kind == kind, bool))
        if self._run is None or not kept or not self._run.restart(course):
            self.release()
            self._run, self._kind = Run(self.dit, course), kind
        return self._run

    def release(self) -> None:
        """Free the kept run with its buffers and CUDA graph."""
        if self._run is not None:
            self._run.release()
        self._run = self._kind = self._latents = None


@contextmanager
def _checked_before(index: int) -> Iterator[None]:
    """Make a ValueError of a step a RuntimeError: a run's arguments are checked before, so that no caller is to blame.

    The command counts a ValueError as the user's mistake (`seqpar.cli.exits`).
    """
    try:
        yield
    except ValueError as error:
        raise RuntimeError(f"step {index + 1} failed: {error}") from error


def draw_noise(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return noise in fp32, drawn on the CPU for all images at once: the same bits for any number and kind of ranks.

    dtype: in which it is drawn. Some versions of torch draw other numbers in bf16 than in fp32 from the same seed.
    """
    return randn_tensor(shape, generator=generator, device=torch.device("cpu"), dtype=dtype).to(state_dtype(dtype))


def _written(value: Any) -> Any:
    """Return what is equal only for equal values, and for a value of unknown type what equals nothing else."""
    if isinstance(value, Mapping):
        return [(_written(name), _written(each)) for name, each in value.items()]
    if isinstance(value, (list, tuple)):
        return [_written(each) for each in value]
    if isinstance(value, Tensor):
        bits = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return value.dtype, tuple(value.shape), bits.numpy().tobytes()
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, FunctionType) and value.__closure__ is None:
        return value
    return (type(value), repr(value)) if type(value) in PLAIN else object()


def digest(latents: Tensor) -> str:
    """Return 16 hex digits of a hash over all bits, to compare runs on different meshes or machines."""
    return hashlib.sha256(latents.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def check_finite(first_bad: int, timesteps: Tensor) -> None:
    """Raise FloatingPointError if a step produced NaN or infinity.

    first_bad: the step's index, or the number of steps if none did.
    """
    if first_bad < len(timesteps):
        raise FloatingPointError(
            f"latents stopped being finite at step {first_bad + 1} of {len(timesteps)} (timestep "
            f"{timesteps[first_bad].item():g}); try dtype fp32, a lower guidance, or check the weights"
        )
