"""Models of the benchmarks: weights from a seed (weights.py) in Hugging Face directories.

The vocabulary is made of invented words of ASCII letters, one token each, so that every system's
detokenizer gives the same text.
"""

import hashlib
import json
import random
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from .harness import CACHE, data_beside
from .weights import SHAPES, SPECIAL_TOKENS, SYLLABLES, Shape, gpt2_weights, llama_weights


def _vocabulary(size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Special tokens, bytes, then words of one to three syllables after a space, and the merges
    that make each of them one token.  `Ġ` is byte-level BPE's space."""
    merges = [(syllable[0], syllable[1]) for syllable in SYLLABLES]
    merges += [("Ġ", syllable) for syllable in SYLLABLES]
    pairs = [(f"Ġ{a}", b) for a, b in product(SYLLABLES, SYLLABLES)]
    triples = [(f"Ġ{a}{b}", c) for a, b, c in product(SYLLABLES, SYLLABLES, SYLLABLES)]
    random.Random(0).shuffle(triples)
    base = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = (merges + pairs + triples)[: size - len(base)]
    tokens = base + [left + right for left, right in merges]
    return {token: index for index, token in enumerate(tokens)}, merges


def save_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    vocabulary, merges = _vocabulary(vocab_size)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(directory / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[0],
        "bos_token": SPECIAL_TOKENS[0],
        "unk_token": SPECIAL_TOKENS[0],
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(about))


def config_of(shape: Shape) -> dict[str, Any]:
    """The shape's config.json: configs.toml says which of its fields is which of a family's."""
    config: dict[str, Any] = data_beside(__file__, "configs.toml")[shape.family]
    sizes = config.pop("sizes")
    return config | {name: getattr(shape, field) for name, field in sizes.items()}


_WEIGHTS = {"gpt2": gpt2_weights, "llama": llama_weights}


def cached_model(name: str) -> Path:
    """The directory of a shape's model, made anew when what it is made by has changed."""
    sources = map(Path(__file__).with_name, ("models.py", "weights.py", "configs.toml"))
    key = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]
    return save_model(CACHE / "models" / f"{name}-{key}", SHAPES[name])


def save_model(directory: Path, shape: Shape) -> Path:
    """Write the model's directory unless it is there whole; returns it."""
    done = directory / "config.json"  # written last
    if done.is_file():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    weights = _WEIGHTS[shape.family](shape)
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})
    save_tokenizer(directory, shape.vocab_size)
    done.write_text(json.dumps(config_of(shape), indent=2))
    return directory
