"""How large everything is: the figures' own sizes, and tiny ones that only try the harness."""

from __future__ import annotations

from dataclasses import dataclass

from nightjar.checkpoints import ModelConfig


@dataclass(frozen=True)
class Scale:
    """Sizes of one run.

    batches, context: of the decode step; short, long: tokens that a text generates, whose
    difference is timed.  attention: (batch, context) of decode attention, `attention_layers` layers
    in a row, so that no cache holds them.  prefill_prompts prompts of prefill_length tokens are one
    step.  A ranking has a query and `documents` of document_length.  mixed: lengths of the prompts
    of a batch, and the tokens that each generates.  job: texts, their prompts' length and tokens
    of the comparisons of formats and with transformers.  cached_tokens: of a conversation's earlier
    turns, where loading and computing them are about level, and where they are many; turn_tokens:
    of its next one.  rounds: how often each is timed.
    copy_bytes, matmul: for the machine's own speed.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    vocab_size: int
    positions: int
    batches: tuple[int, ...]
    context: int
    short: int
    long: int
    attention: tuple[tuple[int, int], ...]
    attention_layers: int
    prefill_prompts: int
    prefill_length: int
    rankings: int
    query_length: int
    documents: int
    document_length: int
    mixed: tuple[int, ...]
    mixed_tokens: int
    job: tuple[int, int, int]
    cached_tokens: tuple[int, int]
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


FULL = Scale(
    name="full",
    layers=24,
    hidden=2048,
    heads=16,
    vocab_size=51_200,
    positions=16_384,
    batches=(1, 8, 64, 256),
    context=512,
    short=16,
    long=80,
    attention=((8, 4096), (64, 512), (64, 1024), (256, 512)),
    attention_layers=4,
    prefill_prompts=16,
    prefill_length=512,
    rankings=4,
    query_length=512,
    documents=32,
    document_length=32,
    mixed=(64, 128, 256, 384, 512, 640, 896, 1024),
    mixed_tokens=64,
    job=(32, 512, 128),
    cached_tokens=(1024, 8064),
    turn_tokens=64,
    rounds=5,
    copy_bytes=4 << 30,
    matmul=8192,
)

TINY = Scale(
    name="tiny",
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
    cached_tokens=(32, 64),
    turn_tokens=4,
    rounds=2,
    copy_bytes=1 << 20,
    matmul=64,
)

SCALES = {scale.name: scale for scale in (FULL, TINY)}
