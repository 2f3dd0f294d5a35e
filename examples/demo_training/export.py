"""How the trained model is written as a model directory."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from examples.demo_training.model import Gpt
from examples.demo_training.run import Run
from examples.demo_training.tokens import END


def export(run: Run, folder: Path) -> None:
    """Writes model, tokenizer and settings in the Hugging Face layout of GPT-2."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(hugging_face_weights(run.model), folder / "model.safetensors", {"format": "pt"})
    run.codec.plain.save(str(folder / "tokenizer.json"))
    config, end = run.config, run.codec.end
    ends = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    model_config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.positions,
        "n_ctx": config.positions,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "dtype": "float16",
        "torch_dtype": "float16",
        **ends,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "pad_token": END,
        "unk_token": None,
        "model_max_length": config.positions,
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / "config.json", model_config)
    write_json(folder / "generation_config.json", ends)
    write_json(folder / "tokenizer_config.json", tokenizer_config)


def hugging_face_weights(model: Gpt) -> dict[str, Tensor]:
    """The weights as float16 under GPT-2's names, its matrices turned as that class has them."""
    names = {
        "qkv": "attn.c_attn",
        "proj": "attn.c_proj",
        "fc": "mlp.c_fc",
        "out": "mlp.c_proj",
    }
    weights: dict[str, Tensor] = {}
    for name, parameter in model.state_dict().items():
        parts = name.replace("blocks.", "h.").split(".")
        weight = parameter.to("cpu", torch.float16)
        if parts[0] == "h" and parts[2] in names:
            parts[2] = names[parts[2]]
            weight = weight.T if parts[3] == "weight" else weight
        weights["transformer." + ".".join(parts)] = weight.contiguous()
    return weights


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes `value` readably."""
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
