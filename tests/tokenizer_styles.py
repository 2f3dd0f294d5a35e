"""Tokenizers in the style of every family, trained on a few sentences."""

from __future__ import annotations

import json
from collections.abc import Callable

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tests.models import SENTENCES

# The regular expressions of the published tokenizers.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
BLANK = "\u2581"
VOCAB_SIZE = 700


def _trained(tokenizer: Tokenizer, special: list[str], alphabet: list[str]) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 256,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    return tokenizer


def _byte_level(
    special: list[str], split: str | None, normalizer: normalizers.Normalizer | None
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    tokenizer.pre_tokenizer = bytes_of_words
    if split is not None:
        pieces = pre_tokenizers.Split(Regex(split), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, bytes_of_words])
    tokenizer.decoder = decoders.ByteLevel()
    return _trained(tokenizer, special, pre_tokenizers.ByteLevel.alphabet())


def _begun_by(tokenizer: Tokenizer, token: str) -> Tokenizer:
    """Have the tokenizer's template put a token before every text."""
    template = processors.TemplateProcessing(
        single=f"{token} $A", special_tokens=[(token, tokenizer.token_to_id(token))]
    )
    tokenizer.post_processor = template
    return tokenizer


def neox() -> Tokenizer:
    return _byte_level(["<|endoftext|>", "<|padding|>"], None, normalizers.NFC())


def llama3() -> Tokenizer:
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|eot_id|>"]
    return _begun_by(_byte_level(special, LLAMA3_SPLIT, None), special[0])


def qwen2() -> Tokenizer:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = _byte_level(special, QWEN2_SPLIT, normalizers.NFC())
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False, special=False)])
    return tokenizer


def _byte_fallback() -> Tokenizer:
    """SentencePiece's kind: entries are text, the characters it lacks are bytes."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(BLANK, "first", split=True)
    found = json.loads(_trained(trained, [], []).to_str())["model"]
    # Korean stays in, emoji are left to the bytes.
    entries = [token for token in found["vocab"] if max(map(ord, token)) < 0x1F000]
    special = ["<unk>", "<s>", "</s>"]
    entries = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *entries]
    known = set(entries)
    merges = [tuple(pair) for pair in found["merges"] if {*pair, "".join(pair)} <= known]
    vocab = {token: index for index, token in enumerate(entries)}
    model = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(special)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(BLANK, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _begun_by(tokenizer, "<s>")


def llama2() -> Tokenizer:
    tokenizer = _byte_fallback()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(BLANK), normalizers.Replace(" ", BLANK)]
    )
    return tokenizer


def mistral() -> Tokenizer:
    tokenizer = _byte_fallback()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(BLANK, "first", split=False)
    return tokenizer


STYLES: dict[str, Callable[[], Tokenizer]] = {
    "gpt_neox": neox,
    "llama3": llama3,
    "qwen2": qwen2,
    "llama2": llama2,
    "mistral": mistral,
}
