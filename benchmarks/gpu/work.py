"""Bytes and operations of what is measured: the floors that shares are taken of, and predictions.

Symbols as in the kernels page.  A multiplication and its addition are two operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nightjar.checkpoints import ModelConfig
from nightjar.kernels.cuda.decode_attention import RESIDENT_BLOCKS
from nightjar.kernels.cuda.linear import MAX_ROWS

WIDE = 4
"""Bytes of a score: FP32."""

RESIDENT = RESIDENT_BLOCKS * 132
"""Blocks of decode attention that run at once on one H200."""


@dataclass(frozen=True)
class Work:
    """One kernel, launched `launches` times: bytes to and from memory and operations of all.

    waits: accesses to memory of one launch of which each needs the one before it; None of a
    product, whose edge is known as a whole; fetched: whether the product before it has asked for
    the beginning of its weights, so that memory does not rest during its launch.
    """

    name: str
    launches: int
    bytes: float
    operations: float = 0.0
    waits: int | None = 1
    fetched: bool = False


def layer_parameters(config: ModelConfig) -> int:
    """Weights of the four products of one block."""
    width, inner = config.hidden_size, config.intermediate_size
    heads = config.n_heads + 2 * config.n_kv_heads
    return (
        width * heads * config.head_size
        + config.n_heads * config.head_size * width
        + (2 * width * inner)
    )


def _after_attention(config: ModelConfig) -> int:
    """Those of one block's products that follow its attention."""
    heads = config.n_heads + 2 * config.n_kv_heads
    return layer_parameters(config) - config.hidden_size * heads * config.head_size


def weight_bytes(config: ModelConfig, itemsize: int) -> int:
    """Weights that a decode step reads: every block's, and the LM head's."""
    numbers = config.n_layers * layer_parameters(config) + config.vocab_size * config.hidden_size
    return numbers * itemsize


def kv_bytes(config: ModelConfig, tokens: int, itemsize: int) -> int:
    """Keys and values of so many tokens, over all layers."""
    return 2 * config.n_layers * config.n_kv_heads * config.head_size * itemsize * tokens


def decode_floor_bytes(config: ModelConfig, batch: int, context: int, itemsize: int) -> int:
    """What a decode step cannot do without: each weight and each cached key and value once."""
    return weight_bytes(config, itemsize) + kv_bytes(config, batch * context, itemsize)


def attention_operations(config: ModelConfig, queries: int, keys: float) -> float:
    """Of `queries` rows against `keys` positions each, over all layers."""
    return 4.0 * config.n_layers * config.n_heads * config.head_size * queries * keys


def prompt_attention_operations(config: ModelConfig, lengths: Sequence[int]) -> float:
    """Of prompts from their first token, each row against itself and those before it."""
    return attention_operations(config, 1, sum(length * (length + 1) / 2 for length in lengths))


def prefill_bytes(config: ModelConfig, rows: int, itemsize: int) -> float:
    """Of what stands between the products of prompts: embedding, norms (the delta is added there),
    `qkv_post`, the activation.  What products read and write is under way while they compute."""
    s, layers, width = itemsize, config.n_layers, config.hidden_size
    heads = 2 * config.n_heads + 5 * config.n_kv_heads
    a_layer = 2 * width * (8 + 2 * s) + config.head_size * s * heads
    a_layer += 2 * config.intermediate_size * s
    return rows * (width * (2 * s + 4) + layers * a_layer)


def prefill_operations(config: ModelConfig, lengths: Sequence[int]) -> float:
    """Of computing prompts from their first token and scoring their next one.

    Past the last attention only the last row of each prompt goes on, as in the engine: what it does
    not compute does not count.
    """
    rows, width, after = sum(lengths), config.hidden_size, _after_attention(config)
    products = 2.0 * rows * (config.n_layers * layer_parameters(config) - after)
    last = 2.0 * len(lengths) * (after + width * config.vocab_size)
    return products + last + prompt_attention_operations(config, lengths)


def branch_operations(config: ModelConfig, query: int, documents: Sequence[int]) -> float:
    """Of a ranking whose query is computed once: the query, then each document's rows but its last
    token, whose scores nothing needs, against the query and themselves; scores at every row.

    Past the last attention only rows with scores go on: the query's last one, and the documents'.
    """
    of_documents = sum(length - 1 for length in documents)
    rows = query + of_documents
    pairs = query * (query + 1) / 2 + sum(
        (length - 1) * (query + length / 2) for length in documents
    )
    scored = sum(documents)
    after = _after_attention(config)
    return (
        2.0 * rows * (config.n_layers * layer_parameters(config) - after)
        + 2.0 * (1 + of_documents) * after
        + attention_operations(config, 1, pairs)
        + 2.0 * scored * config.hidden_size * config.vocab_size
    )


def decode_step(config: ModelConfig, batch: int, context: int, itemsize: int) -> Iterator[Work]:
    """Every kernel of a decode step, with the bytes that its wrapper states (the kernels page)."""
    layers, width, inner = config.n_layers, config.hidden_size, config.intermediate_size
    s, size, vocab = itemsize, config.head_size, config.vocab_size
    heads, kv_heads = config.n_heads, config.n_kv_heads
    rows = batch * layers
    splits = -(-context // 128)
    # Products of few rows have their norm, their activation and their addition in them.
    few = batch <= MAX_ROWS and itemsize == 2
    norms = 1 if few else 2 * layers + 1
    yield Work("embed", 1, batch * width * (2 * s + 4), waits=2)
    yield Work("layer_norm", norms, norms * batch * width * (8 + 2 * s))
    for name, inputs, outputs, ends in (
        ("qkv product", width, (heads + 2 * kv_heads) * size, 4 * width if few else 0),
        ("attention output product", heads * size, width, 8 * width if few else 0),
        ("up product", width, inner, 4 * width if few else 0),
        ("down product", inner, width, 8 * width if few else 0),
    ):
        numbers = inputs * outputs * layers + rows * (inputs + outputs)
        moved = numbers * s + rows * ends
        yield Work(name, layers, moved, 2.0 * rows * inputs * outputs, None, few)
    yield Work(
        "decode_attention",
        layers,
        kv_bytes(config, batch * context, s)
        + rows * size * s * (2 * heads + 4 * kv_heads)  # the newest: read, written to the cache
        + rows * heads * 8.0 * splits * (size + 2),
        attention_operations(config, batch, context),
        # Length and table, or the newest head, which a cache holds; count; parts; of keys and of
        # values two each, or all four in one where all blocks run at once and ask for them ahead.
        waits=4 if batch * kv_heads * splits <= RESIDENT else 7,
    )
    if not few:
        yield Work("activation", layers, 2.0 * rows * inner * s)
    head = (width * vocab + batch * (width + vocab)) * s
    yield Work("LM head product", 1, head, 2.0 * batch * width * vocab, None, few)
    if s != WIDE:
        yield Work("scores to FP32", 1, batch * vocab * (s + WIDE))
    yield Work("penalize", 1, batch * vocab / 8)
    yield Work("number of the step", 3, 64.0 * batch)  # cast, kept beside its token, counted on
    yield Work("uniform", 1, 32.0 * batch)
    yield Work("sample", 1, 4.0 * batch * vocab, waits=2)
    yield Work("step_update", 1, 200.0 * batch, waits=4)
