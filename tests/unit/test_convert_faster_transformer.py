"""FasterTransformer's files become the model that they were written from."""

import numpy as np
import pytest
import torch
from transformers import GPT2LMHeadModel

from nightjar.checkpoints import CheckpointError
from nightjar.checkpoints.convert import Conversion, convert
from tests.megatron_models import VOCABULARY, gpt2, save_whole_tokenizer

CONFIG = """[gpt]
model_name = gpt
head_num = 4
size_per_head = 8
inter_size = 128
max_pos_seq_len = 48
num_layer = 4
vocab_size = 389
start_id = 0
end_id = 0
weight_data_type = {dtype}
tensor_para_size = {ranks}
"""


@pytest.fixture(scope="module", name="tokenizer")
def whole_tokenizer(tmp_path_factory):
    return save_whole_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def write(model, folder, ranks, dtype="fp32"):
    """One file a tensor and rank, as FasterTransformer's converter of Megatron-LM writes them."""
    folder.mkdir()
    (folder / "config.ini").write_text(CONFIG.format(ranks=ranks, dtype=dtype))
    kind = {"fp32": np.float32, "fp16": np.float16}[dtype]
    state = {name: tensor.numpy().astype(kind) for name, tensor in model.state_dict().items()}

    def save(name, array):
        np.ascontiguousarray(array).tofile(folder / f"model.{name}.bin")

    def save_parts(name, parts):
        for rank, part in enumerate(parts):
            save(f"{name}.{rank}", part)

    save("wte", state["transformer.wte.weight"])
    save("wpe", state["transformer.wpe.weight"])
    for layer in range(model.config.n_layer):
        old, new = f"transformer.h.{layer}.", f"layers.{layer}."
        for mine, theirs in (("ln_1", "input_layernorm"), ("ln_2", "post_attention_layernorm")):
            for part in ("weight", "bias"):
                save(f"{new}{theirs}.{part}", state[f"{old}{mine}.{part}"])
        for part in ("weight", "bias"):
            fused = state[f"{old}attn.c_attn.{part}"]
            by_part = fused.reshape(*fused.shape[:-1], 3, -1)
            save_parts(f"{new}attention.query_key_value.{part}", np.split(by_part, ranks, axis=-1))
            up = state[f"{old}mlp.c_fc.{part}"]
            save_parts(f"{new}mlp.dense_h_to_4h.{part}", np.split(up, ranks, axis=-1))
        for mine, theirs in (
            ("attn.c_proj", "attention.dense"),
            ("mlp.c_proj", "mlp.dense_4h_to_h"),
        ):
            save_parts(f"{new}{theirs}.weight", np.split(state[f"{old}{mine}.weight"], ranks))
            save(f"{new}{theirs}.bias", state[f"{old}{mine}.bias"])
    for part in ("weight", "bias"):
        save(f"final_layernorm.{part}", state[f"transformer.ln_f.{part}"])
    return folder


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_logits_are_those_of_the_model(ranks, tmp_path, tokenizer):
    model = gpt2()
    source = write(model, tmp_path / "source", ranks)
    found = convert(Conversion(source, tmp_path / "converted", tokenizer), lambda *_: None)
    assert found.description == f"FasterTransformer, {ranks} shards"
    tokens = torch.arange(20)[None] * 17 % VOCABULARY
    with torch.no_grad():
        logits = GPT2LMHeadModel.from_pretrained(tmp_path / "converted").eval()(tokens).logits
        assert torch.equal(logits, model(tokens).logits)


def test_sixteen_bits(tmp_path, tokenizer):
    model = gpt2()
    source = write(model, tmp_path / "source", 2, "fp16")
    convert(Conversion(source, tmp_path / "converted", tokenizer), lambda *_: None)
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "converted", dtype=torch.float16)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name].half()), name


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda f: (f / "model.layers.1.mlp.dense_h_to_4h.weight.1.bin").unlink(), "dense|mlp_in"),
        (lambda f: (f / "model.wpe.bin").unlink(), "positions.weight"),
        (lambda f: (f / "model.wpe.bin").write_bytes(b"\0" * 8), "8 bytes, but config.ini asks"),
        (lambda f: (f / "config.ini").write_text("[gpt]\nhead_num = many\n"), "head_num is 'many'"),
        (lambda f: (f / "config.ini").write_text("nothing"), "config.ini: cannot be read"),
        (lambda f: (f / "model.layers.0.moe.bin").write_bytes(b""), "another kind of model"),
    ],
)
def test_damage_is_named(damage, reason, tmp_path, tokenizer):
    source = write(gpt2(), tmp_path / "source", 2)
    damage(source)
    with pytest.raises(CheckpointError, match=reason):
        convert(Conversion(source, tmp_path / "converted", tokenizer), lambda *_: None)
