"""Crops a column of a row until the request fits the model's context."""

from typing import Any

from nightjar.checkpoints import ChatTemplate, ChatTemplateError, ModelDirectory, Tokenizer
from nightjar.jobs.records import JsonObject
from nightjar.pipeline.tasks.fields import Crop, Task
from nightjar.pipeline.tasks.preparing import Tokens, crop_to_tokens
from nightjar.pipeline.tasks.requests import Requests

_MOST_ROUNDS = 8


class ContextFitter:
    """Counts the tokens of requests with the model's own tokenizer and chat template."""

    def __init__(self, task: Task, model: ModelDirectory) -> None:
        self._rules = [rule for rule in task.request.crop if rule.tokens == "context"]
        self._context = model.config.context_length
        self._tokenizer: Tokenizer = model.tokenizer()
        self._prefix = len(self._tokenizer.prefix_ids)
        self._template: ChatTemplate | None = None
        if task.kind == "chat" and self._rules:
            self._template = model.chat_template()

    @property
    def tokens(self) -> Tokens:
        """The model's tokenizer."""
        return self._tokenizer

    def fit(self, requests: Requests, row: dict[str, Any], body: JsonObject) -> JsonObject:
        """Shorten the columns that the task crops to the context, until the request fits.

        The planner refuses what does not fit even so.
        """
        for rule in self._rules:
            for _ in range(_MOST_ROUNDS):
                over = self._over(body)
                if over <= 0:
                    return body
                shorter = self._shorter(row[rule.column], rule, over)
                if shorter == row[rule.column]:
                    break
                row = row | {rule.column: shorter}
                body = requests.body(row)
        return body

    def _shorter(self, value: object, rule: Crop, over: int) -> object:
        """Return a text with so many tokens less, and of a list each text of the longest."""
        if isinstance(value, str):
            most = len(self._tokenizer.encode(value)) - over
            return crop_to_tokens([value], most, rule.keep, self._tokenizer)[0]
        if isinstance(value, list) and all(isinstance(one, str) for one in value):
            lengths = [len(ids) for ids in self._tokenizer.encode_batch(value)]
            most = max(lengths, default=0) - over
            return crop_to_tokens(value, most, rule.keep, self._tokenizer) if most > 0 else value
        return value

    def _over(self, body: JsonObject) -> int:
        """Return by how many tokens the request is too long for the context."""
        room = self._context - int(body.get("max_tokens", 0))
        texts = self._texts(body)
        # Each token has at least one byte, so that short texts need not be tokenized.
        longest = max((len(text.encode()) for text in texts[1:]), default=0)
        if len(texts[0].encode()) + longest + self._prefix <= room:
            return 0
        first, *others = (len(ids) for ids in self._tokenizer.encode_batch(texts))
        return self._prefix + first + max(others, default=0) - room

    def _texts(self, body: JsonObject) -> list[str]:
        if "query" in body:
            return [body["query"], *body["documents"]]
        if "prompt" in body:
            return [body["prompt"]]
        if self._template is None:
            return [""]
        try:
            messages, variables = body["messages"], body["chat_template_kwargs"]
            return [self._template.render(messages, variables=variables)]
        except ChatTemplateError:
            return [""]  # the planner says what is wrong
