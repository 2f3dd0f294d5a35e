"""Stops on bytes, against a naive search that knows nothing of automata."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nightjar.gpu_worker.engine import SamplingParams
from nightjar.gpu_worker.engine.errors import RefusedError
from nightjar.gpu_worker.engine.sampling_checks import check_sampling
from nightjar.gpu_worker.engine.stopping import StopAutomaton, StopMatcher, end_tokens
from nightjar.jobs.records import RequestKind
from nightjar.jobs.schemas import validate_body
from nightjar.requests import MAX_STOP_BYTES, MAX_STOPS, MAX_STOPS_BYTES

# Few distinct bytes, so that stops overlap, nest and almost match; the bytes of one Korean
# syllable and one emoji, so that they are cut between tokens.
BYTES = b"ab\n" + "가".encode() + "😀".encode()
short = st.lists(st.sampled_from(BYTES), min_size=1, max_size=5).map(bytes)
token = st.lists(st.sampled_from(BYTES), min_size=0, max_size=6).map(bytes)
few = st.lists(st.sampled_from(b"ab"), min_size=1, max_size=4).map(bytes)
# Characters of 1 to 4 bytes, neighbours that share their first bytes, and bytes of no character.
WHOLE = [c.encode() for c in "aé가각😀😁"] + [b"\xc0", b"\xed\xa0\x80", b"\xff", b"\x80"]
# What more bytes can make one character of (or half a surrogate pair, which Python's decoder waits
# for as well): all bytes but the last of any character, and all but the last two, and so on.
UNFINISHED = {
    chr(point).encode("utf-8", "surrogatepass")[:-drop]
    for point in range(0x80, 0x110000, 0x40)
    for drop in (1, 2, 3)
} - {b""}


def oracle(stops, pieces, min_tokens=0):
    """(index of the token that ends the text, offset where the winning stop begins), or None.

    After each token, every occurrence in the bytes so far that ends past the bytes of the first
    min_tokens tokens; the earliest beginning wins.
    """
    text = b""
    uncounted = len(b"".join(pieces[:min_tokens]))
    for index, piece in enumerate(pieces):
        text += piece
        begins = [
            begin
            for stop in stops
            for begin in range(len(text))
            if text[begin : begin + len(stop)] == stop and begin + len(stop) > uncounted
        ]
        if begins:
            return index, min(begins)
    return None


def settled(stops, text):
    """How many bytes of a text that goes on no stop can take back: the rest is the longest end of
    it that some stop begins with, without being the whole stop; and no character is cut."""
    ends = range(len(text) + 1)
    end = min(
        begin
        for begin in ends
        if begin == len(text)
        or any(s.startswith(text[begin:]) and s != text[begin:] for s in stops)
    )
    for begin in range(max(0, end - 3), end):
        if text[begin:end] in UNFINISHED:
            return begin
    return end


def matched(stops, pieces, min_tokens=0):
    matcher = StopMatcher(tuple(stops), min_tokens)
    for index, piece in enumerate(pieces):
        begin = matcher.feed(piece)
        if begin is not None:
            return index, begin
    return None


@settings(max_examples=400, deadline=None)
@given(st.lists(short, min_size=1, max_size=5), st.lists(token, max_size=25))
def test_equals_the_naive_search(stops, pieces):
    assert matched(stops, pieces) == oracle(stops, pieces)


@settings(max_examples=400, deadline=None)
@given(st.lists(few, min_size=1, max_size=6), st.lists(few, max_size=12))
def test_equals_the_naive_search_where_stops_overlap(stops, pieces):
    assert matched(stops, pieces) == oracle(stops, pieces)


@settings(max_examples=400, deadline=None)
@given(st.lists(few, min_size=1, max_size=4), st.lists(few, max_size=12), st.integers(0, 6))
def test_a_stop_counts_once_a_token_past_the_least_completes_it(stops, pieces, min_tokens):
    assert matched(stops, pieces, min_tokens) == oracle(stops, pieces, min_tokens)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.one_of(short, few, st.sampled_from(WHOLE)), max_size=4),
    st.lists(st.one_of(token, few, st.sampled_from(WHOLE)), max_size=14),
    st.integers(0, 5),
)
def test_text_is_released_as_soon_as_it_is_settled_and_never_taken_back(stops, pieces, min_tokens):
    """Everything released early is a prefix of the final text, decodes to a prefix of it, and is
    all that could be released."""
    ended = oracle(stops, pieces, min_tokens)
    whole = b"".join(pieces)
    final = whole if ended is None else whole[: ended[1]]
    matcher = StopMatcher(tuple(stops), min_tokens)
    released, text, shown = 0, b"", ""
    for index, piece in enumerate(pieces):
        text += piece
        begin = matcher.feed(piece)
        if ended is not None and index == ended[0]:
            assert begin == ended[1]
            break
        assert begin is None
        now = matcher.releasable
        assert released <= now == settled(stops, text)
        shown += text[released:now].decode("utf-8", "replace")
        released = now
    assert released <= len(final)
    assert shown + final[released:].decode("utf-8", "replace") == final.decode("utf-8", "replace")


def test_what_is_held_back():
    matcher = StopMatcher(("\n사용자:".encode(), b"\n\n"))
    released = []
    for piece in (b"a", b"\n", "사용".encode(), "자는".encode(), b"\n", b"x\xec\x82", b"\xac"):
        assert matcher.feed(piece) is None
        released.append(matcher.releasable)
    whole = len("a\n사용자는".encode())
    assert released == [1, 1, 1, whole, whole, whole + 2, whole + 5]


def test_without_stops_only_characters_are_held_back():
    matcher = StopMatcher(())
    assert [
        (matcher.feed(p), matcher.releasable) for p in (b"a", b"\xf0\x9f", b"\x98", b"\x80")
    ] == [
        (None, 1),
        (None, 1),
        (None, 1),
        (None, 5),
    ]


def test_end_tokens():
    params = SamplingParams(1, stop_token_ids=(4, 7))
    assert end_tokens(params, [0, 7]) == {4: "stop", 7: "eos", 0: "eos"}
    assert end_tokens(dataclasses.replace(params, ignore_eos=True), [0, 7]) == {
        4: "stop",
        7: "stop",
    }


@settings(max_examples=100, deadline=None)
@given(st.text(min_size=1, max_size=12), st.text(max_size=30), st.integers(1, 5))
def test_text_cut_anywhere(stop, text, size):
    stop_bytes = stop.encode("utf-8", "replace")
    data = text.encode("utf-8", "replace") + stop_bytes
    pieces = [data[i : i + size] for i in range(0, len(data), size)]
    assert matched([stop_bytes], pieces) == oracle([stop_bytes], pieces)


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        ([b"\n"], [b"a", b"b\nc"], (1, 2)),
        ([b"ab"], [b"xa", b"by"], (1, 1)),
        # Both end in one token: the one that begins earlier wins, though it ends later.
        ([b"bc", b"abcd"], [b"xabcde"], (0, 1)),
        # Only what is complete counts: "abcd" is not, so "bc" ends the text.
        ([b"bc", b"abcd"], [b"xabc", b"d"], (0, 2)),
        # A stop that is another's prefix.
        ([b"ab", b"abc"], [b"abc"], (0, 0)),
        # A stop that another ends with.
        ([b"c", b"abc"], [b"zabc"], (0, 1)),
        (["가".encode()], ["가".encode()[:1], "가".encode()[1:]], (1, 0)),
        (["😀".encode()], [b"a\xf0", b"\x9f", b"\x98\x80"], (2, 1)),
        ([b"aab"], [b"a", b"a", b"a", b"b"], (3, 1)),
        ([b"x"], [b"", b"a", b""], None),
        ([b"a"], [], None),
    ],
)
def test_known_cases(stops, pieces, expected):
    assert matched(stops, pieces) == expected
    assert oracle(stops, pieces) == expected


def test_ties_go_to_the_longest():
    state, begin, length = StopAutomaton((b"ab", b"abc", b"c")).feed(0, b"xabc")
    assert (begin, length) == (1, 3)
    assert state != 0


def test_no_stops():
    assert StopMatcher(()).feed(b"anything") is None


def test_the_longest_stops_that_are_let_in():
    stops = [bytes([i % 251 for i in range(MAX_STOP_BYTES - 1)] + [n]) for n in range(MAX_STOPS)]
    stops += [bytes([n]) * MAX_STOP_BYTES for n in range(240, 240 + MAX_STOPS)]
    for chosen in (stops[:MAX_STOPS], stops[MAX_STOPS:]):
        check_sampling(SamplingParams(max_tokens=1, stop=tuple(chosen)), 100)
        for stop in chosen:
            pieces = [b"x", stop[:1000], stop[1000:], b"y"]
            assert matched(chosen, pieces) == (2, 1)


def test_what_a_body_lets_in_the_engine_computes():
    assert MAX_STOPS * MAX_STOP_BYTES == MAX_STOPS_BYTES
    stops = ["가" * 341 + chr(ord("a") + n) for n in range(MAX_STOPS)]
    body = validate_body(RequestKind.GENERATE, {"prompt": "a", "stop": stops})
    asked = tuple(stop.encode() for stop in body["stop"])
    assert {len(stop) for stop in asked} == {MAX_STOP_BYTES}
    check_sampling(SamplingParams(max_tokens=1, stop=asked), 100)
    with pytest.raises(RefusedError, match="16385 bytes"):
        check_sampling(SamplingParams(max_tokens=1, stop=(*asked[1:], asked[0] + b"x")), 100)
    with pytest.raises(RefusedError, match="17 stops"):
        check_sampling(SamplingParams(max_tokens=1, stop=(b"x",) * (MAX_STOPS + 1)), 100)
