"""Encoding: transformers' own token ids, and every limit of the model told with its field."""

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from nightjar.checkpoints import PROMPT_TOKEN, ChatTemplate, ModelDirectory, Tokenizer
from nightjar.checkpoints.token_sizes import most_bytes_of_a_token
from nightjar.jobs.lines.parsing import validate_body
from nightjar.jobs.records import EncodedRequest, QueuedRequest, RequestError
from nightjar.jobs.states import RequestKind as Kind
from nightjar.jobs.vector_records import LORA, PromptVector
from nightjar.pipeline.planning.encode import Encoder
from tests.tokenizer_styles import VOCAB_SIZE, llama2, llama3, mistral, neox, qwen2

BEGIN = "<|begin_of_text|>"

CHAT = """{%- for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}
{%- if messages[-1].role != 'user' %}{{ raise_exception('the user speaks last') }}{% endif %}
{{- 'assistant:' if add_generation_prompt }}{{ mood }}"""
VECTORS = {
    "three": PromptVector("three", 2, "", length=3, width=32, data=b""),
    "wide": PromptVector("wide", 1, "", length=3, width=33, data=b""),
    "other": PromptVector("other", 1, "", 3, 32, b"", fingerprint="another model's"),
    "polite": PromptVector("polite", 4, "", 8, 32, b"", kind=LORA),
    "foreign": PromptVector("foreign", 1, "", 8, 32, b"", "another model's", LORA),
}


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> ModelDirectory:
    return ModelDirectory.open(tiny_model)


@pytest.fixture(scope="module")
def encoder(model: ModelDirectory) -> Encoder:
    template = ChatTemplate(CHAT, {"eos_token": "<|endoftext|>"})
    return Encoder(model.config, model.tokenizer(), find, template, model.fingerprint)


def find(references: Collection[str], job_id: str) -> dict[str, PromptVector]:
    assert job_id == "job"
    return {one: VECTORS[one] for one in references if one in VECTORS}


def request(number: int = 0, **body: Any) -> QueuedRequest:
    kind = Kind.RANK if "query" in body else Kind.GENERATE
    if "messages" in body:
        body = {"max_tokens": 16, **body}
    body = validate_body(kind, body, chat="messages" in body)
    return QueuedRequest(number, "job", number, f"row-{number}", kind, body)


def encoded(encoder: Encoder, **body: Any) -> EncodedRequest:
    done, refused = encoder.encode([request(**body)])
    assert refused == []
    return done[0]


def refusal(encoder: Encoder, **body: Any) -> RequestError:
    done, refused = encoder.encode([request(**body)])
    assert done == []
    return refused[0][1]


def test_ids_are_those_of_transformers(encoder: Encoder, tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    text = "사용자: 안녕 😀\n클로바: def f(x):\n\treturn 1"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert encoded(encoder, prompt=text).segments == [ids]
    assert encoded(encoder, prompt=ids).segments == [ids]


def test_a_prompt_may_hold_the_first_and_the_last_token_id(encoder: Encoder) -> None:
    assert encoded(encoder, prompt=[0, 511]).segments == [[0, 511]]


def test_query_and_documents_are_tokenized_apart(encoder: Encoder, tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    texts = ["오늘 저녁에 뭐", " 먹을까?", "먹을까?"]
    apart = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    assert encoded(encoder, query=texts[0], documents=texts[1:]).segments == apart


def test_one_bad_request_costs_its_neighbours_nothing(encoder: Encoder) -> None:
    requests = [
        request(0, prompt="안녕"),
        request(1, prompt="x" * 500),
        request(2, query="안녕", documents=["a", PROMPT_TOKEN]),
        request(3, prompt=[5, 6, 7]),
        request(4, query="리뷰", documents=["a", "b c"]),
    ]
    done, refused = encoder.encode(requests)
    assert [item.id for item in done] == [0, 3, 4]
    assert [(number, error.param) for number, error in refused] == [
        (1, "body.prompt"),
        (2, "body.prompt_vector"),
    ]
    assert done[2].segments == encoded(encoder, query="리뷰", documents=["a", "b c"]).segments


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (f"{PROMPT_TOKEN}안녕", [512, 513, 514, "안녕"]),
        (f"안녕{PROMPT_TOKEN}", ["안녕", 512, 513, 514]),
        (f"{PROMPT_TOKEN}a{PROMPT_TOKEN}{PROMPT_TOKEN}", [512, "a", 513, 514]),
    ],
)
def test_placeholders_become_rows_past_the_vocabulary(
    encoder: Encoder, model: ModelDirectory, text: str, rows: list[int | str]
) -> None:
    tokenizer = model.tokenizer()
    wanted: list[int] = []
    for row in rows:
        wanted += tokenizer.encode(row) if isinstance(row, str) else [row]
    item = encoded(encoder, prompt=text, prompt_vector="three")
    assert item.segments == [wanted]
    assert item.prompt_vector == "three@2"


def test_the_prompt_token_as_an_id_is_a_placeholder_too(
    encoder: Encoder, model: ModelDirectory
) -> None:
    prompt_id = model.tokenizer().token_id(PROMPT_TOKEN)
    assert prompt_id is not None
    item = encoded(encoder, prompt=[5, prompt_id, 6], prompt_vector="three")
    assert item.segments == [[5, 512, 513, 514, 6]]


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"prompt": [1, 512]}, "body.prompt[1]", "0 to 511"),
        ({"prompt": [7] * 120, "max_tokens": 9}, "body.max_tokens", "at most 8"),
        ({"prompt": [7] * 128, "max_tokens": 1}, "body.prompt", "128 tokens"),
        ({"query": "a", "documents": ["b", "c" * 200]}, "body.documents[1]", "128"),
        ({"prompt": PROMPT_TOKEN, "prompt_vector": "x"}, "body.prompt_vector", "registered"),
        ({"prompt": PROMPT_TOKEN, "prompt_vector": "wide"}, "body.prompt_vector", "33 wide"),
        ({"prompt": PROMPT_TOKEN, "prompt_vector": "other"}, "body.prompt_vector", "another model"),
        ({"prompt": PROMPT_TOKEN * 2, "prompt_vector": "three"}, "body.prompt_vector", "2 times"),
        ({"prompt": "a", "prompt_vector": "three"}, "body.prompt_vector", "0 times"),
        ({"prompt": PROMPT_TOKEN}, "body.prompt_vector", "names no prompt_vector"),
        ({"prompt": PROMPT_TOKEN, "prompt_vector": "polite"}, "body.prompt_vector", "in adapter"),
        ({"prompt": "a", "adapter": "x"}, "body.adapter", "no LoRA adapter is registered"),
        ({"prompt": "a", "adapter": "three"}, "body.adapter", "in prompt_vector"),
        ({"prompt": "a", "adapter": "foreign"}, "body.adapter", "another model"),
    ],
)
def test_refusals_name_the_field_and_the_mend(
    encoder: Encoder, body: dict[str, Any], param: str, said: str
) -> None:
    error = refusal(encoder, **body)
    assert error.param == param
    assert said in error.message


def test_an_adapter_is_resolved_beside_prompt_vectors(encoder: Encoder) -> None:
    item = encoded(encoder, prompt=PROMPT_TOKEN, prompt_vector="three", adapter="polite")
    assert (item.prompt_vector, item.adapter) == ("three@2", "polite@4")
    assert (item.vector_reference, item.adapter_reference) == ("three", "polite")
    ranked = encoded(encoder, query="a", documents=["b"], adapter="polite")
    assert (ranked.prompt_vector, ranked.adapter) == (None, "polite@4")


def test_requests_that_name_an_adapter_are_refused_where_it_cannot_be_served(
    model: ModelDirectory,
) -> None:
    closed = Encoder(model.config, model.tokenizer(), find, no_adapters="no: shards")
    error = refusal(closed, prompt="a", adapter="polite")
    assert (error.code, error.message, error.param) == (
        "invalid_value",
        "no: shards",
        "body.adapter",
    )
    assert encoded(closed, prompt=PROMPT_TOKEN, prompt_vector="three").prompt_vector == "three@2"


def test_a_request_that_just_fits(encoder: Encoder) -> None:
    assert len(encoded(encoder, prompt=[7] * 120, max_tokens=8).segments[0]) == 120
    assert encoded(encoder, prompt="a", model="tiny").prompt_vector is None


def test_messages_become_the_prompt_that_the_template_makes(encoder: Encoder) -> None:
    messages = [{"role": "system", "content": "짧게"}, {"role": "user", "content": "안녕 😀"}]
    written = "system: 짧게<|endoftext|>user: 안녕 😀<|endoftext|>assistant:"
    expected = encoded(encoder, prompt=written).segments
    assert encoded(encoder, messages=messages).segments == expected
    moody = encoded(encoder, messages=messages, chat_template_kwargs={"mood": "!", "self": 1})
    assert moody.segments == encoded(encoder, prompt=written + "!").segments


def test_prompt_vectors_in_a_chat(encoder: Encoder) -> None:
    messages = [{"role": "user", "content": f"{PROMPT_TOKEN} 질문"}]
    assert [
        i for i in encoded(encoder, messages=messages, prompt_vector="three").segments[0] if i > 511
    ] == [512, 513, 514]


def test_a_chat_that_cannot_be_rendered_leaves_its_neighbours(encoder: Encoder) -> None:
    good = {"messages": [{"role": "user", "content": "a"}]}
    bad = {"messages": [{"role": "assistant", "content": "a"}]}
    done, refused = encoder.encode([request(0, **good), request(1, **bad), request(2, prompt="a")])
    assert [entry.id for entry in done] == [0, 2]
    [(number, error)] = refused
    assert (number, error.param) == (1, "body.messages")
    assert "the user speaks last" in error.message


def test_a_chat_needs_a_template_and_room(encoder: Encoder, model: ModelDirectory) -> None:
    messages = [{"role": "user", "content": "안녕 " * 100}]
    assert refusal(encoder, messages=messages).param == "body.messages"
    bare = Encoder(model.config, model.tokenizer(), find)
    assert "no chat template" in refusal(bare, messages=messages).message


def test_what_a_model_expects_before_a_text_is_put_there(
    model: ModelDirectory, tmp_path: Path
) -> None:
    library = llama3()
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.read(tmp_path / "tokenizer.json", VOCAB_SIZE)
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", {"bos_token": BEGIN})
    config = replace(model.config, vocab_size=VOCAB_SIZE)
    encoder = Encoder(config, tokenizer, find, template)
    begin, text = library.token_to_id(BEGIN), tokenizer.encode("안녕")
    assert encoded(encoder, prompt="안녕").segments == [[begin, *text]]
    assert encoded(encoder, prompt=f"{BEGIN}안녕").segments == [[begin, *text]]
    assert encoded(encoder, prompt=text).segments == [text]
    assert encoded(encoder, query="안녕", documents=["안녕"]).segments == [[begin, *text], text]
    messages = [{"role": "user", "content": "안녕"}]
    chat = encoded(encoder, messages=messages, max_tokens=5)
    assert chat.segments == [[begin, *text]]


def test_a_ranking_may_fill_the_context_and_no_more(
    encoder: Encoder, model: ModelDirectory
) -> None:
    count = {size: len(model.tokenizer().encode("q" * size)) for size in range(1, 400)}
    room = model.config.context_length - count[1]
    fits = max(size for size, tokens in count.items() if tokens == room)
    segments = encoded(encoder, query="q", documents=["a", "q" * fits]).segments
    assert len(segments[0]) + len(segments[2]) == model.config.context_length
    over = min(size for size, tokens in count.items() if tokens == room + 1)
    error = refusal(encoder, query="q", documents=["a", "q" * over])
    assert (error.code, error.param) == ("context_length_exceeded", "body.documents[1]")


def test_a_prompt_and_its_answer_may_fill_the_context_and_no_more(
    encoder: Encoder, model: ModelDirectory
) -> None:
    context = model.config.context_length
    assert encoded(encoder, prompt=[5] * (context - 1), max_tokens=1).segments
    assert encoded(encoder, prompt=[5], max_tokens=context - 1).segments
    for length, more in ((context - 1, 2), (1, context), (context, 1)):
        error = refusal(encoder, prompt=[5] * length, max_tokens=more)
        assert error.code == "context_length_exceeded"


class Untouched:
    """A tokenizer that must not be asked for tokens."""

    most_bytes = 10
    prefix_ids = ()

    def token_id(self, token: str) -> int | None:
        return None

    def encode_batch(self, texts: list[str], most_tokens: int) -> list[list[int]]:
        assert texts == []
        return []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a" * 1281}, "body.prompt"),
        ({"prompt": "한" * 427}, "body.prompt"),
        ({"query": "a" * 641, "documents": ["b", "a" * 640]}, "body.documents[1]"),
    ],
)
def test_what_is_too_long_by_its_bytes_is_refused_before_it_is_tokenized(
    model: ModelDirectory, body: dict[str, Any], param: str
) -> None:
    encoder = Encoder(model.config, Untouched(), find)  # type: ignore[arg-type]
    error = refusal(encoder, **body)
    assert (error.code, error.param) == ("context_length_exceeded", param)
    assert "at least 129 tokens" in error.message


@pytest.mark.parametrize("style", [neox, llama3, qwen2, llama2, mistral])
def test_no_text_has_fewer_tokens_than_its_bytes_say(
    style: Callable[[], Any], tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    style().save(str(path))
    tokenizer = Tokenizer.read(path, VOCAB_SIZE)
    assert tokenizer.most_bytes is not None
    longest = max(tokenizer.token_bytes, key=len).decode("utf-8", "replace")
    decomposed = "\u1112\u1161\u11ab" * 50
    texts = [longest * 50, decomposed, " " * 500, "a" * 500, "<|begin_of_text|>" * 20, "<s>" * 20]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert len(ids) * tokenizer.most_bytes >= len(text.encode())


def test_a_tokenizer_that_may_leave_text_out_has_no_bound() -> None:
    every_byte = [bytes([byte]) for byte in range(256)]
    plain: dict[str, Any] = {"normalizer": None, "added_tokens": [], "pre_tokenizer": None}
    assert most_bytes_of_a_token(plain, [*every_byte, b"word"]) == 4
    assert most_bytes_of_a_token(plain, [*every_byte[1:], b"word"]) is None
    added = {"content": "<mask>", "lstrip": True, "rstrip": False}
    assert most_bytes_of_a_token(plain | {"added_tokens": [added]}, every_byte) is None
    added["lstrip"] = False
    assert most_bytes_of_a_token(plain | {"added_tokens": [added]}, every_byte) == 6
    strips = {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "StripAccents"}]}
    assert most_bytes_of_a_token(plain | {"normalizer": strips}, every_byte) is None
    removes = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed"}
    assert most_bytes_of_a_token(plain | {"pre_tokenizer": removes}, every_byte) is None
