"""What 8 bits need to know of a transformer: the means of its GEMMs' inputs, and which GEMMs may accumulate fast.

They are measured once, by runs of the whole model in its own dtype on every rank before its tokens are split, and rank
0's numbers are everybody's. So they are the same on any number of ranks, and no request changes them. Any fixed vector
may be taken out of an input, because its product is put back. Where no run can be made, nothing is taken out, and all
GEMMs accumulate in fp32.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any, Literal, get_args

import diffusers
import torch
from diffusers.utils import logging
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from seqpar.families._find import BLOCKS, needs_picture, takes_one_prompt, takes_several_images
from seqpar.families._matrix8 import centre_product
from seqpar.families._modular import is_modular, parameters_of
from seqpar.kernels.rows8 import Rounding, product8, round_rows
from seqpar.kernels.weight8 import Weight8, narrowed, original
from seqpar.loading.errors import context
from seqpar.loading.names import errors_only
from seqpar.loading.parking import bring
from seqpar.mesh import exact
from seqpar.mesh.inputs import streams_of_rank_0
from seqpar.mesh.mesh import Mesh
from seqpar.planner.rates import cache_folder, keep
from seqpar.transformer import lora as adapters
from seqpar.transformer.attention8 import MEANS, MOST, rounding_of, watched
from seqpar.transformer.internals import without_bar
from seqpar.types.protocols import Qkv8, state_dtype
from seqpar.types.say import say

Precision = Literal["fp8"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
PROMPTS = (
    "A photograph of a red fox in the snow beside a wooden fence, in the light of the evening",
    "An open notebook on a desk, with a drawing of a bicycle and the words: do not forget the milk",
)
STEPS = 4
SIZES = {"height": 512, "width": 512, "num_frames": 17}
"""The most of the calibration's images and videos, where a pipeline takes them: means need few tokens."""
ERRORS, PRODUCT = "|errors", "|product"  # after a GEMM's name in the cache
MORE = {"mask_image", "control_image", "layers"}  # what a pipeline needs though its call has a default for it
SAMPLE, CALLS = 16, 16  # rows of an input that are kept of each of the first calls, to compare the ways to accumulate
FAST = 5e-3
"""The largest error of a fast sum, relative to the product's rms: a seventh of what rounding to 8 bits costs alone."""
ROUGH = 0.1
"""The largest error of rounding, relative to the product's rms: 0.04 for normal numbers, more with outlier channels."""


@dataclass(frozen=True)
class Calibration:
    """The mean of each channel of a GEMM's input, (E,) fp32, by block and matrix.

    products: of these means with the weights before they were rounded, (F,), where weights are stored in 8 bits. fast:
    the GEMMs with fast sums. rough: GEMMs that keep the weights' dtype, because rounding changes them too much. kept:
    GEMMs that keep it for a budget (`seqpar.transformer.budget`). errors: what rounding changes, relative to the
    product's rms. weights: names the model's weights as they were loaded, and the GPU and libraries, for budgets.
    attention: how attention modules are rounded, by path.
    """

    means: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    products: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    fast: frozenset[str] = frozenset()
    rough: frozenset[str] = frozenset()
    attention: Mapping[str, Qkv8] = field(default_factory=dict[str, Qkv8])
    kept: frozenset[str] = frozenset()
    errors: Mapping[str, float] = field(default_factory=dict[str, float])
    weights: str = ""

    @property
    def wide(self) -> frozenset[str]:
        """The GEMMs that keep the weights' dtype."""
        return self.rough | self.kept


def matrices_of(module: nn.Module) -> dict[str, list[Any]]:
    """Return block and name -> linear layers of each GEMM that computes in 8 bits."""
    found = dict[str, list[Any]]()
    for path, part in adapters.without_adapters(module):
        block = BLOCKS.get(type(part).__name__)
        for name in () if block is None else block.eight:
            assert block is not None
            layers = [adapters.layer_at(part, layer) for layer in block.layers[name]]
            if None not in layers:
                found[f"{path}, {name}"] = layers
    return found


def check_precision(precision: object) -> None:
    """Raise ValueError for a precision that does not exist."""
    if precision not in (None, *PRECISIONS):
        raise ValueError(f"got precision={precision!r}, expected one of {', '.join(PRECISIONS)}, or None")


def why_no_blocks(module: nn.Module) -> str | None:
    """Return why no GEMM of a transformer, which may lack its weights, can compute in 8 bits on any device, or None."""
    if matrices_of(module):
        return None
    known = ", ".join(sorted(name for name, block in BLOCKS.items() if block.eight))
    return f"{type(module).__name__} has no blocks that compute in 8 bits; known ones: {known}"


def why_not_here(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a device cannot compute in 8 bits with weights of a dtype, or None. A CPU does so with any.

    A GPU that this machine lacks, for which a run is planned, has what it needs.
    """
    if device.type != "cuda":
        return None
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 9):
        return (
            f"{torch.cuda.get_device_name(device)} has no products of e4m3; these need compute capability 8.9 or newer"
        )
    return None if dtype == torch.bfloat16 else f"weights are {dtype}, expected bfloat16".replace("torch.", "")


def why_not(module: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> str | None:
    """Return why no GEMM of a transformer can compute in 8 bits on a device, or None.

    dtype: of the weights, for a transformer that still lacks them; None: their own.
    """
    weights = [layer.weight for layers in matrices_of(module).values() for layer in layers]
    dtypes = {weight.dtype for weight in weights} if dtype is None else {dtype}
    reason = why_no_blocks(module) or next(filter(None, (why_not_here(device, each) for each in dtypes)), None)
    return why_odd(weights) if reason is None and device.type == "cuda" else reason


def why_odd(weights: Iterable[Tensor]) -> str | None:
    """Return why a GPU has no products in 8 bits with weights of these sizes, or None."""
    odd = next((weight for weight in weights if weight.shape[0] % 16 or weight.shape[1] % 16), None)
    return None if odd is None else f"a weight is {tuple(odd.shape)}; 16 must divide both"


def calibrated(
    mesh: Mesh,
    pipe: Any,
    modules: Mapping[str, nn.Module],
    run: Callable[[], object] | None,
    gemms: bool = True,
    attention: bool = False,
) -> Mapping[str, Calibration]:
    """Return the calibration of each transformer of a pipeline, from the cache or by a run. Collective.

    run: calls the pipeline, or the transformer; the cache keeps numbers of a `FixedRun` alone. None: the fixed run of
    this pipeline, if there is one; where it fails, no GEMM is centred. gemms, attention: what is to compute in 8 bits.
    Active adapters take no part, so that one calibration serves all. Raises ValueError alike on all ranks if another
    run fails or reaches no GEMM, and for attention without a run that reaches it, because it needs its centres.
    """
    call, reason = (run, None) if run is not None else fixed_run(pipe)
    path, kept = _path(call, modules, attention) if isinstance(call, FixedRun) else None, dict[str, Tensor]()
    if call is not None:
        try:
            kept = kept_or_measured(mesh, path, lambda: _measured(modules, call, attention))
        except ValueError as error:
            if not isinstance(call, FixedRun):
                raise
            reason = str(error)
    rounds = mesh.on_all_ranks(lambda: _attentions(mesh, kept, modules, reason)) if attention else {}
    keys = {name: {key: f"{name}|{key}" for key in matrices_of(module)} for name, module in modules.items()}
    weights = {name: key_of((sorted(of),), weights_of({name: modules[name]})) for name, of in keys.items()}
    made = {name: replace(calibration_of(kept, of), weights=weights[name]) for name, of in keys.items()}
    if not gemms:
        return {name: Calibration(attention=of) for name, of in rounds.items()}
    if not any(of.means for of in made.values()) and call is not None and not isinstance(call, FixedRun):
        raise ValueError("calibrate= reached no GEMM that computes in 8 bits; pass a function that calls the model")
    how = "by a given run" if path is None else "by fixed prompts"
    say(as_text(made, sum(map(len, keys.values())), how, reason), mesh)
    return {name: replace(of, attention=rounds.get(name, {})) for name, of in made.items()}


def _attentions(
    mesh: Mesh, kept: Mapping[str, Tensor], modules: Mapping[str, nn.Module], reason: str | None
) -> dict[str, dict[str, Qkv8]]:
    # by transformer and path of a module
    rounds, large = dict[str, dict[str, Qkv8]](), list[str]()
    for name, module in modules.items():
        rounds[name] = {}
        for path, part in module.named_modules():
            at = f"{name}|{path}"
            if f"{at}{MEANS}" in kept:
                weight = next(layer.weight for layer in part.modules() if isinstance(layer, nn.Linear))
                eight = rounding_of(kept[f"{at}{MEANS}"], kept[f"{at}{MOST}"], weight.dtype, weight.device)
                rounds[name] |= {} if eight is None else {path: eight}
                large += [f"{name}.{path}"] if eight is None else []
    if not any(rounds.values()):
        why = reason or "a run reached no self-attention; pass calibrate=, a function that calls the model"
        raise ValueError(f'local="fp8" takes the means of keys and values out before it rounds: {why}')
    if large:
        why = f"because their scores are too large for 8 bits: {', '.join(large[:3])}"
        say(f"{len(large)} attentions keep the dtype of the weights, {why}", mesh)
    return rounds


def kept_or_measured(
    mesh: Mesh, path: Path | None, measure: Callable[[], Mapping[str, Tensor]]
) -> Mapping[str, Tensor]:
    """Return rank 0's numbers on every rank: those that `path` keeps, or else those that a run shows. Collective.

    measure: runs the model on every rank; what it raises is raised alike on all ranks.
    """
    kept = streams_of_rank_0(mesh, lambda: {} if path is None else _read(path))
    if not kept:
        measured = mesh.on_all_ranks(measure)
        kept = streams_of_rank_0(mesh, lambda: measured)
        if path is not None and kept and mesh.is_main:
            _write(path, kept)
    return kept


def as_text(made: Mapping[str, Calibration], every: int, how: str, reason: str | None = None) -> str:
    """Return what calibrations by model have found, for the start. every: number of all GEMMs that could be in 8 bits.

    how: what has centred them. reason: why some, or all, were not.
    """
    centred = sum(len(of.means) for of in made.values())
    text = f"GEMMs in 8 bits are not centred, and all sums are exact, because {reason}"
    if centred:
        others = f"; the sums of others are exact{'' if reason is None else f', because {reason}'}"
        text = f"{centred} of {every} GEMMs in 8 bits are centred {how}{others if centred < every else ''}"
    rough = [f"{name}.{key}" for name, of in made.items() for key in sorted(of.rough)]
    if rough:
        text += (
            f"\nseqpar: {len(rough)} GEMMs keep the dtype of the weights, because rounding changes them by more than "
            f"{ROUGH:.0%}: {', '.join(rough[:3])}"
        )
    return text


@dataclass(frozen=True)
class FixedRun:
    """A call of a pipeline with inputs that are always the same: those of its class, or random texts."""

    pipe: Any
    arguments: Mapping[str, Any]

    @property
    def key(self) -> tuple[str, ...]:
        """What distinguishes it from other runs of the same transformer."""
        return type(self.pipe).__name__, *self.arguments

    def __call__(self) -> None:
        failed = f"{type(self.pipe).__name__} failed with fixed prompts (parallelize takes calibrate=, a function)"
        with context(failed), without_bar(self.pipe), errors_only(logging):
            self.pipe(**self.arguments, generator=torch.Generator().manual_seed(0))


def fixed_run(pipe: Any, texts: Mapping[str, Tensor] | None = None) -> tuple[FixedRun | None, str | None]:
    """Return the call of a pipeline with inputs that no request changes, or why there is none.

    texts: encoded texts in place of prompts, for a pipeline without text encoders. A pipeline that starts from an image
    gets a fixed one.
    """
    if isinstance(pipe, nn.Module):
        return None, "a transformer alone has no prompts; pass calibrate=, which calls it"
    name = type(pipe).__name__
    parameters, modular = parameters_of(pipe, needs_picture(pipe)), is_modular(pipe)

    # a small size, or the model's own; with an image one prompt alone, as some pipelines take it
    own = getattr(getattr(getattr(pipe, "vae", None), "config", None), "sample_size", None)
    most = min(own, SIZES["height"]) if isinstance(own, int) else SIZES["height"]
    known: dict[str, Any] = {**SIZES, "height": most, "width": most}
    known |= {"num_inference_steps": STEPS, "output_type": "pt" if modular else "latent"}
    known |= dict(texts or {"prompt": PROMPTS[0] if takes_one_prompt(name) else list(PROMPTS)})
    if hasattr(pipe, "min_duration"):  # a pipeline that makes no shorter videos makes smaller ones
        most //= 2
        known |= {"height": most, "width": most, "num_frames": parameters["num_frames"].default}
    if needs_picture(pipe):
        picture = _picture(most)
        known |= {"image": [picture] if takes_several_images(name) else picture}
        known |= {} if texts is not None else {"prompt": PROMPTS[0]}

    # what keeps it from being called
    needed = {key for key, x in parameters.items() if x.default is x.empty and x.kind is x.POSITIONAL_OR_KEYWORD}
    if "prompt" not in parameters or not needed <= {"self", *known} or MORE & parameters.keys():
        return None, f"{name} takes more than a prompt; pass calibrate=, which calls it"
    if texts is None and getattr(pipe, "tokenizer", None) is None:
        return None, f"this {name} has no text encoders; pass calibrate=, which calls it"
    return FixedRun(pipe, {key: value for key, value in known.items() if key in parameters}), None


def _picture(side: int) -> Image.Image:
    across = Image.linear_gradient("L")
    colours = (across, across.rotate(90), Image.radial_gradient("L"))
    return Image.merge("RGB", colours).resize((side, side))


def _measured(
    modules: Mapping[str, nn.Module], run: Callable[[], object], attention: bool = False
) -> dict[str, Tensor]:
    matrices = {f"{name}|{key}": x for name, part in modules.items() for key, x in matrices_of(part).items()}
    seen = {key: Inputs() for key in matrices}
    with ExitStack() as stack, torch.no_grad(), torch.random.fork_rng(_cuda(modules)):
        for part in modules.values():
            stack.enter_context(adapters.disabled(part))
        for key, (first, *_) in matrices.items():
            stack.callback(first.register_forward_pre_hook(partial(_look, seen[key])).remove)
        attentions = [stack.enter_context(watched(part, f"{name}|")) for name, part in modules.items() if attention]
        with nullcontext() if isinstance(run, FixedRun) else context("calibrate= failed"):
            run()
        numbers = dict[str, Tensor]()
        for name, part in modules.items():
            bring(part)
            weights = {key: [layer.weight for layer in x] for key, x in matrices.items() if key.startswith(f"{name}|")}
            numbers |= numbers_of({key: seen[key] for key in weights}, weights)
        for at, found in chain(*(of.items() for of in attentions)):
            numbers |= {f"{at}{key}": x for key, x in found.numbers().items()}
        return numbers


def _look(seen: Inputs, module: nn.Module, args: tuple[Tensor, ...]) -> None:
    seen.look(args[0])


def _cuda(modules: Mapping[str, nn.Module]) -> list[torch.device]:
    return [x for x in {next(module.parameters()).device for module in modules.values()} if x.type == "cuda"]


class Inputs:
    """What a run has shown of one GEMM's input: the sum of its rows, and some of them."""

    def __init__(self) -> None:
        self.total, self.rows, self.samples = torch.zeros(()), 0, list[Tensor]()

    def look(self, x_BlE: Tensor) -> None:
        """Take an input into account."""
        x_RE = x_BlE.flatten(0, -2)
        self.total = self.total.to(x_RE.device) + x_RE.sum(0, dtype=state_dtype(x_RE.dtype)).double()
        self.rows += len(x_RE)
        if len(self.samples) < CALLS:
            self.samples.append(x_RE[:: max(1, len(x_RE) // SAMPLE)][:SAMPLE].clone())

    def mean(self) -> Tensor:
        return (self.total / self.rows).float()


def numbers_of(seen: Mapping[str, Inputs], weights: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor]:
    """Return what the cache keeps of a run: mean and errors of each GEMM that it has reached.

    weights: the rows of each GEMM's weight, in one tensor or in several.
    """
    tensors = dict[str, Tensor]()
    for key, inputs in seen.items():
        if inputs.rows:
            mean, weight = inputs.mean(), torch.cat([*map(original, weights[key])])
            errors = _errors(weight, torch.cat(inputs.samples), mean)
            tensors |= {key: mean.cpu(), f"{key}{ERRORS}": torch.tensor(errors, dtype=torch.float64)}
            if all(isinstance(rows, Weight8) for rows in weights[key]):  # so that no later start reads them again
                tensors[f"{key}{PRODUCT}"] = centre_product(weight, mean).cpu()
    return tensors


def _errors(weight_FE: Tensor, x_RE: Tensor, mean_E: Tensor) -> tuple[float, float]:
    # the errors of a fast sum and of rounding, relative to the product's rms; CPUs have one way to add only
    weight_FE = weight_FE.to(state_dtype(x_RE.dtype))
    values, scales_F = narrowed(weight_FE)
    rows, centre_F = round_rows(x_RE[None], Rounding(mean_E)), weight_FE @ mean_E.to(weight_FE.dtype)
    exact_RF, quick_RF = (product8(rows, values, scales_F, fast=fast)[0].double() for fast in (False, True))
    truth_RF = (x_RE.to(weight_FE.dtype) @ weight_FE.t()).double()
    rounding = float((exact_RF + centre_F.double() - truth_RF).norm() / truth_RF.norm())
    return float((quick_RF - exact_RF).norm() / truth_RF.norm()) if x_RE.is_cuda else inf, rounding


def calibration_of(kept: Mapping[str, Tensor], keys: Mapping[str, str]) -> Calibration:
    """Return a model's calibration from what the cache keeps. keys: name of each GEMM -> its name in the cache."""
    means = {key: kept[at] for key, at in keys.items() if at in kept}
    errors = {key: kept[f"{keys[key]}{ERRORS}"].tolist() for key in means}
    fast = frozenset(key for key, (of_sums, _) in errors.items() if of_sums <= FAST)
    products = {key: kept[at] for key in means if (at := f"{keys[key]}{PRODUCT}") in kept}
    rounding = {key: of_rounding for key, (_, of_rounding) in errors.items()}
    rough = frozenset(key for key, of_rounding in rounding.items() if not of_rounding <= ROUGH)
    return Calibration(means, products, fast, rough, errors=rounding)


# The cache -----------------------------------------------------------------------------------------------------


def _path(run: FixedRun, modules: Mapping[str, nn.Module], attention: bool = False) -> Path:
    gemms = {name: sorted(matrices_of(module)) for name, module in modules.items()}
    return path_of((run.key, PROMPTS, STEPS, SIZES, gemms, *((MEANS,) if attention else ())), weights_of(modules))


def weights_of(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of transformers, but for those of adapters, by the names of their modules."""
    for name, module in modules.items():
        bring(module)
        for path, part in adapters.without_adapters(module):
            yield from ((f"{name} {path}", x) for x in part.parameters(recurse=False))


def path_of(settings: tuple[object, ...], weights: Iterable[tuple[str, Tensor]]) -> Path:
    """Return where the numbers of these weights, by their names, are kept, for this GPU and these libraries.

    settings: all else on which the numbers depend, as values whose `repr` says what they are.
    """
    settings = settings, SAMPLE, CALLS, ERRORS, exact.is_on()
    return cache_folder() / f"calibration-{key_of(settings, weights)}.safetensors"


def key_of(settings: tuple[object, ...], weights: Iterable[tuple[str, Tensor]]) -> str:
    """Return what names a result of these weights and settings, on this GPU and with these libraries, in the cache."""
    libraries = torch.__version__, diffusers.__version__
    key = hashlib.blake2b(repr((libraries, settings)).encode())
    for name, weight in weights:
        gpu = torch.cuda.get_device_name(weight.device) if weight.is_cuda else "CPU"
        known = isinstance(weight, Weight8) and weight.source is not None  # products are of the weights as they were
        key.update(repr((name, gpu, tuple(weight.shape), weight.dtype, known)).encode())
        for memory in (weight.e4m3, weight.scales) if isinstance(weight, Weight8) else (weight.detach(),):
            bits = memory.view(torch.uint8) if memory.itemsize == 1 else memory
            rows = torch.hash_tensor(bits.reshape(-1, *bits.shape[-1:]), dim=-1)  # of each row
            key.update(rows.view(torch.uint8).cpu().numpy().tobytes())
    return key.hexdigest()[:24]


def _read(path: Path) -> dict[str, Tensor]:
    # a file that cannot be read is measured and written again
    try:
        return load_file(path)
    except (OSError, SafetensorError):
        return {}


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    try:
        keep(path, save(dict(tensors)))
    except (OSError, SafetensorError) as error:
        say(f"the calibration is not kept for the next start: {error}")
