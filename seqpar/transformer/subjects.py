"""What `parallelize` is given: a pipeline's transformers, whether they can be parallelized, and the plan for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from diffusers.hooks.group_offloading import _is_group_offload_enabled
from torch import nn

from seqpar.families._cuts import Cuts
from seqpar.families._find import cuts_of, is_known
from seqpar.families._guided import is_guided
from seqpar.loading.variances import check_variances, learns_range
from seqpar.mesh import exact
from seqpar.mesh.mesh import Mesh
from seqpar.planner.plan import Plan, check_names, make, named_mesh, wished_images
from seqpar.planner.search import Wish
from seqpar.transformer import estimate
from seqpar.transformer.foreign import is_offloaded, look, refuse_compiled
from seqpar.transformer.lease import call_of
from seqpar.types.arguments import check_kind
from seqpar.vae import pipeline as sharing
from seqpar.vae.pipeline import Wished

# where diffusers defines pipelines whose calls are known, and the base classes of all, of which a user's own derive
PIPELINES = ("diffusers.pipelines.", "diffusers.modular_pipelines.")
BASES = ("diffusers.pipelines.pipeline_utils", "diffusers.modular_pipelines.modular_pipeline")


def choices(mesh: Mesh | str | None, wish: Wish, native: bool, cfg: bool) -> tuple[Mesh | None, Wish]:
    """Return the caller's mesh and choices (`named_mesh`); ValueError for those that are none or contradict."""
    own, wish = named_mesh(mesh, wish)
    check_names(wish.strategy, wish.local, wish.transport)
    check_kind("native", native, bool, expected="True or False")
    check_kind("cfg", cfg, bool, expected="True or False")
    branches = own.cfg.size if own is not None else wish.axes.get("cfg", 1)
    if not cfg and branches > 1:
        raise ValueError(f"got cfg=False and a mesh with cfg={branches}, expected one with cfg=1")
    return own, wish


def all_checked(
    pipe_or_transformer: Any, modules: Mapping[str, nn.Module], cuts: Cuts | Mapping[str, Any] | None, vae: Wished
) -> dict[str, Cuts]:
    """Return where each transformer is cut; ValueError if one, the pipeline's scheduler or an argument does not fit."""
    check_kind("cuts", cuts, Cuts, Mapping, type(None), expected="seqpar.families.Cuts, or diffusers' _cp_plan")
    takes_variances(pipe_or_transformer)
    sharing.check_wish(type(pipe_or_transformer).__name__, getattr(pipe_or_transformer, "vae", None), vae)
    return {name: _checked(module, cuts) for name, module in modules.items()}


def _checked(module: nn.Module, cuts: Cuts | Mapping[str, Any] | None) -> Cuts:
    """Return where a transformer is cut; ValueError if it cannot be parallelized as it is now."""
    name = type(module).__name__
    refuse_compiled(module)
    if call_of(module) is not None:
        raise ValueError(
            f"got {name} that is parallelized already, expected a plain one; a pipeline that shares it (from_pipe) "
            f"can be called as it is; call seqpar.release to parallelize it in another way"
        )
    if getattr(module, "_parallel_config", None) is not None:
        raise ValueError(f"got {name} with diffusers' enable_parallelism, expected none; load it without")
    if _is_offloaded(module):
        raise ValueError(f"got {name} whose weights are offloaded, expected none: they must stay on the GPU")
    if next(module.parameters(), None) is None:
        raise ValueError(f"got {name} without parameters, expected a diffusers transformer")
    if next(module.parameters()).device.type == "meta":
        raise ValueError(f"got {name} without weights (on the meta device), expected a loaded one")
    return cuts_of(module, cuts)


def takes_variances(pipe: Any) -> bool:
    """Return whether a pipeline cuts the variances off that its scheduler needs; ValueError if its model has none."""
    named = any(kind.__name__ == "DiTPipeline" for kind in type(pipe).__mro__)
    if not named or not learns_range(pipe.scheduler):
        return False
    check_variances(pipe.transformer.config)
    return True


def cfg_by_default(pipe_or_transformer: Any, module: nn.Module) -> bool:
    """Return whether a cfg axis may be chosen: only where guidance is known to compute two branches per step.

    A transformer of no known family may be called once per step, and a pipeline that is not diffusers' in any way; half
    of the ranks would then repeat what the others compute.
    """
    if not is_known(module) or not is_guided(module):
        return False
    homes = {kind.__module__ for kind in type(pipe_or_transformer).__mro__} - set(BASES)
    return isinstance(pipe_or_transformer, nn.Module) or any(home.startswith(PIPELINES) for home in homes)


def _guided(pipe_or_transformer: Any, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether two branches of guidance can be expected that may be computed apart from each other.

    In exact mode they are not, because many pipelines make them one batch, whose rows stay together then.
    """
    perturbed = hasattr(pipe_or_transformer, "set_pag_applied_layers")  # its processors read the rows of all branches
    apart = all(look(module).coupled is None for module in modules.values())
    default = cfg_by_default(pipe_or_transformer, next(iter(modules.values())))
    return apart and not perturbed and not exact.is_on() and default


def planned(
    pipe_or_transformer: Any, modules: Mapping[str, nn.Module], mesh: Mesh | None, wish: Wish, native: bool, cfg: bool
) -> Plan:
    """Return the planner's plan for one picture of the first transformer's family.

    native: whether functions of `seqpar.families` may compute.
    """
    axis = mesh.cfg.size if mesh is not None else wish.axes.get("cfg")
    guided = _guided(pipe_or_transformer, modules) and cfg if axis is None else axis > 1
    module = next(iter(modules.values()))
    dtype = estimate.dtype_of(module)
    work = estimate.planned_work(module, native)
    ranks = mesh or Mesh.joined()
    load = replace(estimate.load_of(module, dtype, guided, work.joined), images=wished_images(wish, ranks))
    return make(work, load, dtype, ranks, wish, mesh)


def _is_offloaded(module: nn.Module) -> bool:
    """Return whether hooks of accelerate or diffusers move a transformer's weights between host and GPU."""
    return is_offloaded(module) or _is_group_offload_enabled(module)
