"""What another framework would save of the demo model: logits and hidden states, in plain torch."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from nightjar.checkpoints import ModelDirectory

DEMO = Path(__file__).parents[1] / "examples" / "demo_model"
HEADS, LAYERS = 3, 4
TEXTS = ("사용자: 안녕하세요\n클로바: 반갑습니다", "리뷰: 정말 재미있다. 또 보고 싶다")


def gpt2_outputs(weights, ids):
    """GPT-2 in plain torch, written for this test: logits [T, V], hidden states [L + 1, T, H]."""

    def norm(x, name):
        scale, shift = (weights[f"transformer.{name}.{kind}"] for kind in ("weight", "bias"))
        return torch.nn.functional.layer_norm(x, x.shape[-1:], scale, shift, 1e-5)

    def product(x, name):
        kinds = (f"transformer.{name}.{kind}" for kind in ("weight", "bias"))
        weight, bias = (weights[kind] for kind in kinds)
        return x @ weight + bias

    x = weights["transformer.wte.weight"][ids] + weights["transformer.wpe.weight"][: len(ids)]
    inputs = []
    for layer in range(LAYERS):
        inputs.append(x)
        q, k, v = (
            part.unflatten(1, (HEADS, -1)).transpose(0, 1)
            for part in product(norm(x, f"h.{layer}.ln_1"), f"h.{layer}.attn.c_attn").chunk(3, 1)
        )
        later = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        x = x + product(mixed, f"h.{layer}.attn.c_proj")
        inner = product(norm(x, f"h.{layer}.ln_2"), f"h.{layer}.mlp.c_fc")
        inner = torch.nn.functional.gelu(inner, approximate="tanh")
        x = x + product(inner, f"h.{layer}.mlp.c_proj")
    last = norm(x, "ln_f")
    return last @ weights["transformer.wte.weight"].t(), torch.stack([*inputs, last])


def demo_outputs():
    """What another framework would save: ids padded with -1, logits, hidden states."""
    weights = {n: t.float() for n, t in load_file(DEMO / "model.safetensors").items()}
    encoded = ModelDirectory.open(DEMO).tokenizer().encode_batch(TEXTS)
    most = max(map(len, encoded))
    ids = torch.full((len(encoded), most), -1)
    outputs = []
    for row, one in zip(ids, encoded, strict=True):
        row[: len(one)] = torch.tensor(one)
        outputs.append(gpt2_outputs(weights, row.clamp_min(0)))
    return {
        "token_ids": ids,
        "logits": torch.stack([logits for logits, _ in outputs]),
        "hidden_states": torch.stack([hidden for _, hidden in outputs], 1),
    }


def saved(tensors, path):
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path
