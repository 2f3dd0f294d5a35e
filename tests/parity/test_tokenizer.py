"""Token ids against transformers' AutoTokenizer."""

import pytest
from transformers import AutoTokenizer

from nightjar.checkpoints import ModelDirectory
from tests.models import EOS_TOKEN, SENTENCES

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
]


@pytest.mark.parametrize("text", TEXTS)
def test_equals_auto_tokenizer(tiny_model, text):
    expected = AutoTokenizer.from_pretrained(tiny_model)(text, add_special_tokens=False).input_ids
    tokenizer = ModelDirectory.open(tiny_model).tokenizer()
    assert tokenizer.encode(text) == expected
    assert tokenizer.encode_batch([text, text]) == [expected, expected]
