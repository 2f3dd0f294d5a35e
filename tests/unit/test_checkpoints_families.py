"""config.json of every family: as published, as transformers 5 saves it, and damaged."""

import json

import pytest
from transformers import AutoConfig

from nightjar.checkpoints import CheckpointError, read_config
from nightjar.checkpoints.rope import LinearScaling, Llama3Scaling, RopeConfig, YarnScaling
from tests.families import CASES, SIZES

# What the published files hold of a decoder's shape.
LLAMA_3_2_1B = {
    "model_type": "llama",
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
POLYGLOT_KO_1_3B = {
    "model_type": "gpt_neox",
    "bos_token_id": 0,
    "eos_token_id": 2,
    "hidden_act": "gelu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "num_steps": "global_step213000",
    "rotary_emb_base": 10000,
    "rotary_pct": 0.5,
    "tie_word_embeddings": False,
    "use_parallel_residual": True,
    "vocab_size": 30080,
}
MISTRAL_7B = {
    "model_type": "mistral",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
QWEN2_5_0_5B = {
    "model_type": "qwen2",
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_0_6B = QWEN2_5_0_5B | {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "sliding_window": None,
}
HYPERCLOVA_X_THINK = {
    "model_type": "hyperclovax",
    "attention_bias": False,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 10.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "intermediate_size": 14336,
    "logits_scaling": 0.125,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 48,
    "num_hidden_layers": 38,
    "num_key_value_heads": 8,
    "residual_multiplier": 1.0,
    "rms_norm_eps": 1e-05,
    "rope_theta": 100000000,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "use_post_norm": True,
    "vocab_size": 110592,
}
SMALL = SIZES | {"rotary_pct": 0.5, "num_key_value_heads": 2}
PUBLISHED = (
    LLAMA_3_2_1B,
    POLYGLOT_KO_1_3B,
    MISTRAL_7B,
    QWEN2_5_0_5B,
    QWEN3_0_6B,
    HYPERCLOVA_X_THINK,
)


def read(directory, values):
    (directory / "config.json").write_text(json.dumps(values))
    return read_config(directory)


def refusal(directory, values):
    with pytest.raises(CheckpointError) as caught:
        read(directory, values)
    assert "config.json" in str(caught.value)
    return str(caught.value)


def test_llama_as_published(tmp_path):
    config = read(tmp_path, LLAMA_3_2_1B)
    assert (config.n_heads, config.n_kv_heads, config.head_size) == (32, 8, 64)
    assert (config.norm, config.activation, config.gated) == ("rms_norm", "silu", True)
    assert {config.qkv_bias, config.attention_out_bias, config.mlp_bias} == {False}
    assert config.tied_embeddings
    assert config.rope == RopeConfig(500000.0, 64, Llama3Scaling(32.0, 1.0, 4.0, 8192))
    assert (config.context_length, config.eos_token_ids) == (131072, (128001, 128008, 128009))


def test_polyglot_as_published(tmp_path):
    config = read(tmp_path, POLYGLOT_KO_1_3B)
    assert config.rope == RopeConfig(10000.0, 64)
    assert (config.head_size, config.norm, config.gated) == (128, "layer_norm", False)
    assert config.parallel_residual
    assert config.qkv_bias
    assert not config.tied_embeddings


def test_a_sliding_window_bounds_the_context(tmp_path):
    assert read(tmp_path, MISTRAL_7B).context_length == 4096
    assert read(tmp_path, MISTRAL_7B | {"sliding_window": None}).context_length == 32768
    windowed = QWEN2_5_0_5B | {"use_sliding_window": True, "sliding_window": 1000}
    assert read(tmp_path, QWEN2_5_0_5B).context_length == 32768
    assert read(tmp_path, windowed).context_length == 1000
    assert read(tmp_path, windowed | {"max_window_layers": 24}).context_length == 32768
    full = ["full_attention"] * 24
    assert read(tmp_path, windowed | {"layer_types": full}).context_length == 32768
    full[5] = "sliding_attention"
    assert read(tmp_path, windowed | {"layer_types": full}).context_length == 1000


def test_qwen_as_published(tmp_path):
    second, third = read(tmp_path, QWEN2_5_0_5B), read(tmp_path, QWEN3_0_6B)
    assert (second.head_size, second.qkv_bias, second.attention_out_bias) == (64, True, False)
    assert (third.head_size, third.qkv_bias, third.qk_norm) == (128, False, True)
    assert second.rope == RopeConfig(1000000.0, 64)


def test_hyperclova_x_as_published(tmp_path):
    config = read(tmp_path, HYPERCLOVA_X_THINK)
    assert set(config.attention_scales) == {0.0078125}
    assert (config.embedding_multiplier, config.logits_multiplier) == (10.0, 0.125)
    assert config.post_norms
    assert config.rope == RopeConfig(1e8, 128)


def test_yarn_switched_on_reaches_past_the_positions(tmp_path):
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = read(tmp_path, QWEN2_5_0_5B | {"rope_scaling": scaling})
    assert config.context_length == 131072
    attention = pytest.approx(1.138629, abs=1e-6)
    assert config.rope.scaling == YarnScaling(4.0, 32.0, 1.0, 32768, attention, True)


def test_dynamic_scaling_changes_nothing_within_the_context(tmp_path):
    scaling = {"type": "dynamic", "factor": 4.0}
    config = read(tmp_path, LLAMA_3_2_1B | {"rope_scaling": scaling})
    assert config.rope == RopeConfig(500000.0, 64)
    linear = read(tmp_path, LLAMA_3_2_1B | {"rope_scaling": scaling | {"type": "linear"}})
    assert linear.rope.scaling == LinearScaling(4.0)
    assert config.context_length == linear.context_length == 131072


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda values: values["model_type"])
def test_transformers_saves_the_same_shape(tmp_path, published):
    published = {"eos_token_id": 7} | published
    plain = {key: value for key, value in published.items() if key != "model_type"}
    AutoConfig.for_model(published["model_type"], **plain).save_pretrained(tmp_path)
    saved = read_config(tmp_path)
    assert saved == read(tmp_path, published)


@pytest.mark.parametrize("name", CASES)
def test_absent_keys_that_are_no_sizes_take_transformers_values(tmp_path, name):
    family = CASES[name].model_type
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    saved = read_config(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    kept = {key: values[key] for key in ("eos_token_id", *NEEDED)}
    assert read(tmp_path, {"model_type": family} | kept) == saved


NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)


@pytest.mark.parametrize("family", ["gpt_neox", "llama", "qwen3"])
@pytest.mark.parametrize("key", NEEDED)
@pytest.mark.parametrize("value", [0, -3, 10**30, "12", None, True, 1.5])
def test_absurd_sizes(tmp_path, family, key, value):
    assert key in refusal(tmp_path, SMALL | {"model_type": family, key: value})


@pytest.mark.parametrize("family", sorted({case.model_type for case in CASES.values()}))
@pytest.mark.parametrize("key", NEEDED)
def test_missing_sizes(tmp_path, family, key):
    given = {name: value for name, value in SMALL.items() if name != key}
    assert f"{key} is missing" in refusal(tmp_path, given | {"model_type": family})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value"),
        ({"num_key_value_heads": 8}, "not a multiple"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"hidden_size": 50}, "hidden_size 50 is not a multiple of num_attention_heads 4"),
        ({"head_dim": 7}, "7 of the 7 channels"),
        ({"head_dim": -8}, "head_dim"),
        ({"hidden_act": "quick_gelu"}, "quick_gelu"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0: expected a number above 0 and at most 1"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes': expected true or false"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_theta": -1}, "rope_theta"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"rope_theta": True}, "rope_theta is True"),
        ({"rope_theta": "big"}, "rope_theta is 'big'"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear': expected an object"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_scaling.type 'longrope' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is None"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor is 0"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8,
                    "low_freq_factor": 4,
                    "high_freq_factor": 4,
                }
            },
            "high_freq_factor is 4.0: expected more than low_freq_factor",
        ),
        ({"rope_scaling": {"type": "yarn", "beta_fast": -1}}, "rope_scaling.beta_fast is -1"),
        ({"rope_scaling": {"type": "yarn", "factor": 1e9}}, "rope_scaling.factor is 1e+09, over"),
        ({"rope_scaling": {"type": "yarn", "factor": 1e308}}, "a context of at most 10000000"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
    ],
)
def test_what_cannot_be_computed_is_refused(tmp_path, changes, words):
    assert words in refusal(tmp_path, SIZES | {"model_type": "llama"} | changes)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("gpt_neox", {"rotary_pct": 0}, "rotary_pct"),
        ("gpt_neox", {"rotary_pct": 1.5}, "rotary_pct"),
        ("gpt_neox", {"rotary_pct": 0.45}, "5 of the 12 channels"),
        ("gpt_neox", {"use_parallel_residual": 1}, "use_parallel_residual"),
        ("mistral", {"sliding_window": -1}, "sliding_window"),
        ("qwen2", {"use_sliding_window": True, "layer_types": ["linear"]}, "layer_types"),
        ("hyperclovax", {"residual_multiplier": 0}, "residual_multiplier"),
        ("hyperclovax", {"logits_scaling": "x"}, "logits_scaling"),
    ],
)
def test_what_a_family_refuses(tmp_path, family, changes, words):
    assert words in refusal(tmp_path, SMALL | {"model_type": family} | changes)
