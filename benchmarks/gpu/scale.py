"""How large everything is, and its bytes and operations, which floors and rates are taken of."""

from collections.abc import Sequence
from dataclasses import dataclass

from nightjar.checkpoints import ModelConfig


@dataclass(frozen=True)
class Scale:
    """Sizes of one run; the defaults are those of the figures.

    batches, context: of the decode step; short, long: tokens that a text generates, whose
    difference is timed.  attention: (batch, context) of decode attention, `attention_layers` layers
    in a row, so that no cache holds them.  prefill_prompts prompts of prefill_length tokens are one
    step.  A ranking has a query and `documents` of document_length.  mixed: lengths of the prompts
    of a batch, and the tokens that each generates.  job: texts, their prompts' length and tokens
    of the comparisons of formats and with transformers.  cached_tokens: of a conversation's earlier
    turns; turn_tokens: of its next one.  rounds: how often each is timed.
    copy_bytes, matmul: for the machine's own speed.
    """

    layers: int = 24
    hidden: int = 2048
    heads: int = 16
    vocab_size: int = 51_200
    positions: int = 16_384
    batches: tuple[int, ...] = (1, 8, 64, 256)
    context: int = 512
    short: int = 16
    long: int = 80
    attention: tuple[tuple[int, int], ...] = ((8, 4096), (64, 512), (64, 1024), (256, 512))
    attention_layers: int = 4
    prefill_prompts: int = 16
    prefill_length: int = 512
    rankings: int = 4
    query_length: int = 512
    documents: int = 32
    document_length: int = 32
    mixed: tuple[int, ...] = (64, 128, 256, 384, 512, 640, 896, 1024)
    mixed_tokens: int = 64
    job: tuple[int, int, int] = (32, 512, 128)
    cached_tokens: int = 8064
    turn_tokens: int = 64
    rounds: int = 5
    copy_bytes: int = 4 << 30
    matmul: int = 8192

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


FULL = Scale()
TINY = Scale(
    layers=1,
    hidden=128,
    heads=2,
    vocab_size=256,
    positions=128,
    batches=(1, 3),
    context=64,
    short=2,
    long=18,
    attention=((2, 40), (1, 130)),
    attention_layers=1,
    prefill_prompts=2,
    prefill_length=32,
    rankings=1,
    query_length=64,
    documents=4,
    document_length=4,
    mixed=(8, 16, 24, 40),
    mixed_tokens=3,
    job=(2, 16, 4),
    cached_tokens=64,
    turn_tokens=4,
    rounds=2,
    copy_bytes=1 << 20,
    matmul=64,
)
"""Only tries the harness."""
SCALES = {"full": FULL, "tiny": TINY}
