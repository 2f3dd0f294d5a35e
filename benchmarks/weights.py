"""Seeded weights that say a different text after every prompt, and say it in any precision.

A rule stands above the random weights, whose part in the result is small (docs/performance.md says
why).  Every word is a row and a topic.  What follows a word is decided by two things: the word
itself names the row, and the most salient word of all that was read names the topic.  In weights:

- A word's vector holds its salience, the key of its own row, the key of the row that follows it,
  and its topic. Each is drawn at random and has dimensions of its own.
- One attention head of the first layer asks for salience everywhere, and brings the topic of the
  word it finds.
- GPT-2's LM head is its embedding. So its first feed-forward block moves the following row's key to
  where the head looks for a row's own key.
- Llama's head has other weights: they look for a row's own key where the embedding has the
  following row's.

All other weights are random.
"""

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

SPECIAL_TOKENS = ("<|endoftext|>", "<|PROMPT|>")
CONSONANTS = "bcdfghjklmnprstvwxyz"
VOWELS = "aeiou"
SYLLABLES = [consonant + vowel for consonant, vowel in product(CONSONANTS, VOWELS)]
FIRST_WORD = len(SPECIAL_TOKENS) + 256 + len(SYLLABLES)
"""Ids below this one are special tokens, single bytes, and syllables without a space: no model
says them.  All others are words after a space."""
TOPICS = 16
STD = 0.1
"""Of embeddings; LM heads are as large."""
TOPIC_GAIN, KEY_GAIN = 6.0, 10.0
"""What the rule adds to the residual stream, over what embeddings put there."""
QUESTION, KEY = 80.0, 10.0
"""One dimension of the query, and the standard deviation of the key's: their product over the
square root of the head size is how sharply the most salient word is told from the next."""
SAME = 16
"""Dimensions that hold the same value: a word's salience; one, in Llama, which has no biases."""


@dataclass(frozen=True)
class Shape:
    """What a model looks like."""

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab_size: int
    context: int

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def words(self) -> range:
        """The ids of the words, one token each."""
        return range(FIRST_WORD, self.vocab_size)


GPT2_SMALL = Shape("gpt2-small", "gpt2", 12, 768, 12, 12, 3072, 32_000, 1024)
LLAMA_HALF = Shape("llama-0.44b", "llama", 24, 1024, 16, 8, 4096, 32_000, 1024)
TINY_GPT2 = Shape("tiny-gpt2", "gpt2", 2, 256, 8, 8, 512, 2_000, 1024)
TINY_LLAMA = Shape("tiny-llama", "llama", 2, 256, 8, 4, 512, 2_000, 1024)
"""The tiny shapes are for trying the runners, not for figures."""
MEASURED = (GPT2_SMALL.name, LLAMA_HALF.name)
SHAPES = {shape.name: shape for shape in (GPT2_SMALL, LLAMA_HALF, TINY_GPT2, TINY_LLAMA)}


def normal(*size: int, std: float, mean: float = 0.0) -> Tensor:
    """Random numbers, of torch's own generator: whoever makes a model seeds it."""
    return torch.randn(*size).mul_(std).add_(mean)


@dataclass(frozen=True)
class Keys:
    """The parts of every token's vector: salience [V, SAME], own and following [V, K], topic
    [V, head size].

    Tokens before FIRST_WORD have zeros, so that their logits are small and they are never said.
    """

    salience: Tensor
    own: Tensor
    following: Tensor
    topic: Tensor


def keys_of(shape: Shape, width: int) -> Keys:
    """The rule, drawn at random; `width` is the length of a row's key.

    In each topic the rows follow each other in a circle of its own.  Words left over when the
    rows are full are in a row that follows nothing.
    """
    words = shape.vocab_size - FIRST_WORD
    full = words // TOPICS
    number = torch.randperm(words)
    row, topic = number // TOPICS, number % TOPICS
    next_row = torch.empty(TOPICS, full, dtype=torch.long)
    for one in next_row:
        circle = torch.randperm(full)
        one[circle] = circle.roll(-1)
    following = next_row[topic, row.clamp(max=full - 1)]
    salience = (STD * (torch.empty(words, 1).exponential_() - 1)).expand(-1, SAME)
    rows = normal(-(-words // TOPICS), width, std=STD)
    # At right angles: the more the head of the right topic stands out.
    topics = (
        torch.linalg.qr(normal(shape.head_size, TOPICS, std=1.0)).Q.T * STD * shape.head_size**0.5
    )

    def of_tokens(part: Tensor) -> Tensor:
        return torch.cat([torch.zeros(FIRST_WORD, part.shape[1]), part])

    return Keys(
        *(of_tokens(part) for part in (salience, rows[row], rows[following], topics[topic]))
    )


def gpt2_weights(shape: Shape) -> dict[str, Tensor]:
    """Embedding: [salience | own key | following row's key | topic]."""
    width, inner, head = shape.hidden, shape.intermediate, shape.head_size
    std = 0.16 / width**0.5
    sizes = {
        "attn.c_attn": (width, 3 * width),
        "attn.c_proj": (width, width),
        "mlp.c_fc": (width, inner),
        "mlp.c_proj": (inner, width),
    }
    key = (width - head - SAME) // 2
    own, following = slice(SAME, SAME + key), slice(SAME + key, SAME + 2 * key)
    keys = keys_of(shape, key)
    weights = {
        "wte.weight": torch.cat([keys.salience, keys.own, keys.following, keys.topic], 1),
        "wpe.weight": normal(shape.context, width, std=0.2 * STD),
        "ln_f.weight": normal(width, std=0.05, mean=0.5),
        "ln_f.bias": normal(width, std=0.05),
    }
    for layer in range(shape.layers):
        for norm in ("ln_1", "ln_2"):
            weights[f"h.{layer}.{norm}.weight"] = normal(width, std=0.1, mean=1.0)
            weights[f"h.{layer}.{norm}.bias"] = normal(width, std=0.1)
        for name, size in sizes.items():
            weights[f"h.{layer}.{name}.weight"] = normal(*size, std=std)
            weights[f"h.{layer}.{name}.bias"] = normal(size[1], std=0.02)
    # Or the head, which is the embedding, would favour words as salient as the newest.
    weights["ln_f.weight"][:SAME] = weights["ln_f.bias"][:SAME] = 0
    query_key_value = weights["h.0.attn.c_attn.weight"]
    weights["h.0.attn.c_attn.bias"][0] = QUESTION
    query_key_value[:SAME, width] = KEY / SAME
    _bring(query_key_value[:, 2 * width :][:, :head], weights["h.0.attn.c_proj.weight"][:head])
    # gelu(x) - gelu(-x) = x, so two neurons a dimension move it as it is.
    up, down = weights["h.0.mlp.c_fc.weight"], weights["h.0.mlp.c_proj.weight"]
    up[:, : 2 * key] = 0
    down[: 2 * key] = 0
    for sign, neurons in ((1, slice(0, key)), (-1, slice(key, 2 * key))):
        up[following, neurons] = sign * torch.eye(key)
        down[neurons, own] = sign * KEY_GAIN * STD * torch.eye(key)
    return {f"transformer.{name}": weight for name, weight in weights.items()}


def _bring(values: Tensor, out: Tensor) -> None:
    """Make a head's values [H, D] the topic's dimensions, the last, and put them there again."""
    head = values.shape[1]
    values.zero_()
    values[-head:] = torch.eye(head)
    out.zero_()
    out[:, -head:] = TOPIC_GAIN * STD * torch.eye(head)


def llama_weights(shape: Shape) -> dict[str, Tensor]:
    """Embedding: [ones | salience | following row's key | topic]; head: the own key in place of the
    following row's, and zeros before it."""
    width, inner, head = shape.hidden, shape.intermediate, shape.head_size
    kv = shape.kv_heads * head
    std = 0.16 / width**0.5
    sizes = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (kv, width),
        "self_attn.v_proj": (kv, width),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    keys = keys_of(shape, width - head - 2 * SAME)
    ones = torch.full((shape.vocab_size, SAME), STD)
    nothing = torch.zeros(shape.vocab_size, 2 * SAME)
    weights = {
        "model.embed_tokens.weight": torch.cat(
            [ones, keys.salience, keys.following, keys.topic], 1
        ),
        "lm_head.weight": torch.cat([nothing, keys.own, keys.topic], 1),
        "model.norm.weight": normal(width, std=0.05, mean=0.5),
    }
    for layer in range(shape.layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{norm}.weight"] = normal(width, std=0.1, mean=1.0)
        for name, size in sizes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = normal(*size, std=std)
    # The last dimension of a head turns slowest with the position: less than 0.2 radians in all.
    first = {name: weights[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qkvo"}
    first["q"][head - 1, :SAME] = QUESTION / SAME
    first["k"][head - 1, SAME : 2 * SAME] = KEY / SAME
    _bring(first["v"][:head].T, first["o"][:, :head].T)
    return weights
