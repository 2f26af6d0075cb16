# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false, reportPrivateUsage=false
"""Says in one sentence what broke, when a version of a library arrives that this package was not tested with.

One test is for each private name of `seqpar.transformer.internals`. A new minor version of diffusers may move what the
package imports from it: raise the bound in pyproject.toml after the whole suite has passed.
"""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import tomllib
from collections.abc import Iterator
from typing import Any

import accelerate
import accelerate.hooks
import diffusers
import torch
from diffusers.hooks.first_block_cache import FirstBlockCacheConfig
from diffusers.hooks.hooks import HookRegistry, ModelHook
from diffusers.hooks.layer_skip import LayerSkipConfig, apply_layer_skip
from packaging.requirements import Requirement
from peft import LoraConfig
from torch import nn

from seqpar.transformer import internals
from tests.support.diffusers_tiny import MODELS
from tests.support.sharded import tiny
from tests.support.structure import ROOT, files, parsed, relative


class Twice(ModelHook):
    """Doubles what the module returns."""

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return 2 * self.fn_ref.original_forward(  # pyright: ignore
            *args, **kwargs
        )


class Plus(ModelHook):
    """A hook of ours, which adds 1."""

    def compute(self, forward: Any, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return forward(x) + 1


def test_versions_are_those_that_the_module_names() -> None:
    for name in ("torch", "diffusers", "accelerate", "peft"):
        version = ".".join(importlib.metadata.version(name).split(".")[:2])
        assert f"{name} {version}" in str(internals.__doc__), f"internals.py was tested with another {name}"


def test_torch_marks_what_it_compiles() -> None:
    plain, in_place, forward = nn.Linear(2, 2), nn.Linear(2, 2), torch.compile(nn.Linear(2, 2).forward, backend="eager")
    in_place.compile(backend="eager")
    cases = [(plain, plain.forward), (in_place, None), (torch.compile(plain, backend="eager"), None), (plain, forward)]
    assert [internals.is_compiled(*case) for case in cases] == [False, True, True, True]


def test_torch_counts_hooks_and_holds_them_by_module() -> None:
    module, before = nn.Linear(2, 2), internals.registered_hooks()
    hooks = [module.register_forward_pre_hook(lambda *_: None), module.register_forward_hook(lambda *_: None)]
    assert internals.registered_hooks() > before
    assert [len(held) for held in internals.torch_hooks(module)] == [1, 1]
    for hook in hooks:
        hook.remove()
    assert not any(internals.torch_hooks(module))


def test_accelerate_keeps_its_hook_and_the_forward_before_it() -> None:
    module = nn.Linear(2, 2)
    forward = module.forward
    assert internals.accelerate_hook(module) is None
    accelerate.hooks.add_hook_to_module(module, accelerate.hooks.AlignDevicesHook("cpu"))
    assert vars(module)[internals.BEFORE_ACCELERATE] == forward
    assert not internals.moves_weights(internals.accelerate_hook(module), module)


def test_accelerate_moves_weights_that_it_offloads() -> None:
    module = nn.Linear(2, 2)
    accelerate.cpu_offload(module, execution_device=torch.device("cpu"))
    assert internals.moves_weights(internals.accelerate_hook(module), module)


def test_diffusers_tells_group_offloading() -> None:
    module: Any = tiny(num_layers=1, num_single_layers=1)
    assert not internals.is_group_offloaded(module)
    module.enable_group_offload(torch.device("cpu"), torch.device("cpu"), offload_type="leaf_level")
    assert internals.is_group_offloaded(module)


def test_peft_names_the_adapters_of_a_layer() -> None:
    module: Any = tiny(num_layers=1, num_single_layers=1)
    module.add_adapter(LoraConfig(r=2, target_modules=["to_q"]), "style")
    assert set(internals.adapters_of(module.transformer_blocks[0].attn.to_q)) == {"style"}


def test_a_hook_inside_of_all_others_keeps_their_order_and_is_removed_alone() -> None:
    module, x = nn.Identity(), torch.ones(1)
    registry = HookRegistry.check_if_exists_or_initialize(module)
    registry.register_hook(Twice(), "twice")
    internals.register_innermost(module, Plus(), "ours")
    assert (module(x).item(), [*internals.hooks_on(module)]) == (4, ["ours", "twice"])
    assert internals.is_hooked(module)
    assert internals.is_outermost(module, "twice")
    registry.register_hook(Twice(), "again")
    assert module(x).item() == 8
    internals.unregister(module, "ours")
    assert (module(x).item(), [*internals.hooks_on(module)]) == (4, ["twice", "again"])
    internals.unregister(module, "again")
    assert module(x).item() == 2


def test_a_forward_in_the_place_of_all_hooks_stays() -> None:
    module, x = nn.Identity(), torch.ones(1)
    internals.register_innermost(module, Plus(), "ours")
    hooked = module.forward
    module.forward = lambda x: 10 * hooked(x)
    assert not internals.is_hooked(module)
    internals.unregister(module, "ours")
    assert module(x).item() == 20  # it still calls the hook that it was set around


def test_diffusers_keeps_the_config_of_a_cache() -> None:
    module, config = MODELS["wan"].build(), FirstBlockCacheConfig()
    assert internals.cache_config(module) is None
    module.enable_cache(config)
    assert internals.cache_config(module) is config


def test_diffusers_tells_that_scores_are_skipped() -> None:
    module: Any = MODELS["pixart"].build()
    attention = module.transformer_blocks[0].attn1
    assert not internals.skips_scores(attention)
    apply_layer_skip(module, LayerSkipConfig([0], "transformer_blocks", False, skip_attention_scores=True))
    assert internals.skips_scores(attention)


# Public names of diffusers -------------------------------------------------------------------------------------


def imported() -> Iterator[tuple[str, str, str]]:
    for path in files("seqpar"):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "diffusers":
                yield from ((relative(path), node.module or "", alias.name) for alias in node.names)


def requirement() -> Requirement:
    project: Any = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return next(bound for bound in map(Requirement, project["dependencies"]) if bound.name == "diffusers")


def test_the_installed_version_was_tested() -> None:
    bounds, version = requirement().specifier, diffusers.__version__
    assert any(bound.operator == "<" for bound in bounds), "diffusers has an upper bound: the last minor version tested"
    assert bounds.contains(version, prereleases=True), (
        f"diffusers {version} is outside of the tested versions {bounds}: run the whole suite with it, then change the "
        f"bound in pyproject.toml"
    )


def test_what_the_package_imports_from_diffusers_exists() -> None:
    names = sorted(set(imported()))
    assert len(names) > 20
    for file, module, name in names:
        assert hasattr(importlib.import_module(module), name), (
            f"diffusers {diffusers.__version__} has no {name} in {module}, which {file} imports"
        )


def test_the_dispatcher_takes_the_arguments_of_our_backend() -> None:
    dispatcher = importlib.import_module("diffusers.models.attention_dispatch")
    wanted = {"query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "backend", "parallel_config"}
    missing = wanted - set(inspect.signature(dispatcher.dispatch_attention_fn).parameters)
    assert not missing, f"diffusers {diffusers.__version__}'s dispatcher takes no {', '.join(sorted(missing))} any more"
