"""Where a chat template comes from, and what is said when it cannot be used."""

import json

import pytest

from nightjar.checkpoints import CheckpointError
from nightjar.checkpoints.chat_template import ChatTemplate, ChatTemplateError
from tests.chat_templates import LLAMA3, MISTRAL

USER = {"role": "user", "content": "안녕"}


def write_config(directory, **config):
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def test_no_template(tmp_path):
    assert ChatTemplate.read(tmp_path) is None
    write_config(tmp_path, bos_token="<s>")
    assert ChatTemplate.read(tmp_path) is None


def test_the_file_of_its_own_wins(tmp_path):
    write_config(tmp_path, bos_token="<s>", chat_template="config")
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    assert ChatTemplate.read(tmp_path).render([USER]) == "<s>안녕"


def test_the_default_of_several(tmp_path):
    several = [{"name": "rag", "template": "1"}, {"name": "default", "template": "2"}]
    write_config(tmp_path, chat_template=several)
    assert ChatTemplate.read(tmp_path).render([USER]) == "2"


@pytest.mark.parametrize("value", [3, {"template": "x"}, [], [{"name": "rag", "template": "x"}]])
def test_a_template_that_is_none(tmp_path, value):
    write_config(tmp_path, chat_template=value)
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json: chat_template is no text"):
        ChatTemplate.read(tmp_path)


def test_a_template_with_a_fault(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}\n{% if %}")
    with pytest.raises(CheckpointError, match=r"chat_template.jinja: .*line 2"):
        ChatTemplate.read(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"chat_template.jinja: cannot be read"):
        ChatTemplate.read(tmp_path)


def test_the_templates_own_refusal():
    template = ChatTemplate(MISTRAL, {"bos_token": "<s>", "eos_token": "</s>"})
    with pytest.raises(ChatTemplateError, match=r"refuses the messages: .*roles must alternate"):
        template.render([USER, USER])
    with pytest.raises(ChatTemplateError, match=r"refuses the messages: Unknown role: 손님"):
        ChatTemplate(LLAMA3, {}).render([USER, {"role": "손님", "content": "?"}])


def test_messages_that_the_template_does_not_expect():
    with pytest.raises(ChatTemplateError, match=r"fails on the messages: TypeError"):
        ChatTemplate("{{ messages[0].content + 'x' }}", {}).render([{"content": 3}])
    with pytest.raises(
        ChatTemplateError, match=r"fails .* UndefinedError: list object has no element 3"
    ):
        ChatTemplate("{{ messages[3].content.text }}", {}).render([USER])


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% for i in range(10000000) %}x{% endfor %}",
    ],
)
def test_the_sandbox_holds(attack):
    with pytest.raises(ChatTemplateError):
        ChatTemplate(attack, {}).render([USER])


def test_the_date_is_todays():
    found = ChatTemplate("{{ strftime_now('%Y') }}", {}).render([USER])
    assert found.isdigit()
    assert int(found) >= 2026
