"""What makes two requests the same question to one model."""

import pytest

from nightjar.jobs.lines.parsing import validate_body
from nightjar.jobs.states import RequestKind
from nightjar.pipeline.planning.reuse import answer_digest, pair_digests

GREEDY = {"prompt": "a", "max_tokens": 4, "temperature": 0}
RANKING = {"query": "q", "documents": ["d", "e"]}


def digest(
    given: dict[str, object],
    *,
    custom_id: str = "row",
    segments: list[list[int]] | None = None,
    vectors: str | None = None,
    chat: bool = False,
) -> bytes:
    kind = RequestKind.RANK if "query" in given else RequestKind.GENERATE
    body = validate_body(kind, given, chat=chat)
    return answer_digest(body, custom_id, segments or [[1, 2]], vectors)


def test_a_digest_is_the_same_in_every_process() -> None:
    assert digest(GREEDY).hex() == (
        "9c52fc4e5983454d93637cf6058f4dc80e633454d8ed6fab4ecf8a827fd3f192"
    )


def test_greedy_requests_are_known_by_their_tokens_whatever_their_names_and_seeds() -> None:
    assert digest(GREEDY) == digest(GREEDY | {"seed": 5, "model": "m"}, custom_id="other")
    assert digest(GREEDY) == digest(GREEDY | {"prompt": [1, 2]})


def test_a_newer_parameter_counts_where_it_is_not_off() -> None:
    drawn = {"prompt": "a", "seed": 1}
    assert digest(drawn) == digest(drawn | {"top_a": 0})
    assert digest(drawn) != digest(drawn | {"top_a": 0.1})


def test_what_is_drawn_is_known_by_its_seed() -> None:
    drawn = {"prompt": "a"}
    assert digest(drawn) == digest(drawn)
    assert digest(drawn) != digest(drawn, custom_id="other")
    assert digest(drawn | {"seed": 1}) == digest(drawn | {"seed": 1}, custom_id="other")
    assert digest(drawn | {"seed": 1}) != digest(drawn | {"seed": 2})


def test_the_order_of_a_bias_does_not_matter() -> None:
    one = digest(GREEDY | {"logit_bias": {"1": 2, "3": 4}})
    assert one == digest(GREEDY | {"logit_bias": {"3": 4, "1": 2}})


@pytest.mark.parametrize(
    "changed", [{"max_tokens": 5}, {"stop": ["x"]}, {"n": 2, "beam_width": 2}, {"logprobs": 0}]
)
def test_what_is_asked_for_counts(changed: dict[str, object]) -> None:
    assert digest(GREEDY) != digest(GREEDY | changed)


def test_tokens_and_their_borders_count() -> None:
    digests = {
        digest(RANKING, segments=segments)
        for segments in ([[1], [2, 3]], [[1, 2], [3]], [[1], [2], [3]], [[1], [3, 2]])
    }
    assert len(digests) == 4


def test_prompt_vectors_count_by_their_content() -> None:
    assert digest(GREEDY, vectors="aa") != digest(GREEDY, vectors="bb")
    assert digest(GREEDY, vectors="aa") != digest(GREEDY)
    named = GREEDY | {"prompt_vector": "p", "adapter": "a"}
    assert digest(named, vectors="aa") == digest(GREEDY, vectors="aa")


def test_a_chat_is_answered_in_another_shape() -> None:
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "temperature": 0}
    assert digest(chat, chat=True) != digest(GREEDY)


def test_documents_that_are_returned_count_by_their_text() -> None:
    """Two texts may have the same tokens, where a tokenizer normalises."""
    other = RANKING | {"documents": ["d", "é"]}
    assert digest(RANKING) == digest(other)
    returned = {"return_documents": True}
    assert digest(RANKING | returned) != digest(other | returned)


def test_a_pair_is_known_by_query_document_and_vectors_whatever_stands_beside_it() -> None:
    alone = pair_digests([1, 2], [[3]], None)
    among = pair_digests([1, 2], [[4], [3], [3]], None)
    assert among[1:] == alone * 2
    assert among[0] != alone[0]
    others = [
        pair_digests([1], [[2, 3]], None),
        pair_digests([1, 2, 3], [[]], None),
        pair_digests([1, 2], [[3]], "aa"),
        pair_digests([3], [[1, 2]], None),
    ]
    assert len({alone[0], *(digests[0] for digests in others)}) == 5


def test_a_pair_is_no_whole_request() -> None:
    whole = digest(RANKING | {"documents": ["d"]}, segments=[[1, 2], [3]])
    assert pair_digests([1, 2], [[3]], None) != [whole]


def test_a_content_key_stands_for_the_texts_and_for_nothing_else() -> None:
    named = GREEDY | {"content_key": "k"}
    assert digest(named) == digest(named | {"prompt": "b"}, segments=[[7]], custom_id="other")
    assert digest(named) != digest(GREEDY | {"content_key": "l"})
    assert digest(named) != digest(GREEDY)
    assert digest(named) != digest(named | {"max_tokens": 5})
    assert digest(named, vectors="aa") != digest(named, vectors="bb")
    drawn: dict[str, object] = {"prompt": "a", "content_key": "k"}
    assert digest(drawn) != digest(drawn, custom_id="other")
    ranking = RANKING | {"content_key": "k"}
    assert digest(ranking, segments=[[1], [2]]) == digest(ranking, segments=[[3], [4]])
    assert digest(ranking, segments=[[1], [2]]) != digest(ranking, segments=[[1], [2], [2]])
