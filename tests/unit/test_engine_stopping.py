"""Stops on bytes, against a naive search that knows nothing of automata."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nightjar.gpu_worker.engine import SamplingParams
from nightjar.gpu_worker.engine.errors import RefusedError
from nightjar.gpu_worker.engine.sampling_checks import check_sampling
from nightjar.gpu_worker.engine.stopping import StopAutomaton, StopMatcher, end_tokens
from nightjar.jobs.lines.parsing import validate_body
from nightjar.jobs.states import RequestKind
from nightjar.requests import MAX_STOP_BYTES, MAX_STOPS, MAX_STOPS_BYTES

# Few distinct bytes, so that stops overlap, nest and almost match; the bytes of one Korean
# syllable and one emoji, so that they are cut between tokens.
BYTES = b"ab\n" + "가".encode() + "😀".encode()
short = st.lists(st.sampled_from(BYTES), min_size=1, max_size=5).map(bytes)
token = st.lists(st.sampled_from(BYTES), min_size=0, max_size=6).map(bytes)
few = st.lists(st.sampled_from(b"ab"), min_size=1, max_size=4).map(bytes)


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
