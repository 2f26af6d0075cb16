"""Tests that configs of any content are read or refused by one short message, and that published ones are read.

What is refused is refused before anything is allocated: a config is a file of strangers.
"""

from __future__ import annotations

import json
import os
import re
import time
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from seqpar.loading import parts
from seqpar.loop.models import dit, large_dit, uvit

Read = Callable[[Mapping[str, Any]], object]

DIT = {
    "_class_name": "DiTTransformer2DModel",
    **{"activation_fn": "gelu-approximate", "attention_bias": True, "attention_head_dim": 72, "dropout": 0.0},
    **{"in_channels": 4, "norm_elementwise_affine": False, "norm_eps": 1e-05, "norm_num_groups": 32},
    **{"norm_type": "ada_norm_zero", "num_attention_heads": 16, "num_embeds_ada_norm": 1000, "num_layers": 28},
    **{"out_channels": 8, "patch_size": 2, "sample_size": 32, "upcast_attention": False, "num_vector_embeds": None},
}
UVIT = {
    "_class_name": "UniDiffuserModel",
    **{"activation_fn": "gelu", "attention_head_dim": 64, "clip_img_dim": 512, "in_channels": 4, "num_layers": 30},
    **{"num_attention_heads": 24, "num_text_tokens": 77, "out_channels": 4, "patch_size": 2, "sample_size": 64},
    **{"text_dim": 64, "use_data_type_embedding": True, "dropout": 0.0, "block_type": "unidiffuser"},
}
LARGE_DIT = {
    "_class_name": "DiTLLaMA2DModel",
    **{"num_attention_heads": 32, "attention_head_dim": 96, "num_layers": 2, "patch_size": 2, "in_channels": 4},
    **{"out_channels": 8, "n_kv_heads": None, "num_classes": 1000, "norm_eps": 1e-5, "qk_norm": True},
    **{"sample_size": 32, "learn_sigma": True},
}
VAE = {
    "_class_name": "AutoencoderKL",
    **{"act_fn": "silu", "block_out_channels": [128, 256, 512, 512], "in_channels": 3, "out_channels": 3},
    **{"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4},
    **{"latent_channels": 16, "latents_mean": None, "layers_per_block": 2, "norm_num_groups": 32, "sample_size": 1024},
    **{"scaling_factor": 0.3611, "shift_factor": 0.1159, "force_upcast": 1.0, "use_quant_conv": False},
}
SHAPES = {
    "x_embedder.weight": (3072, 16),
    "layers.0.attention.wk.weight": (3072, 3072),
    "layers.0.feed_forward.w1.weight": (8192, 3072),
    "layers.1.feed_forward.w1.weight": (8192, 3072),
    "final_layer.linear.weight": (32, 3072),
    "y_embedder.embedding_table.weight": (1001, 1024),
    "layers.0.attention.q_norm.weight": (3072,),
}
READERS: dict[str, tuple[Read, Mapping[str, Any]]] = {
    "dit": (lambda config: dit.recognise({}, config), DIT),
    "uvit": (lambda config: uvit.recognise({}, config), UVIT),
    "large_dit": (lambda config: large_dit.recognise(SHAPES, config), LARGE_DIT),
    "vae": (lambda config: parts.check_autoencoder(config, "config.json"), VAE),
}


# What any field may hold in the file of a stranger
ODD = ["x", "", [], {}, -1, 1.5, 10**12, 10**400, float("nan"), float("inf"), -(10**9), [10**12] * 3, {"a": [None]}]
NUMBERS = (*range(2, 10), *range(10, 200, 7), 1024, 4096, 10**6)
# fields of other packages' classes that are checked here; the rest is left to these packages
CHECKED = {"vae": parts.Autoencoder.__struct_fields__}
# values of `ODD` that are right
FREE = {("shift_factor", "-1"), ("shift_factor", "1.5"), ("scaling_factor", "1.5")}


def test_a_value_of_the_wrong_kind_in_any_field_is_refused_by_name() -> None:
    refused, accepted = 0, []
    for name, (read, config) in READERS.items():
        read(json.loads(json.dumps(config)))  # a negative control
        for key in (key for key in config if not key.startswith("_") and key in CHECKED.get(name, (key,))):
            for value in ODD:
                if (key, repr(value)) in FREE:
                    continue
                message = refusal(read, {**config, key: value})
                refused += message is not None
                if message is None or not re.match(rf"got .* with .*{key}", message) or len(message) > 300:
                    accepted.append((key, value, message))
    assert not accepted
    assert refused > 600


def refusal(read: Read, config: Mapping[str, Any]) -> str | None:
    try:
        read(config)
    except ValueError as error:
        return str(error)
    return None


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(NUMBERS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
CHANGES = st.lists(st.tuples(st.integers(0, 30), ANY), min_size=1, max_size=3)


@settings(max_examples=300, database=None)
@given(st.sampled_from(sorted(READERS)), CHANGES, st.lists(st.integers(0, 30), max_size=2))
@example("large_dit", [(1, 1)], [])  # fewer heads than the tensors have
@example("large_dit", [(3, 1)], [])  # fewer layers
def test_a_mutated_config_is_read_or_refused_by_one_short_message(
    name: str, changes: list[tuple[int, Any]], dropped: list[int]
) -> None:
    read, config = READERS[name]
    keys = [*config, "unknown"]
    changed = {**config, **{keys[index % len(keys)]: value for index, value in changes}}
    for index in dropped:
        changed.pop(keys[index % len(keys)], None)
    message = refusal(read, json.loads(json.dumps(changed)))
    if message is not None:
        assert message.startswith("got ")
        assert len(message) < 400
    elif (found := read(changed)) is not None:  # a model's config: bounded, so that a model can be built on meta
        sizes = [value for value in vars(found).values() if isinstance(value, int)]
        assert all(0 <= size <= 1 << 24 for size in sizes)
        assert getattr(found, "num_layers", 0) <= 4096


# Files ---------------------------------------------------------------------------------------------------------------


def write(text: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(text)


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a folder": (Path.mkdir, "there is no such file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "there is no such file"),
    "a link to nothing": (lambda path: path.symlink_to(path.with_name("gone")), "there is no such file"),
    "a terabyte": (lambda path: (path.touch(), os.truncate(path, 1 << 40)), r"it has more than \d+ bytes"),
    "nothing": (write(b""), "Expecting value"),
    "bytes": (write(b"\xff\xfe\x00"), "codec can't decode"),
    "a number": (write(b"3"), "holds a int"),
    "a list": (write(b"[{}]"), "holds a list"),
    "brackets": (write(b"[" * 1_000_000), "recursion"),
    "a long number": (write(b'{"a": ' + b"9" * 5000 + b"}"), "digits"),
}


@pytest.mark.parametrize("read", [parts.read_json, parts.read_index])
def test_a_file_that_is_no_config_is_refused_at_once(tmp_path: Path, read: Callable[[Path], object]) -> None:
    tracemalloc.start()
    started = time.process_time()
    for index, (make, message) in enumerate(FILES.values()):
        path = tmp_path / f"{index}.json"
        make(path)
        with pytest.raises(ValueError, match=message) as error:
            read(path)
        assert str(path) in str(error.value)
    assert time.process_time() - started < 2
    assert tracemalloc.get_traced_memory()[1] < 100 << 20
    tracemalloc.stop()


INDICES: list[Any] = [[], {"a": 1}, {}, None, "x", {"a": None}, {"a": ["b"]}, {"a": {"b": "c"}}]
INDICES += [{"a": name} for name in ("../x.bin", "/etc/passwd", "..", ".", "", "b\0.bin", "x.json", "a/b.bin", "a\\b")]


def test_an_index_that_leaves_its_folder_or_names_itself_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    for places in INDICES:
        path.write_text(json.dumps({"weight_map": places}))
        with pytest.raises(ValueError, match=r"expected a weight_map of keys to names of weight files beside it"):
            parts.read_index(path)
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": {"a": "model-1.safetensors"}}))
    assert parts.read_index(path) == {"a": "model-1.safetensors"}
