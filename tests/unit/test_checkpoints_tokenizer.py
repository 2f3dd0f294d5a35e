"""Token ids, and the bytes behind them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightjar.checkpoints import PROMPT_TOKEN, CheckpointError, ModelDirectory
from tests.models import EOS_TOKEN, SENTENCES, Gpt2Shape, save_gpt2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_gpt2(tmp_path_factory.mktemp("tokenizer") / "model")


@pytest.fixture(scope="module")
def tokenizer(model):
    return ModelDirectory.open(model).tokenizer()


@given(st.text())
def test_the_bytes_of_the_ids_are_the_text(tokenizer, text):
    ids = tokenizer.encode(text)
    assert b"".join(tokenizer.token_bytes[i] for i in ids) == text.encode("utf-8", "replace")
    assert tokenizer.decode(ids) == text


def test_batches_are_single_texts(tokenizer):
    assert tokenizer.encode_batch(SENTENCES) == [tokenizer.encode(text) for text in SENTENCES]
    assert tokenizer.encode_batch([]) == []


def test_every_byte_has_a_token(tokenizer):
    assert {bytes([value]) for value in range(256)} <= set(tokenizer.token_bytes)
    assert len(tokenizer.token_bytes) == 512


def test_special_tokens_are_found_and_have_no_bytes(tokenizer):
    end, prompt = tokenizer.token_id(EOS_TOKEN), tokenizer.token_id(PROMPT_TOKEN)
    assert tokenizer.special_ids == {end, prompt}
    assert tokenizer.token_bytes[end] == tokenizer.token_bytes[prompt] == b""
    assert tokenizer.encode(f"a{EOS_TOKEN}")[-1] == end
    assert tokenizer.token_id("no such token") is None


def test_half_a_character_becomes_a_replacement(tokenizer):
    first = tokenizer.token_bytes.index("가".encode()[:1])
    assert tokenizer.decode([first]) == "\ufffd"


def edited(model, tmp_path, change, rows=600):
    """A model with more embedding rows than tokens, and a changed copy of tokenizer.json."""
    copy = save_gpt2(tmp_path / "copy", Gpt2Shape(vocab_size=rows))
    description = json.loads((model / "tokenizer.json").read_text())
    change(description)
    (copy / "tokenizer.json").write_text(json.dumps(description))
    return ModelDirectory.open(copy)


def added_token(content, index, special=False):
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": content, "special": special, **flags}


def test_an_added_token_stands_for_its_text(model, tmp_path):
    def change(description):
        description["added_tokens"].append(added_token("안녕 세상", 512))

    tokenizer = edited(model, tmp_path, change).tokenizer()
    assert tokenizer.encode("안녕 세상") == [512]
    assert tokenizer.token_bytes[512] == "안녕 세상".encode()


def test_truncation_and_padding_are_switched_off(model, tmp_path):
    def change(description):
        description["truncation"] = {
            "direction": "Right",
            "max_length": 3,
            "strategy": "LongestFirst",
            "stride": 0,
        }

    assert len(edited(model, tmp_path, change).tokenizer().encode(SENTENCES[0])) > 3


def test_tokens_past_the_embedding_rows_are_refused(model, tmp_path):
    def change(description):
        description["added_tokens"].append(added_token("<|extra|>", 512))

    with pytest.raises(CheckpointError, match="has id 512"):
        edited(model, tmp_path, change, rows=512)


def test_the_prompt_token_needs_no_embedding_row(model, tmp_path):
    def change(description):
        vocab = description["model"]["vocab"]
        vocab["<|unused|>"] = vocab.pop(PROMPT_TOKEN)
        added = description["added_tokens"]
        added[:] = [token for token in added if token["content"] != PROMPT_TOKEN]
        added.append(added_token("<|unused|>", 1, special=True))
        added.append(added_token(PROMPT_TOKEN, 512, special=True))

    tokenizer = edited(model, tmp_path, change, rows=512).tokenizer()
    assert tokenizer.token_id(PROMPT_TOKEN) == 512
    assert len(tokenizer.token_bytes) == 512


def test_other_kinds_of_tokenizers_are_refused(model, tmp_path):
    def change(description):
        description["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}

    with pytest.raises(CheckpointError, match="byte-level"):
        edited(model, tmp_path, change)
