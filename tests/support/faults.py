"""Plants faults one at a time in a copy of the tree and checks that the test named for each fault fails.

    python -m tests.support.faults                  # every fault, some minutes
    python -m tests.support.faults --only ring      # only faults whose name contains this word
    python -m tests.support.faults --some 3 --seed HASH    # three of them, chosen by a hash, as the gate does

Every test named here must pass on a copy without a fault. Each fault is applied to a fresh copy, where its test runs
alone and must fail; two copies run at a time. The command prints a table and exits with 1 if a fault survives. A text
to replace must be found exactly once in its file, otherwise the fault is refused: `tests/support/test_faults.py` checks
that in every run of the suite, so the table cannot silently fall behind the code.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("seqpar", "launch", "tests", "pyproject.toml")
DEADLINE_S = 600  # time limit of a run, besides HANG_S for each of its tests
REMOVED_S = 10  # time limit of removing a copy
SIDE_BY_SIDE = 2  # runs at a time: each one is a process, which uses one core most of the time
HANG_S = 120  # time limit of a fault's test, which takes seconds: longer than ranks wait for each other (`pool.py`)
MISTAKES = ("SyntaxError", "NameError", "ImportError", "AttributeError", "TypeError", "UnboundLocalError")
FAILED = 1  # pytest's exit status where tests ran and some failed; every other status but 0 is a broken entry


@dataclass(frozen=True)
class Fault:
    """One edit (`old` becomes `new` in `file`) and the test that must fail because of it."""

    name: str
    file: str
    old: str
    new: str
    test: str
    why: str

    def apply(self, root: Path) -> None:
        """Make the edit below `root`; raises `ValueError` unless the file contains `old` exactly once."""
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"got {count} places of fault {self.name!r} in {self.file}, expected 1; refresh its text")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


FAULTS = (
    Fault(
        "a step cache decides by a rank's own tokens",
        "seqpar/transformer/step_cache.py",
        "for axis in _axes(self._state):",
        "for axis in _axes(self._state)[1:]:",
        "tests/transformer/test_step_cache.py::test_exact_mode_has_one_ranks_bits_with_a_step_cache[FluxTransformer2DModel-3]",
        "ranks read different sums",
    ),
    Fault(
        "a step cache keeps the residual of the first computed step",
        "seqpar/transformer/step_cache.py",
        "            torch.sub(out, piece, out=residual)\n",
        "            torch.sub(out, piece, out=residual) if not residual.any() else None\n",
        "tests/transformer/test_step_cache.py::test_blocks_of_a_family_are_left_out[WanTransformer3DModel]",
        "later steps reuse a stale residual",
    ),
    Fault(
        "a step cache goes on where another request begins",
        "seqpar/transformer/step_cache.py",
        "ended = branch.times and (other_text or",
        "ended = branch.times and (False and other_text or",
        "tests/transformer/test_step_cache.py::test_a_run_reuses_nothing_of_another_one[another text]",
        "the residual of another text leaks into a request",
    ),
    Fault(
        "attention that a wrapper hides after parallelize sees one rank's tokens",
        "seqpar/transformer/hooks.py",
        "            check_joined(self.module, self.cuts)\n",
        "            pass\n",
        "tests/transformer/test_foreign.py::test_users_code_is_right_or_refused_on_every_rank[2-hidden in wan]",
        "a wrong image without an error",
    ),
    Fault(
        "attention of a user's block sees one rank's tokens",
        "seqpar/transformer/attention.py",
        "if not self._running or self._running[-1] is None or queries != keys:",
        "if not self._running or self._running[-1] is None or queries != keys or queries:",
        "tests/transformer/test_foreign.py::test_users_code_is_right_or_refused_on_every_rank[2-a block by hand]",
        "a wrong image without an error",
    ),
    Fault(
        "a row in 8 bits has the scale of another row",
        "seqpar/kernels/rows8.py",
        "sums * x.scales.double() * scales_F.double()",
        "sums * x.scales.double().roll(1, 1) * scales_F.double()",
        "tests/transformer/test_precision.py::test_outliers_of_one_token_do_not_change_another",
        "each token has its own scale",
    ),
    Fault(
        "the mean that was taken out of an input is not put back",
        "seqpar/families/_matrix8.py",
        "return original(weight_FE).to(wide) @ centre_E.to(wide)",
        "return 0 * original(weight_FE).to(wide) @ centre_E.to(wide)",
        "tests/transformer/test_precision.py::test_a_centre_is_put_back_exactly_and_takes_the_error_of_the_mean_away",
        "images lose their means",
    ),
    Fault(
        "weights in 8 bits are those of before a write",
        "seqpar/transformer/hooks.py",
        "return (count, self._changes.values()) if self.fused.is_copied else count",
        "return count",
        "tests/transformer/test_precision.py::test_weights_written_in_place_are_followed",
        "a stale copy of the weights computes",
    ),
    Fault(
        "attention in 8 bits has the scale of another head",
        "seqpar/kernels/prepare8.py",
        "scale_H = eight.k_scale_G.repeat_interleave(share)",
        "scale_H = eight.k_scale_G.roll(1).repeat_interleave(share)",
        "tests/local/test_fp8.py::test_error_and_bias_are_small_for_any_values[65-heads]",
        "scores of a head are those of another temperature",
    ),
    Fault(
        "the centre of the values is not added back",
        "seqpar/kernels/prepare8.py",
        "torch.add(centre_GD[:, None], grouped,",
        "torch.add(0 * centre_GD[:, None], grouped,",
        "tests/local/test_fp8.py::test_error_and_bias_are_small_for_any_values[65-means]",
        "images lose their means",
    ),
    Fault(
        "the values' centre is left out where the out GEMM reads it",
        "seqpar/families/_matrix8.py",
        "centre_E = -centre_GD.repeat",
        "centre_E = 0 * centre_GD.repeat",
        "tests/transformer/test_attention8.py::test_a_gemm_in_8_bits_takes_its_own_centre_out_of_values_that_lack_theirs",
        "images lose their means where GEMMs are in 8 bits, too",
    ),
    Fault(
        "the mean of a LoRA's GEMM is put back by the product of the weights without it",
        "seqpar/transformer/blocks.py",
        "if isinstance(weight, Weight8) and weight.loaded else None",
        "if isinstance(weight, Weight8) else None",
        "tests/transformer/test_weight8.py::test_loras_are_merged_into_what_the_files_hold_and_leave_no_trace",
        "a product that belongs to other weights moves each output channel by a constant",
    ),
    Fault(
        "a LoRA in 8 bits is added to weights that were rounded before",
        "seqpar/transformer/lora.py",
        "own = own.to(layer.weight.device) if source is None else next(coming)",
        "own = own.to(layer.weight.device)",
        "tests/transformer/test_weight8.py::test_loras_are_merged_into_what_the_files_hold_and_leave_no_trace",
        "what is merged and taken off again adds up",
    ),
    Fault(
        "a budget of other weights is used",
        "seqpar/transformer/calibration.py",
        "key_of((sorted(of),), weights_of({name: modules[name]}))",
        "key_of((sorted(of),), ())",
        "tests/verifying/test_budget.py::test_loading_reads_the_result_of_its_own_weights_steps_and_bound",
        "what another model keeps in 16 bits bounds no error of this one",
    ),
    Fault(
        "a scale of 8 bits saturates",
        "seqpar/kernels/rows8.py",
        "scales = (x_RE.abs().amax(-1, keepdim=True) * INVERSE).float()",
        "scales = (x_RE.abs().amax(-1, keepdim=True) / 900.0).float()",
        "tests/transformer/test_precision.py::test_the_sum_is_exact_and_saturates_nowhere",
        "numbers above 448 are lost",
    ),
    Fault(
        "shard starts one item late where parts are uneven",
        "seqpar/mesh/shard.py",
        "return slice(self.starts[part], self.starts[part] + self.sizes[part])",
        "late = int(self.total % self.parts > 0)\n"
        "        return slice(self.starts[part] + late, self.starts[part] + late + self.sizes[part])",
        "tests/mesh/test_shard.py::test_shard_covers_all_items_once_in_balanced_slices",
        "slices no longer cover the items",
    ),
    Fault(
        "the loop's weights in 8 bits are those of before a write",
        "seqpar/loop/eight.py",
        "if self._versions() != self._written:",
        "if False:",
        "tests/loop/test_eight.py::test_weights_written_in_place_are_followed_in_the_same_memory",
        "a stale copy of the weights computes",
    ),
    Fault(
        "the loop's product of a centre is that of before a write",
        "seqpar/loop/eight.py",
        "old.folded.copy_(new.folded)",
        "old.folded.copy_(old.folded)",
        "tests/loop/test_eight.py::test_weights_written_in_place_are_followed_in_the_same_memory",
        "a stale centre stays in the bias",
    ),
    Fault(
        "guidance branches are swapped on the cfg axis",
        "seqpar/loop/run.py",
        "cond, uncond = keeper.gathered(",
        "uncond, cond = keeper.gathered(",
        "tests/loop/test_sampling.py::test_sampling_is_the_same_on_every_mesh[2]",
        "cfg=2 differs from one rank",
    ),
    Fault(
        "tokens of reference images have the picture's modulation",
        "seqpar/families/qwen_image.py",
        "of_batch + rows * (modulate_index != 0)",
        "of_batch + 0 * (modulate_index != 0)",
        "tests/test_families.py::test_a_family_computes_what_diffusers_does[qwen_edit-3]",
        "a row for each picture is what every other family has",
    ),
    Fault(
        "queries of padding have the others' numbers added to their scores",
        "seqpar/transformer/attention.py",
        "torch.where(*parts).flatten(2) for parts",
        "parts[1].flatten(2) for parts",
        "tests/test_families.py::test_a_family_computes_what_diffusers_does[chroma_numbers-3]",
        "Chroma's pipeline masks by floating numbers, which torch adds only where query and key have a 1",
    ),
    Fault(
        "a fused block takes what was left for another tensor",
        "seqpar/transformer/blocks.py",
        "left = self._state.handed.pop(id(x_BlE), None)",
        "left = self._state.handed.popitem()[1] if self._state.handed else None",
        "tests/families/test_blocks.py::test_calls_of_other_forms_are_right[3-residuals of a ControlNet]",
        "a ControlNet's residual is left out of the next block's input",
    ),
    Fault(
        "an encoder stays while a transformer's weights load",
        "seqpar/loading/encoders.py",
        "        encoder.end()\n",
        "",
        "tests/pipelines/test_load.py::test_encoders_have_gone_before_a_transformer_is_placed[1]",
        "memory for both",
    ),
    Fault(
        "predictions round the state to 16 bits",
        "seqpar/transformer/call.py",
        "return outputs if self.narrow is None else as_dtype(outputs, torch.float32)",
        "return outputs",
        "tests/transformer/test_pipelines.py::test_latents_are_closer_to_the_truth",
        "an error of rounding at every step",
    ),
    Fault(
        "exact mode leaves keys in the order of the ranks",
        "seqpar/attention/_key_order.py",
        "return ByStream(local, tokens)",
        "return local",
        "tests/attention/test_bits.py::test_strategy_that_only_moves_data_has_one_ranks_bits[ulysses-peer-2]",
        "other bits on another number of ranks",
    ),
    Fault(
        "padding has the weight of tokens",
        "seqpar/attention/_key_order.py",
        "lse = lse + self._added_to(lse)",
        "lse = lse.clone()",
        "tests/transformer/test_masks.py::test_padding_is_weighed_or_masked_as_torch_adds_a_mask[kv_gather-1-True]",
        "another picture than diffusers'",
    ),
    Fault(
        "a fused block takes what was left for a skipped one",
        "seqpar/transformer/blocks.py",
        "left[2].index + 1 != self.index",
        "left[2] is self",
        "tests/families/test_blocks.py::test_a_block_after_a_skipped_one_has_its_own_modulation[1-dual0]",
        "its input has the modulation of another block",
    ),
    Fault(
        "a text is cut off before its last token",
        "seqpar/families/_masks.py",
        "tokens, full = (code >> 1) - 1,",
        "tokens, full = (code >> 1) - 2,",
        "tests/transformer/test_masks.py::test_padding_of_texts_is_not_computed[1]",
        "attention misses a token of the text",
    ),
    Fault(
        "padding of Krea 2's texts is kept in the place of words",
        "seqpar/families/_masks.py",
        "argsort(dim=1, descending=True, stable=True)",
        "argsort(dim=1, descending=False, stable=True)",
        "tests/transformer/test_masks.py::test_padding_of_texts_is_not_computed[1]",
        "the picture is that of padding",
    ),
    Fault(
        "HunyuanVideo 1.5's masks have another order than its texts",
        "seqpar/families/hunyuan_video.py",
        'for name in ("_2", "")',
        'for name in ("", "_2")',
        "tests/transformer/test_masks.py::test_padding_of_texts_is_not_computed[1]",
        "tokens of one text are masked by the padding of another",
    ),
    Fault(
        "shift and scale of the text in Stable Diffusion 3's last block are exchanged",
        "seqpar/families/sd3.py",
        "text[::-1]",
        "text",
        "tests/families/test_blocks.py::test_a_block_after_a_skipped_one_has_its_own_modulation[1-dual0]",
        "all other norms have shift first",
    ),
    Fault(
        "what whole queries read on all ranks counts alike",
        "seqpar/transformer/forward.py",
        "torch.softmax(parts[..., -1:], dim=0)",
        "torch.softmax(0 * parts[..., -1:], dim=0)",
        "tests/transformer/test_edges.py::test_a_sound_is_right_and_has_the_same_bits_on_every_rank[as it is]",
        "a rank whose keys fit better counts more",
    ),
    Fault(
        "the padding of a text that is whole on every rank is not masked in fused blocks",
        "seqpar/families/_cross.py",
        "v.unflatten(2, heads), mask_BL)",
        "v.unflatten(2, heads))",
        "tests/families/test_blocks.py::test_rounded_blocks_are_as_near_as_diffusers_own[ltx]",
        "attention reads the padding",
    ),
    Fault(
        "adapters are left out of fused blocks",
        "seqpar/transformer/blocks.py",
        "if any(adapters.active(layer) for layer in layers):",
        "if False:",
        "tests/families/test_blocks.py::test_adapters_are_merged_and_unloading_restores_the_bits[1-qwen-True-actions0]",
        "weights without LoRA",
    ),
    Fault(
        "merge weighs by the wrong sign, plain torch",
        "seqpar/kernels/merge.py",
        "torch.sigmoid(part_lse - lse)",
        "torch.sigmoid(lse - part_lse)",
        "tests/kernels/test_merge.py::test_fp64_stays_fp64",
        "the part with the larger log-sum-exp gets the smaller weight",
    ),
    Fault(
        "merge weighs by the wrong sign, Triton",
        "seqpar/kernels/merge.py",
        "tl.exp(ours - top), tl.exp(theirs - top)",
        "tl.exp(theirs - top), tl.exp(ours - top)",
        "tests/kernels/test_merge.py::test_odd_strides_and_swapped_weights",
        "the part with the larger log-sum-exp gets the smaller weight",
    ),
    Fault(
        "ring in peer memory reads a block before it has arrived",
        "seqpar/transports/peer/blocks.py",
        "self._arrived.wait()",
        "pass",
        "tests/transports/test_moves.py::test_every_element_arrives_at_its_place[3-ring-peer]",
        "a slow rank's old block is read",
    ),
    Fault(
        "ring in peer memory writes into a slot that is still read",
        "seqpar/transports/peer/blocks.py",
        "self._free.wait()",
        "pass",
        "tests/transports/test_moves.py::test_every_element_arrives_at_its_place[3-ring-peer]",
        "a fast rank writes over what a slow one reads",
    ),
    Fault(
        "ulysses in peer memory reads heads, or the output, before all ranks wrote them",
        "seqpar/transports/peer/exchange.py",
        "self.flags.meet()\n        return self._arrived",
        "None\n        return self._arrived",
        "tests/transports/test_moves.py::test_every_element_arrives_at_its_place[2-heads-peer]",
        "those of the exchange before",
    ),
    Fault(
        "kv_gather in peer memory writes into slots that are still read",
        "seqpar/transports/peer/exchange.py",
        "if first:\n            self._begun.meet()",
        "if first:\n            pass",
        "tests/transports/test_moves.py::test_every_element_arrives_at_its_place[3-key_values-peer]",
        "a slow reader sees the next call's keys",
    ),
    Fault(
        "gather in peer memory copies before all ranks have begun",
        "seqpar/transports/peer/blocks.py",
        "self._begun.meet()\n        spread(",
        "spread(",
        "tests/transports/test_moves.py::test_every_element_arrives_at_its_place[2-gather-peer]",
        "a slow reader sees the next call's block",
    ),
    Fault(
        "every rank gets the positions of rank 0",
        "seqpar/loop/distributed.py",
        "{name: split.mine(name, x, dim=0) for name, x in rows.items()}",
        "{name: x[split.shard(name).slice(0)] for name, x in rows.items()}",
        "tests/graphs/test_distributed.py::test_sharded_dit_equals_diffusers[2-kv_gather-1-(8, 8)]",
        "the second half of the picture has the first half's positions",
    ),
    Fault(
        "positions are off by one in the loop",
        "seqpar/loop/run.py",
        "forward_tokens(streams, share.positions, conditioning, share.attend)",
        "forward_tokens(\n"
        "            streams, {k: x.roll(1, 0) for k, x in share.positions.items()}, conditioning, share.attend\n"
        "        )",
        "tests/loop/test_sampling.py::test_one_rank_computes_what_diffusers_does[DDIM alone 0.0]",
        "every token has its neighbour's position",
    ),
    Fault(
        "rotary index counts from 1",
        "seqpar/loop/models/large_dit.py",
        "index = torch.arange((height // patch) * (width // patch),",
        "index = 1 + torch.arange((height // patch) * (width // patch),",
        "tests/loop/models/test_large_dit.py::test_rotary_has_the_bits_of_the_originals_complex_table",
        "attention depends on differences of positions alone, so only the table itself shows it",
    ),
    Fault(
        "ulysses attends to what it was given first",
        "seqpar/attention/ulysses.py",
        "q, k, v = into.deliver(met)\n",
        "q, k, v = into.deliver(met)\n"
        '        q, k, v = vars(self).setdefault("_stale", (q.clone(), k.clone(), v.clone()))\n',
        "tests/attention/test_strategies.py::test_strategy_equals_unsharded_attention[2-ulysses-peer]",
        "a buffer of the call before, which a test that repeats its data cannot see",
    ),
    Fault(
        "kv_gather attends to the keys that it was given first",
        "seqpar/attention/kv_gather.py",
        "prepared, k, v = exchange.deliver(met)\n",
        "prepared, k, v = exchange.deliver(met)\n"
        '        k, v = vars(self).setdefault("_stale", (k.clone(), v.clone()))\n',
        "tests/attention/test_strategies.py::test_strategy_equals_unsharded_attention[2-kv_gather-collective]",
        "a buffer of the call before",
    ),
    Fault(
        "ring leaves its last block out",
        "seqpar/attention/ring.py",
        "out, lse = merge(out, lse, ",
        "out, lse = (out, lse) if step == self._axis.size else merge(out, lse, ",
        "tests/attention/test_strategies.py::test_strategy_equals_unsharded_attention[2-ring-collective]",
        "some keys are never attended to",
    ),
    Fault(
        "channels without guidance take the unconditional branch",
        "seqpar/kernels/ddim.py",
        "torch.cat((mixed, cond[..., guided:]), dim=-1)",
        "torch.cat((mixed, uncond_nlM[..., guided:width].to(state_nlC.dtype)), dim=-1)",
        "tests/loop/test_sampling.py::test_one_rank_computes_what_diffusers_does[DDIM channels 0.0]",
        "the fourth channel differs from diffusers' by hand",
    ),
    Fault(
        "DDPM takes the variances of the unconditional branch",
        "seqpar/kernels/ddim.py",
        "cond_nlM[..., width : 2 * width].to(clip.dtype)",
        "(cond_nlM if uncond_nlM is None else uncond_nlM)[..., width : 2 * width].to(clip.dtype)",
        "tests/loop/test_original.py::test_every_step_is_the_originals[ddpm-4,3,2-False]",
        "each step differs from the original's",
    ),
    Fault(
        "DDIM's last step ends at the first training timestep",
        "seqpar/loop/schedules.py",
        "if end >= 0 else scheduler.final_alpha_cumprod)",
        "if end >= 0 else scheduler.alphas_cumprod[0])",
        "tests/loop/test_schedules.py::test_ddim_coefficients_are_diffusers[False-epsilon]",
        "the last coefficients differ from diffusers'",
    ),
    Fault(
        "DiT's norm before the MLP has diffusers' eps in the original arithmetic",
        "seqpar/loop/models/dit.py",
        "mlp_norm_eps: float = 1e-6",
        "mlp_norm_eps: float = 1e-5",
        "tests/convert/test_originals.py::test_every_file_of_the_original_dit_reproduces_its_arithmetic[released]",
        "an original checkpoint would be computed with diffusers' eps",
    ),
    Fault(
        "init_noise_sigma is ignored",
        "seqpar/loop/request.py",
        'float(getattr(self.scheduler, "init_noise_sigma", 1.0))',
        "1.0",
        "tests/loop/test_sampling.py::test_one_rank_computes_what_diffusers_does[Euler]",
        "Euler starts with too little noise",
    ),
    Fault(
        "Large-DiT's default norm_eps",
        "seqpar/loop/models/large_dit.py",
        "norm_eps: float = 1e-5",
        "norm_eps: float = 1e-6",
        "tests/loop/models/test_large_dit.py::test_large_dit_with_its_defaults_is_the_published_arithmetic",
        "published sizes and recognised checkpoints would be computed with another eps than the published one",
    ),
    Fault(
        "a profile's waiting ends when the first rank has come",
        "seqpar/profiling/ranks.py",
        "last = max(same, key=lambda rank: same[rank].start)",
        "last = min(same, key=lambda rank: same[rank].start)",
        "tests/profiling/test_ranks.py::test_a_collective_waits_for_the_last_rank_and_then_exchanges",
        "waiting counts as an exposed exchange",
    ),
    Fault(
        "a profile's clocks are moved the wrong way",
        "seqpar/profiling/ranks.py",
        "found.append(base - ahead)",
        "found.append(base + ahead)",
        "tests/profiling/test_ranks.py::test_traces_of_all_ranks_are_one_trace_on_one_clock",
        "ranks are on different clocks",
    ),
    Fault(
        "hooks of a profile stay",
        "seqpar/profiling/record.py",
        "            self._blocks.end()\n",
        "            pass\n",
        "tests/profiling/test_profile.py::test_nothing_is_registered_without_a_profile",
        "hooks are left after a profile",
    ),
    Fault(
        "operations inside of others count, too",
        "seqpar/profiling/trace.py",
        'until = event["ts"] + event["dur"]',
        'until = event["ts"]',
        "tests/profiling/test_trace.py::test_outermost_operations_of_a_cpu_and_its_exchanges_count",
        "an inner operation is among the events",
    ),
)


@contextmanager
def copied(fault: Fault | None = None) -> Iterator[Path]:
    """Yield a temporary copy of the tree, with the fault if one is given."""
    root = Path(tempfile.mkdtemp(prefix="seqpar-fault-"))
    try:
        for part in COPIED:
            if (ROOT / part).is_dir():
                shutil.copytree(ROOT / part, root / part)  # with compiled files, which are as old as their sources
            else:
                shutil.copy(ROOT / part, root / part)
        if fault is not None:
            fault.apply(root)
        yield root
    finally:
        remove(root)


def remove(root: Path) -> None:
    """Remove a folder in which ranks that a test has killed may still write compiled files for a moment."""
    until = time.monotonic() + REMOVED_S
    while root.exists():
        shutil.rmtree(root, ignore_errors=time.monotonic() < until)
        time.sleep(0.1)


def run(root: Path, tests: Sequence[str], *more: str) -> tuple[int, str]:
    """Return pytest's exit status (FAILED also if it takes too long) and the end of its output. more: flags."""
    # one worker, forked like its ranks from a server: what all of them import is imported once
    flags = ("-n", "1", "-p", "no:cacheprovider", "--no-showlocals", "--tb=line", *more)
    command = [sys.executable, "-m", "pytest", *flags, *tests]
    environment, limit_s = {**os.environ, "PYTHONPATH": str(root)}, DEADLINE_S + HANG_S * len(tests)
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return FAILED, f"no end within {limit_s} s"
    return done.returncode, done.stdout[-2000:] + done.stderr[-2000:]


def verdict(status: int, text: str) -> str:
    """Return the verdict on a fault from its test's exit status and output; "caught..." means the test failed."""
    if status == 0:
        return "SURVIVES"
    if status != FAILED:
        return f"BROKEN ENTRY (pytest's exit status {status})"
    if wrong := next((name for name in MISTAKES if name in text), None):
        return f"BROKEN ENTRY ({wrong}: the edited program does not run)"
    return "caught, by a hang" if "Timeout" in text or "did not answer in time" in text else "caught"


def replay(fault: Fault) -> bool:
    """Return whether the fault is caught, and print its line of the table."""
    start = time.monotonic()
    with copied(fault) as root:
        status, text = run(root, (fault.test,), f"--timeout={HANG_S}")
    found = verdict(status, text)
    print(f"| {fault.name} | {found} | {time.monotonic() - start:.0f} |", flush=True)
    if found.startswith("BROKEN"):
        print(text)
    return found.startswith("caught")


def chosen_of(faults: Sequence[Fault], count: int, seed: str) -> list[Fault]:
    """Return some of the faults: the same ones for the same seed, and over many seeds all of them."""
    return random.Random(seed).sample(faults, min(count, len(faults)))


def main() -> int:
    """Replay the table and return 0 if every fault is caught, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="replay the faults whose name contains this text")
    parser.add_argument("--some", type=int, default=len(FAULTS), help="replay this many of them")
    parser.add_argument("--seed", default="", help="what chooses them")
    arguments = parser.parse_args()
    chosen = chosen_of([fault for fault in FAULTS if arguments.only in fault.name], arguments.some, arguments.seed)
    if not chosen:
        parser.error("got --only with a text that no fault's name contains; see FAULTS for the names")
    print("| fault | verdict | seconds |\n| --- | --- | --- |", flush=True)
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        without = pool.submit(unharmed, sorted({fault.test for fault in chosen}))
        caught = [*pool.map(replay, chosen)]
    return 0 if without.result() and all(caught) else 1


def unharmed(tests: Sequence[str]) -> bool:
    """Return whether tests pass on a copy without a fault."""
    with copied() as root:
        status, text = run(root, tests)
    if status != 0:
        print(f"the tests do not pass without a fault (pytest's exit status {status}):\n{text}")
    return status == 0


if __name__ == "__main__":
    sys.exit(main())
