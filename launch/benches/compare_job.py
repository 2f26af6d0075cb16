"""What the ranks of one checkout run for `launch/benches/compare.py`: they time a work whenever a file asks them to.

`seqpar` comes from the checkout, everything else from the folder that this file is in. So it uses nothing of `seqpar`
but names that every version has: `seqpar.parallelize`, `seqpar.Guidance`, `seqpar.Mesh.from_env` with `device` and
`is_main`; `Files.locate` (with `blueprint.config` and `factor`), `Pipeline.load` and `Pipeline.latents` of
`seqpar.pipelines.classes` and `seqpar.pipelines.unidiffuser`; and `save` of `seqpar.pipelines.pictures`.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

WARM = 5  # calls before timing: the second of a kind is captured, pairs of branches are known after a step
PIECE = 20  # steps of a run of which a step's time is the mean, after its first two
PROMPT = "a house by the sea"


@dataclass(frozen=True)
class Timer:
    """A work that is set up. ms: takes a number of calls and returns this rank's mean ms of one. bits: a digest."""

    ms: Callable[[int], float]
    bits: Callable[[], str]


@dataclass(frozen=True)
class Setting:
    """Where a work runs. small: models with few blocks and heads."""

    seqpar: Any
    device: torch.device
    ranks: int
    small: bool

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def mesh(self, cfg: int = 1, ring: int = 1) -> Any:
        return self.seqpar.Mesh.from_env(cfg=cfg, ring=ring, ulysses=self.ranks // cfg // ring, device=self.device)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def called(self, call: Callable[[], Tensor]) -> Timer:
        """The timer of a call, by the host's clock once the device has done all calls."""
        kept: list[Tensor] = []

        @torch.no_grad()
        def ms(calls: int) -> float:
            call()
            self.wait()
            start = time.perf_counter()
            for _ in range(calls):
                kept[:] = [call()]
            self.wait()
            return 1e3 * (time.perf_counter() - start) / calls

        ms(WARM)
        return Timer(ms, lambda: digest(kept[0]))

    def stepped(self, latents: Callable[[int, Callable[[int], None]], Tensor]) -> Timer:
        """The timer of a step of runs of our own loop. latents: makes a run of so many steps with a callback."""
        kept: list[Tensor] = []

        def run() -> float:
            moments: list[float] = []

            def on_step(index: int) -> None:
                if index in (1, PIECE + 1):
                    self.wait()
                    moments.append(time.perf_counter())

            kept[:] = [latents(PIECE + 2, on_step)]
            return 1e3 * (moments[1] - moments[0]) / PIECE

        def ms(calls: int) -> float:
            runs = -(-calls // PIECE)
            return sum(run() for _ in range(runs)) / runs

        run()
        return Timer(ms, lambda: digest(kept[0]))


# Works ------------------------------------------------------------------------------------------------------------


def call(at: Setting, model: str, how: str = "") -> Timer:
    """A call of a released transformer through `parallelize`.

    how: "cfg" times both branches of guidance, each on half of the ranks, "generic" diffusers' own modules.
    """
    released = import_module("launch.baselines.released").RELEASED[model]
    known = released.small() if at.small else released
    module, arguments = known.build(at.dtype, at.device), known.arguments(at.dtype, at.device)
    at.seqpar.parallelize(module, at.mesh(2 if how == "cfg" else 1), **({"native": False} if how == "generic" else {}))

    def step() -> Tensor:
        branches, latents = [], arguments["hidden_states"].clone()  # new in each step, as in a pipeline
        for name in ("cond", "uncond") if how == "cfg" else ("cond",):
            with module.cache_context(name):
                branches.append(module(**{**arguments, "hidden_states": latents}, return_dict=False)[0])
        return branches[0] if len(branches) == 1 else 2 * branches[0] - branches[1]

    return at.called(step)


def step(at: Setting, model: str, tokens: str, *options: str) -> Timer:
    """A step of a model of classes by our own loop, one picture with guidance.

    options: KEY=VALUE; strategy and transport are names, ring and cfg sizes of axes, eta is a number.
    """
    rooms = import_module("seqpar.pipelines.classes")
    named = dict(option.split("=", 1) for option in options)
    files = rooms.Files.locate("dit-s/8" if at.small else model)
    side = round(int(tokens) ** 0.5) * files.blueprint.config.patch_size * files.factor
    mesh = at.mesh(int(named.pop("cfg", 1)), int(named.pop("ring", 1)))
    told = {"guidance": at.seqpar.Guidance(4.0), "size": (side, side), "eta": float(named.pop("eta", 0.0))}
    pipeline = rooms.Pipeline.load(files, mesh, at.dtype, **named)
    return at.stepped(lambda steps, on_step: pipeline.latents([1], steps=steps, on_step=on_step, **told))


def unidiffuser(at: Setting) -> Timer:
    rooms = import_module("seqpar.pipelines.unidiffuser")
    uvit = import_module("seqpar.loop.models.uvit")
    files = rooms.Files.locate(rooms.Blueprint("unidiffuser-v1", uvit, uvit.SIZES["unidiffuser-v1"]))
    if at.small:
        few = replace(files.blueprint.config, num_layers=2, num_attention_heads=2, sample_size=8)
        files = replace(files, blueprint=replace(files.blueprint, config=few))
    pipeline = rooms.Pipeline.load(files, at.mesh(), at.dtype)
    told = {"guidance": at.seqpar.Guidance(8.0)}
    return at.stepped(lambda steps, on_step: pipeline.latents([PROMPT], steps=steps, on_step=on_step, **told))


def decode(at: Setting, pixels: str) -> Timer:
    side, pipe = int(pixels), flux(at, small_transformer=True)
    at.seqpar.parallelize(pipe, at.mesh(), vae=at.ranks > 1)
    shape = (1, pipe.vae.config.latent_channels, side // 8, side // 8)
    z = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(at.device, at.dtype)
    return at.called(lambda: pipe.vae.decode(z, return_dict=False)[0])


def picture(at: Setting, pixels: str, steps: str = "28") -> Timer:
    side, pipe = int(pixels), flux(at)
    save, main = import_module("seqpar.pipelines.pictures").save, at.mesh().is_main
    at.seqpar.parallelize(pipe)  # on the layout that the planner chooses
    folder = tempfile.mkdtemp(prefix="seqpar-compare-")

    def make() -> Tensor:
        told = {"height": side, "width": side, "num_inference_steps": int(steps), "max_sequence_length": 64}
        image = pipe(PROMPT, generator=torch.Generator().manual_seed(0), **told).images[0]
        if main:
            save(image, Path(folder) / "picture.png", {})
        return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)

    return at.called(make)


def flux(at: Setting, small_transformer: bool = False) -> Any:
    parts, known = import_module("launch.baselines.pipelines"), import_module("launch.baselines.released")
    released = known.RELEASED["flux.1-dev"]
    chosen = released.small() if at.small else released
    if small_transformer and not at.small:
        chosen = replace(released, config={**released.config, "num_layers": 1, "num_single_layers": 1})
    # two versions of FLUX.1 have to fit into 80 GB, and encoders are the same code in both
    few = {**parts.FLUX_SIZES, "t5": {**parts.T5, "num_layers": 2}}
    sizes = parts.SMALL_FLUX if at.small else few
    return parts.flux(chosen.build(at.dtype, at.device), at.dtype, at.device, sizes)


WORKS: dict[str, Callable[..., Timer]] = {
    "call": call,
    "step": step,
    "unidiffuser": unidiffuser,
    "decode": decode,
    "picture": picture,
}


def digest(x: Tensor) -> str:
    return hashlib.sha256(x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


# A rank -----------------------------------------------------------------------------------------------------------


def main(tree: Path, folder: Path, work: str, calls: int, small: bool) -> None:
    """Set the work up, then answer each `ask-N` in the folder by an `answer-N`."""
    sys.path[0] = str(tree)
    seqpar = import_module("seqpar")
    if Path(str(seqpar.__file__)).parents[1].resolve() != tree.resolve():
        raise ValueError(f"got seqpar of {seqpar.__file__}, expected that of {tree}")
    sys.path[0] = str(Path(__file__).parents[2])  # for `launch`; `seqpar` is imported, and its rooms come from the tree
    mesh = seqpar.Mesh.from_env(cfg=1)
    ranks = dist.get_world_size() if dist.is_initialized() else 1  # noqa: TID251
    name, *words = work.split(":")
    timer = WORKS[name](Setting(seqpar, mesh.device, ranks, small), *words)
    number = 0
    while True:
        while not (folder / f"ask-{number}").exists():
            time.sleep(0.01)
        ms = torch.zeros(1, dtype=torch.float64, device=mesh.device)
        if ranks > 1:
            dist.barrier()
        ms += timer.ms(calls) if number else 0.0
        if ranks > 1:
            dist.all_reduce(ms, dist.ReduceOp.MAX)  # the slowest rank counts
        if mesh.is_main:
            (folder / "part").write_text(json.dumps({"ms": float(ms), "digest": timer.bits()}))
            (folder / "part").rename(folder / f"answer-{number}")
        number += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5] == "small")
