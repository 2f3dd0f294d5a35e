"""Texts that are stored together: what is packed comes back, within the bounds of a pack."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightjar.jobs.asked import without_texts
from nightjar.jobs.errors import StoreError
from nightjar.jobs.lines.parsing import validate_body
from nightjar.jobs.states import RequestKind
from nightjar.jobs.store.packs import MOST_BYTES, MOST_TEXTS, cut, pack, unpack
from nightjar.pipeline.planning.reuse import answer_digest

SIZES = st.lists(st.integers(0, 2 * MOST_BYTES), max_size=400)


@given(st.lists(st.text().map(lambda text: text.replace("\n", "").encode("utf-8", "replace"))))
def test_texts_come_back(texts: list[bytes]) -> None:
    assert unpack(pack(texts)) == (texts or [b""])


@given(SIZES)
def test_packs_hold_all_texts_in_order_within_their_bounds(sizes: list[int]) -> None:
    parts = list(cut(sizes))
    assert [place for part in parts for place in range(part.start, part.stop)] == list(
        range(len(sizes))
    )
    for part in parts:
        own = sizes[part]
        assert 1 <= len(own) <= MOST_TEXTS
        assert sum(own) <= MOST_BYTES or len(own) == 1
    for one, following in pairwise(parts):  # none could hold one more
        assert (
            len(sizes[one]) == MOST_TEXTS or sum(sizes[one]) + sizes[following.start] > MOST_BYTES
        )


def test_a_pack_is_full_to_the_byte() -> None:
    assert list(cut([MOST_BYTES, MOST_BYTES, 1])) == [slice(0, 1), slice(1, 2), slice(2, 3)]
    assert list(cut([MOST_BYTES, MOST_BYTES - 1, 1])) == [slice(0, 1), slice(1, 3)]


def test_like_texts_take_a_fraction() -> None:
    texts = [b'{"prompt":"Is film %d a good film for a rainy night?"}' % n for n in range(250)]
    assert len(pack(texts)) < len(b"".join(texts)) / 5


@pytest.mark.parametrize("damaged", [b"", b"text", pack([b"one", b"two"])[:-3]])
def test_damaged_packs_are_errors_of_the_store(damaged: bytes) -> None:
    with pytest.raises(StoreError, match=f"{len(damaged)} bytes cannot be decompressed"):
        unpack(damaged)


BODIES = [
    (RequestKind.GENERATE, {"prompt": "an owl", "max_tokens": 3, "temperature": 0.5, "seed": 7}),
    (RequestKind.GENERATE, {"prompt": [1, 2, 3], "max_tokens": 3, "content_key": "k"}),
    (
        RequestKind.GENERATE,
        {"messages": [{"role": "user", "content": "an owl"}], "max_tokens": 3, "stop": ["."]},
    ),
    (RequestKind.RANK, {"query": "an owl", "documents": ["one", "two"], "top_n": 1}),
    (RequestKind.RANK, {"query": "an owl", "documents": ["one"], "return_documents": True}),
]


@pytest.mark.parametrize(("kind", "body"), BODIES)
def test_what_is_left_of_a_body_answers_like_the_whole(
    kind: RequestKind, body: dict[str, object]
) -> None:
    whole = validate_body(kind, body, chat="messages" in body)
    asked = without_texts(whole)
    assert "owl" not in repr(asked)
    of_asked, of_whole = (answer_digest(one, "row-1", [[5], [6]], None) for one in (asked, whole))
    assert of_asked == of_whole
    assert ("messages" in asked, "query" in asked) == ("messages" in whole, "query" in whole)
    assert asked.get("documents") == (["one"] if body.get("return_documents") else None)
