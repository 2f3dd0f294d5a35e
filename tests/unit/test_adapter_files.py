"""Directories of LoRA adapters: what is read of them, and what is refused, by name."""

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from nightjar.checkpoints import CheckpointError, ModelDirectory, read_config
from nightjar.checkpoints.adapters import (
    adapted_shapes,
    not_served,
    rank_of,
    read_adapter,
    unfit,
)
from nightjar.checkpoints.precision_plan import LayerPlan, PrecisionPlan
from tests.adapters import gpt2_sizes, save_adapter
from tests.models import TINY, save_gpt2

SIZES = gpt2_sizes(2, 32, 128)
ATTENTION = {name: size for name, size in SIZES.items() if name.endswith("c_attn")}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return read_config(save_gpt2(tmp_path_factory.mktemp("model") / "tiny", TINY))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "adapter"


def change(folder, rename=lambda name: name, **tensors):
    """Write the tensors again: under other names, and with others beside them."""
    path = str(folder / "adapter_model.safetensors")
    found = {rename(name): tensor.clone() for name, tensor in load_file(path).items()}
    save_file(found | tensors, path)


def test_factors_have_names_that_no_family_decides_and_the_scale(folder, config):
    save_adapter(folder, ATTENTION, rank=4, lora_alpha=6)
    factors = read_adapter(folder, config)
    assert sorted(factors) == [
        f"{i}.query_key_value.{side}" for i in (0, 1) for side in ("down", "up")
    ]
    tensors = load_file(str(folder / "adapter_model.safetensors"))
    root = "base_model.model.transformer.h.1.attn.c_attn.lora_"
    assert np.array_equal(factors["1.query_key_value.down"], tensors[f"{root}A.weight"].numpy())
    assert np.array_equal(factors["1.query_key_value.up"], 1.5 * tensors[f"{root}B.weight"].numpy())
    assert rank_of(factors) == 4
    assert unfit(factors, config) is None


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({"lora_alpha": 16}, 4.0),
        ({"lora_alpha": 16, "use_rslora": True}, 8.0),
        ({"lora_alpha": 16, "alpha_pattern": {"c_attn": 2}}, 0.5),
        ({"lora_alpha": 16, "alpha_pattern": {"transformer.h.0.attn.c_attn": 2}}, 0.5),
        ({"lora_alpha": 16, "alpha_pattern": {"h.1.attn.c_attn": 2, "attn.c_att": 3}}, 4.0),
    ],
)
def test_scales_are_those_of_peft(folder, config, settings, scale):
    save_adapter(folder, ATTENTION, rank=4, **settings)
    up = load_file(str(folder / "adapter_model.safetensors"))[
        "base_model.model.transformer.h.0.attn.c_attn.lora_B.weight"
    ]
    assert np.array_equal(
        read_adapter(folder, config)["0.query_key_value.up"], np.float32(scale) * up.numpy()
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_float_is_read(folder, config, dtype):
    save_adapter(folder, SIZES, dtype=dtype)
    stored = load_file(str(folder / "adapter_model.safetensors"))
    found = read_adapter(folder, config)["0.down.down"]
    expected = stored["base_model.model.transformer.h.0.mlp.c_proj.lora_A.weight"].float()
    assert np.array_equal(found, expected.numpy())


def test_names_without_the_prefix_of_the_model_with_a_head(folder, config):
    save_adapter(folder, gpt2_sizes(2, 32, 128, prefix=""))
    assert len(read_adapter(folder, config)) == 16


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"use_dora": True}, "use_dora is set: DoRA"),
        ({"modules_to_save": ["wte"]}, "modules_to_save is set"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base model"),
        ({"init_lora_weights": "lora_ga"}, "changes the base model"),
        ({"kasa_config": {"beta": 1e-4}}, "kasa_config is set: KaSA"),
        ({"monteclora_config": {"num_samples": 8}}, "monteclora_config"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"r": 0}, "r is 0; use a rank from 1"),
        ({"r": 4096}, "use a rank from 1 to 512"),
        ({"r": None}, "r is None"),
        ({"lora_alpha": "big"}, "lora_alpha is 'big'"),
        ({"lora_alpha": float("inf")}, "lora_alpha is inf"),
        ({"alpha_pattern": {".*c_attn": 4}}, "only names of modules"),
    ],
)
def test_what_is_not_served_is_refused_by_name(folder, config, settings, words):
    save_adapter(folder, SIZES, **settings)
    with pytest.raises(CheckpointError, match="adapter") as caught:
        read_adapter(folder, config)
    assert words in str(caught.value)


def test_a_pickle_is_never_read(folder, config):
    class Mark:
        def __reduce__(self):
            return (folder.joinpath("executed").touch, ())

    save_adapter(folder, SIZES)
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Mark()))
    with pytest.raises(CheckpointError, match="a pickle, which is never read"):
        read_adapter(folder, config)
    assert not (folder / "executed").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("base_model.model.lm_head.lora_A.weight", "'lm_head' is adapted"),
        ("base_model.model.transformer.wte.lora_A.weight", "'wte' is adapted"),
        ("base_model.model.transformer.h.2.attn.c_attn.lora_A.weight", "has 2 layers"),
        ("base_model.model.transformer.h.0.attn.q_proj.lora_A.weight", "does not have; it has"),
        ("base_model.model.transformer.h.0.attn.c_attn.lora_magnitude_vector", "DoRA"),
        ("base_model.model.transformer.wte.lora_embedding_A", "no factor A or B"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "'model.layers.0"),
    ],
)
def test_other_layers_and_other_tensors(folder, config, name, words):
    save_adapter(folder, SIZES)
    change(folder, **{name: torch.zeros(4, 32)})
    with pytest.raises(CheckpointError) as caught:
        read_adapter(folder, config)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("factor", "tensor", "words"),
    [
        ("A", torch.zeros(4, 33), "needs [rank, 32] and [96, rank]"),
        ("A", torch.zeros(3, 32), "lora_A is [3, 32] and lora_B [96, 4]"),
        ("B", torch.zeros(96), "lora_B [96]"),
        ("B", torch.full((96, 4), float("nan")), "holds NaN or infinity"),
        ("B", torch.full((96, 4), 1e300, dtype=torch.float64), "holds NaN or infinity"),
        ("B", torch.zeros(96, 4, dtype=torch.int32), "is stored as I32"),
    ],
)
def test_factors_that_cannot_be_used(folder, config, factor, tensor, words):
    save_adapter(folder, ATTENTION)
    change(folder, **{f"base_model.model.transformer.h.0.attn.c_attn.lora_{factor}.weight": tensor})
    with pytest.raises(CheckpointError) as caught:
        read_adapter(folder, config)
    assert words in str(caught.value)


def test_rank_zero_in_the_tensors(folder, config):
    save_adapter(folder, ATTENTION)
    root = "base_model.model.transformer.h.0.attn.c_attn.lora_"
    change(folder, **{f"{root}A.weight": torch.zeros(0, 32), f"{root}B.weight": torch.zeros(96, 0)})
    with pytest.raises(CheckpointError, match="the rank is 0"):
        read_adapter(folder, config)


def test_half_a_pair_a_truncated_file_and_no_file(folder, config):
    save_adapter(folder, ATTENTION)
    change(folder, lambda name: name.replace("h.1.attn.c_attn.lora_A", "h.1.attn.c_proj.lora_A"))
    with pytest.raises(CheckpointError, match="is missing"):
        read_adapter(folder, config)
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        read_adapter(folder, config)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_adapter(folder, config)
    save_file({}, str(path))
    with pytest.raises(CheckpointError, match="adapts nothing"):
        read_adapter(folder, config)
    (folder / "adapter_config.json").write_text(json.dumps([]))
    with pytest.raises(CheckpointError, match="expected a JSON object"):
        read_adapter(folder, config)


def test_factors_of_another_model_are_unfit(folder, config):
    factors = read_adapter(save_adapter(folder, SIZES), config)
    assert unfit(factors, config) is None
    assert "32" in str(unfit(factors, replace(config, hidden_size=64)))
    assert "has 1 layers" in str(unfit(factors, replace(config, n_layers=1)))
    assert unfit({}, config) == "it adapts nothing"
    half = {name: one for name, one in factors.items() if not name.startswith("0.down.up")}
    assert unfit(half, config) is not None
    assert unfit({"0.gate.down": factors["0.up.down"]}, config) is not None
    assert set(adapted_shapes(config)) == {"query_key_value", "attention_out", "up", "down"}


def test_where_a_model_takes_no_adapter_is_known_before_it_is_loaded(tmp_path):
    path = save_gpt2(tmp_path / "tiny", TINY)
    fingerprint = ModelDirectory.open(path).plain_fingerprint

    def planned(**layer):
        plan = PrecisionPlan(fingerprint, {1: LayerPlan(**layer)})
        plan.write(path, overwrite=True)
        return ModelDirectory.open(path)

    plain = ModelDirectory.open(path)
    assert not_served(plain, "fp16", 1) is None
    assert "serve it without shards" in not_served(plain, "auto", 2)
    assert not_served(planned(mlp_input=True), "fp16", 1) is None
    for head in ("query", "key", "value"):
        divided = planned(**{head: 2})
        assert "divides heads in fp16; serve the model in bf16" in not_served(divided, "fp16", 1)
        assert not_served(divided, "bf16", 1) is None
