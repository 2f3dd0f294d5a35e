"""Rendered chats against transformers' apply_chat_template."""

import json
import shutil

import pytest
from transformers import AutoTokenizer

from nightjar.checkpoints.chat_template import ChatTemplate
from tests.chat_templates import TEMPLATES

USER = {"role": "user", "content": "  오늘 저녁에 뭐 먹을까? <b>\"김치\" & 'rice'</b> 🍚\n"}
ANSWER = {"role": "assistant", "content": "<think>\n음\n</think>\n\n김치찌개가 좋겠어요."}
SYSTEM = {"role": "system", "content": "당신은 클로바입니다. {{ not_a_variable }} {% raw %}"}
AGAIN = {"role": "user", "content": "다른 건?"}
CHATS = [[USER], [SYSTEM, USER], [USER, ANSWER, AGAIN], [SYSTEM, USER, ANSWER, AGAIN]]
TOOL = {
    "type": "function",
    "function": {"name": "날씨", "description": "<오늘>의 날씨", "parameters": {"type": "object"}},
}


@pytest.fixture(scope="module", params=TEMPLATES)
def both(request, tmp_path_factory, tiny_model):
    """A template as transformers and as Nightjar read it."""
    directory = tmp_path_factory.mktemp("chat")
    shutil.copy(tiny_model / "tokenizer.json", directory)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"__type": "AddedToken", "content": "<|endoftext|>"},
        "eos_token": "<|PROMPT|>",
        "pad_token": None,
        "chat_template": TEMPLATES[request.param],
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return AutoTokenizer.from_pretrained(directory), ChatTemplate.read(directory)


@pytest.mark.parametrize("chat", CHATS, ids=len)
@pytest.mark.parametrize("opened", [True, False])
def test_equals_transformers(both, chat, opened):
    reference, ours = both
    expected = reference.apply_chat_template(chat, tokenize=False, add_generation_prompt=opened)
    assert ours.render(chat, add_generation_prompt=opened) == expected
    assert USER["content"].strip() in expected


def test_tools_and_variables(both):
    reference, ours = both
    variables = {"enable_thinking": False, "date_string": "21 Nov 2026", "bos_token": "<b>"}
    for tools in (None, [TOOL]):
        expected = reference.apply_chat_template(
            [USER], tokenize=False, add_generation_prompt=True, tools=tools, **variables
        )
        assert ours.render([USER], tools=tools, variables=variables) == expected
