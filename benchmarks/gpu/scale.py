"""How large everything is, and its bytes and operations, which floors and rates are taken of."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.harness import data_beside
from nightjar.checkpoints import ModelConfig


@dataclass(frozen=True)
class Scale:
    """Sizes of one run.

    batches, context: of the decode step; short, long: tokens that a text generates, whose
    difference is timed.  attention: (batch, context) of decode attention, `attention_layers` layers
    in a row, so that no cache holds them.  prefill_prompts prompts of prefill_length tokens are one
    step.  A ranking has a query and `documents` of document_length.  mixed: lengths of the prompts
    of a batch, and the tokens that each generates.  job: texts, their prompts' length and tokens
    of the comparisons of formats and with transformers.  joining: texts that join others, the
    length of their prompts, and the fewest tokens of one.  cached_tokens: of a conversation's
    earlier turns; turn_tokens: of its next one.  rounds: how often each is timed.
    copy_bytes, matmul: for the machine's own speed.
    """

    layers: int
    hidden: int
    heads: int
    vocab_size: int
    positions: int
    batches: list[int]
    context: int
    short: int
    long: int
    attention: list[tuple[int, int]]
    attention_layers: int
    prefill_prompts: int
    prefill_length: int
    rankings: int
    query_length: int
    documents: int
    document_length: int
    mixed: list[int]
    mixed_tokens: int
    job: tuple[int, int, int]
    joining: tuple[int, int, int]
    cached_tokens: int
    turn_tokens: int
    rounds: int
    copy_bytes: int
    matmul: int

    def config(self) -> ModelConfig:
        """A GPT of this size: learned positions, LayerNorm, GELU, tied embeddings."""
        head_size = self.hidden // self.heads
        return ModelConfig(
            family="gpt2",
            vocab_size=self.vocab_size,
            context_length=self.positions,
            hidden_size=self.hidden,
            n_layers=self.layers,
            n_heads=self.heads,
            n_kv_heads=self.heads,
            head_size=head_size,
            intermediate_size=4 * self.hidden,
            norm="layer_norm",
            norm_epsilon=1e-5,
            activation="gelu_tanh",
            tied_embeddings=True,
            attention_scales=(head_size**-0.5,) * self.layers,
            eos_token_ids=(0,),
        )

    @property
    def decode_prompt(self) -> int:
        """Tokens of a prompt whose text has `context` tokens halfway through what is timed."""
        return self.context - (self.short + self.long) // 2

    def kv_bytes(self, tokens: int, itemsize: int) -> int:
        """Keys and values of so many tokens, over all layers."""
        return 2 * self.layers * self.hidden * itemsize * tokens

    def floor_bytes(self, batch: int, itemsize: int) -> int:
        """What a decode step cannot do without: each weight and each cached key and value once."""
        weights = 12 * self.layers * self.hidden**2 + self.vocab_size * self.hidden
        return weights * itemsize + self.kv_bytes(batch * self.context, itemsize)

    def prefill_operations(self, lengths: Sequence[int]) -> float:
        """Operations of computing prompts from their first token and scoring their next one.

        A multiplication and its addition are two.  Past the last attention only the last row of
        each prompt goes on, as in the engine: what it does not compute does not count.
        """
        square = self.hidden**2
        last = 9 * square + self.vocab_size * self.hidden
        products = sum(lengths) * (12 * self.layers - 9) * square + len(lengths) * last
        pairs = sum(length * (length + 1) / 2 for length in lengths)
        return 2.0 * products + 4.0 * self.layers * self.hidden * pairs


SCALES = {name: Scale(**sizes) for name, sizes in data_beside(__file__, "scales.toml").items()}
