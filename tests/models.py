"""Small random models for tests: whole Hugging Face directories, the same for the same seed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

EOS_TOKEN = "<|endoftext|>"
PROMPT_TOKEN = "<|PROMPT|>"

SENTENCES = (
    "사용자: 오늘 저녁에 뭐 먹을까?\n클로바: 김치찌개가 좋겠어요. 따뜻한 국물이 생각나네요.\n",
    "리뷰: 정말 재미있다 👍👍 또 보고 싶은 영화 🎬\n평가: 재미있다\n",
    "리뷰: 시간이 아깝다 😭 재미없다\n평가: 재미없다\n",
    "안녕하세요, 반갑습니다! 좋은 하루 보내세요 😀\n",
    "The quick brown fox jumps over the lazy dog; 1,234.5 times?\n",
    "def step(self, rows: list[int]) -> int:\n    return sum(rows[1:]) // 2  # halve\n",
    "추천: 된장찌개, 비빔밥, 불고기, 냉면 그리고 떡볶이\n",
)


@dataclass(frozen=True)
class Gpt2Shape:
    """What a random model looks like.

    block_scale multiplies the blocks' weights over GPT-2's initialisation, so that the output
    depends on the context; dtype is how the weights are stored.
    """

    n_layer: int = 2
    n_embd: int = 32
    n_head: int = 4
    n_positions: int = 128
    n_inner: int | None = None
    vocab_size: int = 512
    tied: bool = True
    prefix: bool = True
    block_scale: float = 4.0
    dtype: torch.dtype = torch.float32
    activation: str = "gelu_new"
    scale_by_layer: bool = False


TINY = Gpt2Shape()
SMALL = Gpt2Shape(n_layer=12, n_embd=768, n_head=12, n_positions=1024, vocab_size=2048)
"""GPT-2-small's blocks over a smaller vocabulary."""


def save_tokenizer(directory: Path, vocab_size: int) -> None:
    """Train a byte-level BPE tokenizer on SENTENCES and save it; at most vocab_size tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_TOKEN, PROMPT_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS_TOKEN,
        "model_max_length": 1024,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(about))


def random_weights(shape: Gpt2Shape, seed: int) -> dict[str, torch.Tensor]:
    """GPT-2 weights in float32, by transformers' names without the prefix."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int, std: float = 0.02) -> torch.Tensor:
        return torch.randn(*size, generator=generator) * std

    width, inner = shape.n_embd, shape.n_inner or 4 * shape.n_embd
    weights = {"wte.weight": normal(shape.vocab_size, width, std=0.1)}
    weights["wpe.weight"] = normal(shape.n_positions, width, std=0.1)
    # The larger the width, the smaller the weights for outputs of the same size.
    std = 0.02 * shape.block_scale * (64 / width) ** 0.5
    sizes = {
        "attn.c_attn": (width, 3 * width),
        "attn.c_proj": (width, width),
        "mlp.c_fc": (width, inner),
        "mlp.c_proj": (inner, width),
    }
    norms = [f"h.{i}.{name}" for i in range(shape.n_layer) for name in ("ln_1", "ln_2")]
    for name in [*norms, "ln_f"]:
        weights[f"{name}.weight"] = 1 + normal(width, std=0.1)
        weights[f"{name}.bias"] = normal(width, std=0.1)
    for layer in range(shape.n_layer):
        for name, size in sizes.items():
            weights[f"h.{layer}.{name}.weight"] = normal(*size, std=std)
            weights[f"h.{layer}.{name}.bias"] = normal(size[1], std=0.1)
    if not shape.tied:
        weights["lm_head.weight"] = normal(shape.vocab_size, width, std=0.1)
    return weights


def save_gpt2(directory: Path, shape: Gpt2Shape = TINY, seed: int = 0) -> Path:
    """Write a whole model directory: config, weights, tokenizer.  Returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": shape.activation,
        "layer_norm_epsilon": 1e-5,
        "scale_attn_by_inverse_layer_idx": shape.scale_by_layer,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }
    sizes = ("n_layer", "n_embd", "n_head", "n_positions", "n_inner", "vocab_size")
    config |= {name: asdict(shape)[name] for name in sizes}
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    prefix = "transformer." if shape.prefix else ""
    tensors = {
        name if name.startswith("lm_head") else prefix + name: tensor.to(shape.dtype)
        for name, tensor in random_weights(shape, seed).items()
    }
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    save_tokenizer(directory, shape.vocab_size)
    return directory
