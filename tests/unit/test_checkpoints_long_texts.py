"""Long texts are tokenized by pieces: the ids are the tokenizer's own, and counting stops early."""

from contextlib import contextmanager

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nightjar.checkpoints import PROMPT_TOKEN, Tokenizer, long_texts
from nightjar.checkpoints.long_texts import PIECE_CHARACTERS, LongTexts
from tests.models import EOS_TOKEN, save_tokenizer
from tests.tokenizer_styles import STYLES, VOCAB_SIZE

WORDS = ["a", "안녕", "don't", "I'LL", "12345", "1a2b", "…", "é", "e\u0308", "\u1112\u1161\u11ab"]
BETWEEN = [" ", "  ", "\n", " \n", "\r\n", "\t", "...\n\n", "-", "。", "\u00a0", "\u0308", "'s"]
WRITTEN_OUT = [EOS_TOKEN, PROMPT_TOKEN, "<|im_start|>", "<tool_call>", "<|begin_of_text|>"]
texts = st.lists(
    st.sampled_from([*WORDS, *BETWEEN, *WRITTEN_OUT]) | st.text(max_size=4), max_size=12
).map("".join)


def read(style: str, folder) -> Tokenizer:
    path = folder / "tokenizer.json"
    if style == "gpt2":
        save_tokenizer(folder, VOCAB_SIZE)
    else:
        STYLES[style]().save(str(path))
    return Tokenizer.read(path, VOCAB_SIZE)


@pytest.fixture(scope="module", params=["gpt2", "gpt_neox", "llama3", "qwen2"])
def tokenizer(request, tmp_path_factory):
    return read(request.param, tmp_path_factory.mktemp(request.param))


@contextmanager
def short_pieces():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_texts, "PIECE_CHARACTERS", 1)
        yield


@given(texts)
@example("a <|im_start|>user\na 1b2 c...\r\n\n d's 안녕。하세요 é e\u0308 x")
def test_the_pieces_have_the_ids_of_the_text(tokenizer, text):
    with short_pieces():
        pieces = list(tokenizer.long_texts.pieces(text))
    assert "".join(pieces) == text
    found = [id_ for piece in pieces for id_ in tokenizer.encode(piece)]
    assert found == tokenizer.encode(text)


@pytest.mark.parametrize(
    ("text", "written_out", "pieces"),
    [
        ("one two, 3rd", [], ["one", " two", ", 3", "rd"]),
        ("one <|a b|> two", ["<|a b|>", ""], ["one", " <|a b|> two"]),
        ("one <|a b|> two", [], ["one", " <|a", " b", "|> two"]),
        ("👍👍👍", [], ["👍👍👍"]),
        ("", [], []),
    ],
)
def test_words_are_cut_apart_and_tokens_are_not(text, written_out, pieces):
    with short_pieces():
        assert list(LongTexts(written_out).pieces(text)) == pieces


def test_a_piece_that_cannot_be_cut_goes_on_to_where_it_can():
    pieces = list(LongTexts([]).pieces("a" * (2 * PIECE_CHARACTERS) + " b" * PIECE_CHARACTERS))
    assert [len(piece) for piece in pieces] == [2 * PIECE_CHARACTERS, *[PIECE_CHARACTERS] * 2]
    tokens = "<s>" * PIECE_CHARACTERS + " x" * 2 * PIECE_CHARACTERS
    assert "".join(LongTexts(["<s>"]).pieces(tokens)) == tokens
    assert len(list(LongTexts(["<s>"]).pieces(tokens))) > 1


def test_counting_stops_past_the_most_tokens(tokenizer):
    text = "hello 안녕 " * (PIECE_CHARACTERS // 3)  # of three pieces
    whole = tokenizer.encode(text)
    short, long, all_of_it = (
        tokenizer.encode_batch(["hello"], 10)[0],
        tokenizer.encode_batch(["hello", text], 10)[1],
        tokenizer.encode_batch([text])[0],
    )
    assert short == tokenizer.encode("hello")
    assert 10 < len(long) < len(whole) / 2
    assert long == whole[: len(long)]
    assert all_of_it == whole
    assert tokenizer.encode_batch([text], len(whole)) == [whole]


@pytest.mark.parametrize("style", ["llama2", "mistral"])
def test_where_no_cut_is_safe_the_text_stays_whole(style, tmp_path):
    tokenizer = read(style, tmp_path)
    text = "hello 안녕 " * (PIECE_CHARACTERS // 8)
    assert tokenizer.encode_batch([text], 10) == [tokenizer.encode(text)]
