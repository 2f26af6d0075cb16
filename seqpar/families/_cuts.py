"""`Cuts`: where the tokens of a diffusers transformer are split over ranks and gathered again, as data.

A transformer's own forward runs on every rank. Tensors that hold one row a token are cut to this rank's tokens on the
way into or out of submodules, attention joins the ranks, and outputs are gathered. diffusers' form (`_cp_plan`) is
accepted, too, and says less: attention and masks are inferred.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import Tensor, nn

from seqpar._moved import successors
from seqpar.families._masks import Keys, Prepared

NOTE = "seqpar_note"  # an argument besides the transformer's own: `Prepared.note`
HOME = "diffusers.models."  # where classes are defined whose arithmetic and construction functions know


@dataclass(frozen=True)
class CutTokens:
    """Keep this rank's tokens of a tensor.

    stream: the kind of tokens (image, text). Any name will do, and errors show it, but several streams of a fused block
    have the names in `Block.streams`. `IMAGE`, `OUT` and `ALONE` are for "image". dim: the dim of the tokens. dims: the
    number of dims of a tensor that is cut; others stay whole (a timestep is cut if there is one for each token). A
    tensor with one row along `dim` stays whole, because it holds for all tokens. Of a tuple, list or dict, every tensor
    is cut. may_be_empty: whether there may be fewer tokens than ranks, because the transformer's modules compute empty
    tensors, too, and attention joins this stream with another one of which every rank has tokens. after_prefix: the
    first rows are those of `Keys.prefix` tokens, which stay whole.
    """

    stream: str
    dim: int = 1
    dims: int | None = None
    may_be_empty: bool = False
    after_prefix: bool = False


@dataclass(frozen=True)
class CutJoined:
    """Keep this rank's tokens of an input of the transformer that has a row for each token of several streams.

    streams: in the order of the rows, stream after stream; each is cut before. dim: the dim of the tokens.
    """

    streams: tuple[str, ...]
    dim: int = 0


@dataclass(frozen=True)
class GatherTokens:
    """Bring the tokens of all ranks together again, along `dim`. after_prefix: see `CutTokens`."""

    stream: str
    dim: int = 1
    after_prefix: bool = False


@dataclass(frozen=True)
class Grouped:
    """What a submodule computes for groups of neighbouring tokens with a row each, as frames of a video are.

    tokens: its input with a rank's tokens (B, l, E), which gets zeros up to whole groups; of its output they are left
    out. rows: its input with a row for each group along dim 1, which loses those of groups without a token of the rank.
    """

    stream: str
    tokens: str
    rows: str


Cutting = CutTokens | CutJoined | tuple[CutTokens | None, ...]
"""One cut for all tensors of a value, or one for each element of a tuple or list (None: it stays whole)."""


@dataclass(frozen=True)
class Boundary:
    """What is cut and gathered at one submodule.

    inputs: parameter name of its forward -> cut. outputs and gathers: index among its outputs -> cut or gather; a
    tensor that is no tuple has index 0. numbers: inputs that the transformer makes on the host, of one number; they are
    made on the device, because no CUDA graph could copy them there. on_device: whether the submodule makes its tensors
    on the host, of no tensor's values; they are made on the device, too. constants: attributes of the submodule that
    hold tensors, or lists of them, and are no buffers; they are moved to the device once. grouped: what reads tokens by
    groups.
    """

    inputs: Mapping[str, Cutting] = field(default_factory=dict)
    outputs: Mapping[int, Cutting] = field(default_factory=dict)
    gathers: Mapping[int, GatherTokens] = field(default_factory=dict)
    numbers: tuple[str, ...] = ()
    on_device: bool = False
    constants: tuple[str, ...] = ()
    grouped: Grouped | None = None


@dataclass(frozen=True)
class Joint:
    """Attention of split tokens to the tokens of all ranks.

    streams: the streams whose tokens it joins, in the order in which the module concatenates them (a mask for all keys
    has the same order); empty if it is to be inferred from the number of tokens. masked: whether the keys are masked
    by `Cuts.masks`, in place of what the module passes to its attention. processor: makes the processor that takes the
    place of the module's own, if that cannot be split. absent: those of the streams that a call may lack.
    whole_queries: whether the streams are the keys alone, and the queries are other tokens, which every rank holds
    whole. after_prefix: the streams' tokens may also attend to tokens before them that every rank has whole, which do
    not attend to the streams (`Keys.prefix`). skipped_by: argument of the module that makes it return its values
    without attention, if it is true.
    """

    streams: tuple[str, ...] = ()
    masked: bool = False
    processor: Callable[[], Any] | None = None
    absent: tuple[str, ...] = ()
    whole_queries: bool = False
    after_prefix: bool = False
    skipped_by: str = ""


@dataclass(frozen=True)
class StepBlocks:
    """The blocks that a step cache may leave out (`seqpar.transformer.step_cache`).

    lists: path of a list of blocks -> the inputs that a block's outputs replace, in the order of the outputs; the lists
    follow each other. Where a list has one output and the one before it several, it is those joined in that order.
    head: the number of first blocks that every step computes; threshold: of the change of their residual. text: the
    argument of the transformer by which branches of guidance differ; time: that of the timestep.
    """

    lists: Mapping[str, tuple[str, ...]]
    head: int = 1
    threshold: float = 0.1
    text: str = "encoder_hidden_states"
    time: str = "timestep"


def _no_reason(module: nn.Module) -> None:  # no lambda, because cuts may be pickled
    return None


@successors
@dataclass(frozen=True)
class Cuts:
    """Where the tokens of one transformer class are cut and gathered, and which attention joins the ranks.

    places: path of a submodule -> what is cut there. "" is the transformer itself, of which only inputs are cut; in a
    path, "*" stands for every member of a list of modules, -1 for its last one, and :-1 for all but this.
    attention: path of an attention module that joins the ranks -> how.
    local: paths of attention modules whose keys every rank has whole (cross-attention to text, parts before the first
    cut); they exchange nothing. Where tokens are split, an attention module in neither of the two is a ValueError.
    masks: argument of the transformer -> the stream whose keys it masks, or `JOINED`, (B, tokens), nonzero for tokens;
    one without zeros masks nothing. The transformer's own forward gets None in its place. A mask of `JOINED` tokens of
    floating numbers, 0 and 1, leaves no key out: as in torch, attention adds 1 to the score of two tokens whose numbers
    are both 1.
    prepare: does on the host what a call needs before it is computed; None drops `masks` that leave no key out.
    keys: returns what attention leaves out, on the device, for the arguments of a call and `Prepared.note`; it puts
    None in the place of arguments that the transformer's own forward must not get. None does so with `masks`.
    forward: returns what computes (transformer, **arguments) in place of a forward of diffusers that reads values on
    the host or copies them from it, or None; one more argument is `NOTE`.
    refused: argument of the transformer -> the reason why it must be None.
    why_not: returns the reason why the tokens of a transformer of this class cannot be split, or None.
    why_eager: returns the reason why its forward cannot be captured as a CUDA graph, or None.
    eager_with: argument of the transformer -> the reason why a call that has it cannot be captured.
    output: the class in which its forward returns results; needed if that is not `Transformer2DModelOutput`, as where a
    call has two results.
    of_batch: arguments that keep something for each row of the whole batch; calls with one are not split by rows.
    calls_twice: whether its pipelines make two calls per guided step without naming them (`cache_context`).
    """

    places: Mapping[str, Boundary]
    attention: Mapping[str, Joint]
    masks: Mapping[str, str] = field(default_factory=dict)
    prepare: Callable[[Prepared], None] | None = None
    keys: Callable[[dict[str, Any], Hashable], Keys] | None = None
    forward: Callable[[nn.Module], Callable[..., tuple[Tensor, ...]] | None] = _no_reason
    refused: Mapping[str, str] = field(default_factory=dict)
    why_not: Callable[[nn.Module], str | None] = _no_reason
    why_eager: Callable[[nn.Module], str | None] = _no_reason
    eager_with: Mapping[str, str] = field(default_factory=dict)
    local: tuple[str, ...] = ()
    output: Callable[..., Any] = Transformer2DModelOutput
    of_batch: tuple[str, ...] = ()
    calls_twice: bool = False


HELP = """write them and pass them as cuts=, for example for a transformer with joint attention of text and image:
    from seqpar.families import Boundary, Cuts, CutTokens, GatherTokens, Joint
    image, text = CutTokens("image"), CutTokens("text")
    cuts = Cuts(
        places={
            "transformer_blocks.0": Boundary(inputs={"hidden_states": image, "encoder_hidden_states": text}),
            "transformer_blocks.*": Boundary(inputs={"image_rotary_emb": CutTokens("image", dim=0)}),
            "proj_out": Boundary(gathers={0: GatherTokens("image")}),
        },
        attention={"transformer_blocks.*.attn": Joint(("text", "image"))},
    )
Cut every tensor that has a row for each token where it enters the blocks, name the attention modules that see the \
tokens of all ranks with their streams in the order in which the module concatenates them, leave masks whole, and \
gather the last layer's output. Leave out streams that are read by cross-attention only, and name such attention in \
local=. A plan in diffusers' form (_cp_plan) works, too"""


MEMBERS = {"*": slice(None), "-1": slice(-1, None), ":-1": slice(-1)}


def submodules(module: nn.Module, path: str) -> list[nn.Module]:
    """Return the submodules that a path names ("blocks.*.attn", "layers.-1"); ValueError if there is none.

    A path that ends with "?" ("blocks.*.attn2?") may name none, and so may one with "*" for a list of no modules.
    """
    modules, empty = [module], False
    for step in path.removesuffix("?").split(".") if path else ():
        empty = empty or (step == "*" and any(isinstance(one, nn.ModuleList) and not len(one) for one in modules))
        modules = [child for parent in modules for child in _children(parent, step)]
    if not modules and not empty and not path.endswith("?"):
        known = ", ".join(name for name, _ in module.named_children())
        raise ValueError(
            f"got cuts at the submodule {path!r}, which {type(module).__name__} does not have, expected paths "
            f"that begin with one of {known}"
        )
    return modules


def _children(parent: nn.Module, step: str) -> list[nn.Module]:
    if step in MEMBERS:
        children = list(parent.children())[MEMBERS[step]]
    else:
        children = [child for name, child in parent.named_children() if name == step]
    return [unwrapped(child) for child in children]


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module that a wrapper holds as its `module`, as torch's own wrappers do; other modules unchanged."""
    while not type(module).__module__.startswith("diffusers.") and "module" in module._modules:
        inner = module._modules["module"]
        if inner is None:
            break
        module = inner
    return module


def parameters(module: nn.Module) -> list[str]:
    """Return the names of the parameters of a module's forward, in order."""
    return _named(forward_of(type(module)))


def forward_of(kind: type) -> Callable[..., Any]:
    """Return a class's forward; if that names no argument, because it passes all on, the one that it overrides."""
    forwards = [vars(one)["forward"] for one in kind.__mro__ if "forward" in vars(one)]
    return next(filter(_named, forwards), forwards[0])


def _named(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [x.name for x in parameters if x.name != "self" and x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)]


def check(module: nn.Module, cuts: Cuts) -> None:
    """Raise ValueError if cuts name submodules or parameters that a module does not have."""
    for path in cuts.attention:
        if not path.endswith("?") and not submodules(module, f"{path}?"):
            check_joined(module, cuts, wrapped=True)  # where a wrapper hides all of them, it says which
            submodules(module, path)
    named = [(path, name) for path, place in cuts.places.items() for name in (*place.inputs, *place.numbers)]
    grouped = [(path, place.grouped) for path, place in cuts.places.items() if place.grouped]
    named += [(path, name) for path, group in grouped for name in (group.tokens, group.rows)]
    for path, name in [*((path, None) for path in cuts.places), *named, *(("", name) for name in cuts.masks)]:
        for one in submodules(module, path):
            if name is not None and name not in parameters(one) and (path or parameters(one)):
                raise ValueError(
                    f"got cuts of the input {name!r} of {path or 'the transformer'}, expected one of the inputs "
                    f"of {type(one).__name__}: {', '.join(parameters(one))}; a wrapper must hold its block as .module"
                )


def check_joined(module: nn.Module, cuts: Cuts, wrapped: bool = False) -> None:
    """Raise ValueError for an attention module that would see the tokens of its rank alone.

    Where tokens are split, each attention module joins the ranks or is declared local. One that a wrapper hides from
    the cuts' paths, or that a user has added, is neither. wrapped: check only those that are inside a wrapper.
    """
    paths = (*cuts.attention, *cuts.local)
    known = {id(one) for path in paths for one in submodules(module, f"{path.removesuffix('?')}?")}
    for path, one in module.named_modules():
        if not is_attention(one) or id(one) in known:
            continue
        above = [".".join(path.split(".")[:end]) for end in range(1, path.count(".") + 1)]
        known_homes = ("diffusers.", "torch.nn.modules.", "peft.")
        homes = ((step, type(module.get_submodule(step)).__module__) for step in above)
        wrapper = next((step for step, home in homes if not home.startswith(known_homes)), None)
        if wrapped and wrapper is None:
            continue
        inside = f" inside {type(module.get_submodule(wrapper)).__name__} at {wrapper}" if wrapper else ""
        raise ValueError(
            f"{type(one).__name__} at {path} of {type(module).__name__}{inside} would attend to the tokens of one rank "
            f"only. Hold a wrapped block as .module of its wrapper, or pass cuts= that name this attention (in "
            f"local=, if its keys are whole on every rank), or use cfg= or data= ranks"
        )


# Plans in diffusers' form --------------------------------------------------------------------------------------


def from_diffusers(module: nn.Module, plan: Mapping[str, Any]) -> Cuts:
    """Return a plan in diffusers' form (`_cp_plan`) as `Cuts`.

    Masks are left whole, because attention needs them whole. Attention modules are those inside of the blocks, without
    cross-attention to text that stays whole; which streams they join follows from the number of tokens. Attention
    before the first cut sees whole sequences. Raises ValueError for what is no such plan.
    """
    places = {path: _place(path, entry) for path, entry in plan.items()}
    cuts = [cut for place in places.values() for cut in (*place.inputs.values(), *place.outputs.values())]
    flat = [part for cut in cuts for part in (cut if isinstance(cut, tuple) else (cut,))]
    text = any(isinstance(cut, CutTokens) and cut.stream == "text" for cut in flat)
    joins = dict[str, bool]()
    for name, child in module.named_modules():
        if is_attention(child):
            in_blocks = any(part.endswith(("blocks", "layers")) for part in name.split("."))
            cross = name.endswith("attn2") or getattr(child, "is_cross_attention", False)
            path = re.sub(r"\.\d+(?=\.|$)", ".*", _without_wrappers(module, name))
            joins[path] = in_blocks and (text or not cross)
    local = tuple(path for path, joined in joins.items() if not joined)
    return Cuts(places, {path: Joint() for path, joined in joins.items() if joined}, local=local)


def _without_wrappers(module: nn.Module, name: str) -> str:
    # the path without the steps into wrappers, as `submodules` takes it
    steps = list[str]()
    for step in name.split("."):
        inner = unwrapped(module)
        steps += [] if inner is not module else [step]
        module = inner if inner is not module else module.get_submodule(step)
    return ".".join(steps)


def block_lists(module: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """Return (path, list) of the lists of modules of which some compute attention: lists of blocks."""
    lists = ((path, one) for path, one in module.named_modules() if isinstance(one, nn.ModuleList))
    return [(path, one) for path, one in lists if any(map(is_attention, one.modules()))]


def is_attention(module: nn.Module) -> bool:
    """Return whether a module computes attention: diffusers' modules have a processor for it."""
    return hasattr(module, "processor") or isinstance(module, nn.MultiheadAttention)


def _place(path: str, entry: Any) -> Boundary:
    if isinstance(entry, Mapping):
        kept = {key: cut for key, cut in entry.items() if "mask" not in str(key)}
        inputs = {key: _cutting(path, key, cut) for key, cut in kept.items() if isinstance(key, str)}
        outputs = {key: _cutting(path, key, cut) for key, cut in kept.items() if isinstance(key, int)}
        return Boundary(inputs, outputs)
    every: list[Any] = list(entry) if isinstance(entry, (list, tuple)) else [entry]
    if not all(one is None or isinstance(one, ContextParallelOutput) for one in every):
        raise ValueError(
            f"got a plan with {entry!r} at {path!r}, expected ContextParallelOutput, or ContextParallelInput by name"
        )
    return Boundary(
        gathers={i: GatherTokens("image", one.gather_dim) for i, one in enumerate(every) if one is not None}
    )


def _cutting(path: str, key: str | int, entry: Any) -> Cutting:
    if isinstance(entry, (list, tuple)):
        each = (_cutting(path, key, one) for one in entry)
        return tuple(one for one in each if isinstance(one, CutTokens))
    if not isinstance(entry, ContextParallelInput):
        raise ValueError(f"got a plan with {entry!r} for {key!r} at {path!r}, expected a ContextParallelInput")
    return CutTokens(_stream(key), entry.split_dim, entry.expected_dims)


def _stream(key: str | int) -> str:
    # outputs (rotary rows) may be of any stream, so their size decides
    if isinstance(key, int) or key.endswith(("emb", "index", "indices", "ids")):
        return ""
    return "text" if "encoder" in key or "text" in key or "txt" in key else "image"


IMAGE, TEXT = CutTokens("image"), CutTokens("text", may_be_empty=True)
OUT = Boundary(gathers={0: GatherTokens("image")})
TEXT_IMAGE, IMAGE_TEXT = Joint(("text", "image")), Joint(("image", "text"))
ALONE = Joint(("image",))


def reads_lengths(module: Any) -> str:
    return "it reads the lengths of the texts on the host"
