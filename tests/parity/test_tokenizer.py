"""Token ids and texts against transformers' AutoTokenizer and the tokenizers library."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from nightjar.checkpoints import ModelDirectory, Tokenizer
from tests.models import EOS_TOKEN, SENTENCES
from tests.tokenizer_styles import STYLES, VOCAB_SIZE

TEXTS = [
    *SENTENCES,
    "",
    " ",
    "\n\n  앞뒤 공백  \t",
    "가나다라 마바사 아자차카 타파하, 뷁쀍! ㄱㄴㄷ",
    "👨‍👩‍👧‍👦 🏳️‍🌈 😀😃 é é \u200b\ufeff",
    "for i in range(10):\n\tprint(f'{i:>3}')  # don't\r\n",
    f"처음{EOS_TOKEN}끝",
    "<|PROMPT|><|PROMPT|> 질문",
    "日本語と中文 العربية עברית",
    "\x00\x01\x7f",
    "<tool_call>안녕</tool_call>",
    "<0x41> \u2581 <s>글</s>",
]


@pytest.mark.parametrize("text", TEXTS)
def test_equals_auto_tokenizer(tiny_model, text):
    expected = AutoTokenizer.from_pretrained(tiny_model)(text, add_special_tokens=False).input_ids
    tokenizer = ModelDirectory.open(tiny_model).tokenizer()
    assert tokenizer.encode(text) == expected
    assert tokenizer.encode_batch([text, text]) == [expected, expected]


@pytest.fixture(scope="module", params=STYLES)
def styled(request, tmp_path_factory):
    """A style's tokenizer as the library has it, as transformers and as Nightjar read it."""
    directory = tmp_path_factory.mktemp("tokenizer")
    library = STYLES[request.param]()
    library.save(str(directory / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(about))
    ours = Tokenizer.read(directory / "tokenizer.json", VOCAB_SIZE)
    return library, AutoTokenizer.from_pretrained(directory), ours


def test_styles_encode_like_auto_tokenizer(styled):
    _, reference, ours = styled
    for text in TEXTS:
        assert ours.encode(text) == reference(text, add_special_tokens=False).input_ids
        whole = [*ours.prefix_ids, *ours.encode(text)]
        assert whole == reference(text).input_ids


def test_styles_decode_like_the_library(styled):
    library, reference, ours = styled
    for text in TEXTS:
        ids = ours.encode(text)
        assert ours.decode(ids) == library.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids) == reference.decode(ids, skip_special_tokens=True)


def test_styles_give_back_sentences(styled):
    *_, ours = styled
    for text in SENTENCES:
        assert ours.decode(ours.encode(text)) == text


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(codec="utf-8")))
def test_any_text_decodes_like_the_library(styled, text):
    library, _, ours = styled
    ids = ours.encode(text)
    assert ours.decode(ids) == library.decode(ids, skip_special_tokens=True)


def test_a_text_that_goes_on_keeps_its_blanks(styled):
    """What tokens add to a text is what decoding them after it adds."""
    library, _, ours = styled
    ids = ours.encode("리뷰: 정말 재미있다 👍👍 또 보고 싶은 영화 🎬")
    for place in range(1, len(ids)):
        before, after = ids[:place], ids[place:]
        added = b"".join(ours.token_bytes[i] for i in after)
        if "\ufffd" not in library.decode(before) + library.decode(after):
            assert library.decode(before) + added.decode() == library.decode(ids)


def test_ids_past_the_tokenizer_add_nothing(styled):
    library, _, ours = styled
    size = library.get_vocab_size()
    assert size < len(ours.token_bytes) == VOCAB_SIZE
    assert set(ours.token_bytes[size:]) == {b""}
    assert ours.decode([size, *ours.encode("네"), VOCAB_SIZE - 1]) == "네"


def test_prefixes(tmp_path):
    found = {}
    for name, make in STYLES.items():
        library = make()
        library.save(str(tmp_path / "tokenizer.json"))
        ids = Tokenizer.read(tmp_path / "tokenizer.json", VOCAB_SIZE).prefix_ids
        found[name] = [library.id_to_token(i) for i in ids]
    expected = {"llama3": ["<|begin_of_text|>"], "llama2": ["<s>"], "mistral": ["<s>"]}
    assert found == {name: expected.get(name, []) for name in STYLES}
