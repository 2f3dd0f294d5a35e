"""The shapes of the benchmarks' models, and how their vocabularies are laid out."""

from dataclasses import dataclass
from itertools import product

SPECIAL_TOKENS = ("<|endoftext|>", "<|PROMPT|>")
CONSONANTS = "bcdfghjklmnprstvwxyz"
VOWELS = "aeiou"
SYLLABLES = [consonant + vowel for consonant, vowel in product(CONSONANTS, VOWELS)]
FIRST_WORD = len(SPECIAL_TOKENS) + 256 + len(SYLLABLES)
"""Ids below this one are special tokens, single bytes, and syllables without a space: no model
says them.  All others are words after a space."""


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


GPT2_SMALL = Shape("gpt2-small", "gpt2", 12, 768, 12, 12, 3072, 32_000, 1024)
LLAMA_HALF = Shape("llama-0.44b", "llama", 24, 1024, 16, 8, 4096, 32_000, 1024)
TINY_GPT2 = Shape("tiny-gpt2", "gpt2", 2, 256, 8, 8, 512, 2_000, 1024)
TINY_LLAMA = Shape("tiny-llama", "llama", 2, 256, 8, 4, 512, 2_000, 1024)
"""The tiny shapes are for trying the runners, not for figures."""
MEASURED = (GPT2_SMALL.name, LLAMA_HALF.name)
SHAPES = {shape.name: shape for shape in (GPT2_SMALL, LLAMA_HALF, TINY_GPT2, TINY_LLAMA)}
