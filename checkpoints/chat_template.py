"""Renders chat messages as a prompt, with the model's own template."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nightjar.checkpoints.errors import CheckpointError
from nightjar.checkpoints.json_file import read_json_object

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class ChatTemplateError(Exception):
    """The model's chat template cannot render the messages; the error says why."""


class ChatTemplate:
    """A compiled template.

    A template is code from the model's author, so it runs in jinja2's immutable sandbox. It has the
    settings, filters and globals of transformers, so that the same messages give the same text.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """source: the template's text; special_tokens: such as {"bos_token": "<s>"}.

        Raises jinja2.TemplateSyntaxError.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)
        self._special_tokens: dict[str, Any] = dict(special_tokens)

    @staticmethod
    def read(directory: Path) -> ChatTemplate | None:
        """Return the template of a model directory, or None.

        It is chat_template.jinja, or else `chat_template` in tokenizer_config.json.
        """
        config: dict[str, Any] = {}
        path = directory / CONFIG_FILE
        if path.is_file():
            config = read_json_object(path)
        source = _named_source(path, config.get("chat_template"))
        if (directory / TEMPLATE_FILE).is_file():
            path = directory / TEMPLATE_FILE
            source = _file_source(path)
        if source is None:
            return None
        try:
            return ChatTemplate(source, _special_tokens(config))
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"{path}: the chat template is not valid: {error.message} (line {error.lineno} of "
                "the template); restore the file"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt for messages such as {"role": "user", "content": "..."}.

        add_generation_prompt: end with the opening of the assistant's turn.
        variables: other values for the template, such as {"enable_thinking": False}.  They are
        plain JSON values, as in the messages.
        Raises ChatTemplateError: the template refuses the messages, or fails on them.
        """
        values = self._special_tokens | dict(variables or {})
        values |= {
            "messages": [dict(message) for message in messages],
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(values)
        except _RefusalError as error:
            raise ChatTemplateError(
                f"the model's chat template refuses the messages: {error}"
            ) from error
        except Exception as error:
            raise ChatTemplateError(
                f"the model's chat template fails on the messages: {type(error).__name__}: {error}"
            ) from error


class _RefusalError(jinja2.TemplateError):
    """A template called raise_exception."""


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said, for training; it changes no text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        """Render the block's body as it is."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    @staticmethod
    def _body(caller: Callable[[], str]) -> str:
        return caller()


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: jinja2's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    """Refuse messages; templates call this."""
    raise _RefusalError(message)


def _strftime_now(pattern: str) -> str:
    """Today, for templates that tell the model the date: local time, as transformers has it."""
    return datetime.now().astimezone().strftime(pattern)


def _file_source(path: Path) -> str:
    """The text of a template's file."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def _named_source(path: Path, value: object) -> str | None:
    """A template given as text, or the one called "default" of a list of named ones."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list):
        named = {entry.get("name"): entry for entry in value if isinstance(entry, dict)}
        source = named.get("default", {}).get("template")
        if isinstance(source, str):
            return source
    raise CheckpointError(
        f'{path}: chat_template is no text and no list with a template named "default"; restore it'
    )


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that tokenizer_config.json names, as text."""
    found = {}
    for name in SPECIAL_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found
