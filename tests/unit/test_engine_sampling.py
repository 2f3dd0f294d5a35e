"""Choosing tokens under a request's parameters: oracles over logits and over whole texts."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nightjar.gpu_worker.engine import RankRequest, RequestFailed, SamplingParams
from nightjar.gpu_worker.engine.logits_processors import (
    BadWords,
    TokenCounts,
    process_logits,
)
from nightjar.gpu_worker.engine.sampling import next_tokens
from nightjar.gpu_worker.engine.sequence import Choice
from nightjar.gpu_worker.engine.stopping import end_tokens
from nightjar.requests import BeamSearch
from tests.engines import VOCAB, generate, ids, one, run
from tests.sequences import written_text

pytestmark = pytest.mark.usefixtures("one_thread")
INF = float("inf")


# --- rows of logits


def sequence(params, prompt=(), generated=(), eos=(), vocab_size=VOCAB):
    return written_text(params, prompt, generated, end_tokens(params, eos), vocab_size)


def processed(row, params, prompt, generated, eos):
    """One row in float64: bans, bias, penalties, each by its formula and over the whole text."""
    row = [float(x) for x in row]
    banned = set()
    if len(generated) < params.min_tokens:
        banned |= set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
    for word in params.bad_words:
        if tuple(([None] * len(word) + generated)[-len(word) + 1 :]) == word[:-1] or len(word) == 1:
            banned.add(word[-1])
    for token in range(len(row)):
        value = row[token] + params.logit_bias.get(token, 0)
        if token in prompt or token in generated:
            penalty = params.repetition_penalty
            value = value / penalty if value > 0 else value * penalty
        count = generated.count(token)
        value -= count * params.frequency_penalty
        value -= (count > 0) * params.presence_penalty
        row[token] = -INF if token in banned else value
    return torch.tensor(row, dtype=torch.float64)


tokens = st.integers(0, 11)
parameters = st.builds(
    SamplingParams,
    max_tokens=st.just(30),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.4, 0.6]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.2, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.8, -0.5]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 3.0]), max_size=3),
    bad_words=st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
    stop_token_ids=st.lists(tokens, max_size=2).map(tuple),
    min_tokens=st.sampled_from([0, 0, 2, 9]),
    ignore_eos=st.booleans(),
)


@settings(max_examples=100, deadline=None)
@given(
    top_a=st.floats(0.001, 1),
    temperature=st.floats(0.05, 5),
    spread=st.sampled_from([0.1, 1.0, 8.0, 1000.0]),
    seed=st.integers(0, 1000),
)
@example(top_a=1.0, temperature=1e-38, spread=1.0, seed=1)
def test_top_a_keeps_what_its_definition_keeps(top_a, temperature, spread, seed):
    """In float64, with NumPy: p >= top_a * max(p)^2.  A rounding may decide at the limit alone."""
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(seed)) * spread
    logits[1, 5] = -INF
    params = SamplingParams(9, temperature=temperature, top_a=top_a)
    plain = SamplingParams(9, temperature=temperature, presence_penalty=1.0)
    rows = [sequence(params), sequence(params), sequence(plain)]
    found = logits.clone()
    process_logits(found, {i: (one.processors, one.generated) for i, one in enumerate(rows)})
    assert torch.equal(found[2], logits[2])
    for row, before in zip(found[:2], logits[:2], strict=True):
        scores = before.double().numpy()
        with np.errstate(over="ignore"):
            weights = np.exp((scores - scores.max()) / temperature)
        probs = weights / weights.sum()
        limit = top_a * probs.max() ** 2
        kept = ~row.isneginf().numpy()
        assert kept[probs.argmax()]
        assert kept[probs > limit * (1 + 1e-4)].all()
        assert not kept[probs < limit * (1 - 1e-4)].any()
        assert torch.equal(row[kept], before[kept])


def test_top_a_decides_what_is_drawn(model, token_bytes):
    """A bias makes token 7 likely: it alone is above the square of its probability."""

    def drawn(**params):
        asked = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 20} | params
        request = generate(9, logit_bias={7: 6.0}, **asked)
        return one(model, token_bytes, request).outputs[0].token_ids

    free = [drawn(seed=seed) for seed in range(3)]
    assert all(set(tokens) > {7} for tokens in free)
    assert [drawn(seed=seed, top_a=1e-30) for seed in range(3)] == free
    assert [drawn(seed=seed, top_a=1.0) for seed in range(3)] == [[7] * 20] * 3


def test_top_a_changes_no_greedy_choice():
    assert sequence(SamplingParams(9, top_a=0.5)).processors is None


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(parameters, st.lists(tokens, max_size=5), st.lists(tokens, max_size=9)),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 1000),
)
def test_processed_logits_equal_the_formulas(rows, seed):
    logits = torch.randn(len(rows), 12, generator=torch.Generator().manual_seed(seed)) * 3
    expected = [processed(logits[i], *row, eos=[11]) for i, row in enumerate(rows)]
    made = [sequence(*row, eos=[11], vocab_size=12) for row in rows]
    found = logits.clone()
    changing = {i: (s.processors, s.generated) for i, s in enumerate(made) if s.processors}
    if changing:
        process_logits(found, changing)
    torch.testing.assert_close(found.double(), torch.stack(expected), rtol=1e-5, atol=1e-5)
    # Token by token, or a step run twice: the counts are the same.
    grown = []
    for params, prompt, generated in rows:
        grown.append(sequence(params, prompt, eos=[11], vocab_size=12))
        for token in [*generated, None]:
            if grown[-1].processors:
                for _ in range(2):
                    process_logits(logits.clone(), {0: (grown[-1].processors, grown[-1].generated)})
            if token is not None:
                grown[-1].generated.append(token)
    again = logits.clone()
    changing = {i: (s.processors, s.generated) for i, s in enumerate(grown) if s.processors}
    if changing:
        process_logits(again, changing)
    assert torch.equal(again, found)


def test_counts_hold_each_seen_token_once():
    counts = TokenCounts([5, 5, 2], 10)
    seen, how_often = counts.read([])
    assert dict(zip(seen.tolist(), how_often.tolist(), strict=True)) == {5: 0, 2: 0}
    seen, how_often = counts.read([2, 9, 2])
    assert seen.tolist() == [5, 2, 9]
    assert how_often.tolist() == [0, 2, 1]


def test_prompt_vectors_have_no_score_to_penalize():
    params = SamplingParams(4, repetition_penalty=2.0)
    made = sequence(params, prompt=[1, VOCAB, VOCAB + 3])
    logits = torch.ones(1, VOCAB)
    assert next_tokens(logits, [made], torch.empty(0, dtype=torch.int64)) == [Choice(0)]
    assert logits[0, 1] == 0.5


def test_bad_words_block_where_they_would_be_complete():
    words = BadWords([(3,), (1, 2), (5, 1, 4), (1, 1, 1)])
    assert words.completing([]) == {3}
    assert words.completing([7]) == {3}
    assert words.completing([1]) == {3, 2}
    assert words.completing([5, 1]) == {3, 2, 4}
    assert words.completing([1, 1]) == {3, 2, 1}


NOTHING = torch.empty(0, dtype=torch.int64)


def test_logprobs_are_of_the_raw_distribution():
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(2)) * 2
    raw = logits.double().log_softmax(-1)
    params = [
        SamplingParams(5, temperature=1.7, seed=4, logprobs=3, logit_bias={7: 100.0}),
        SamplingParams(5, logprobs=0, bad_words=((int(logits[1].argmax()),),)),
        SamplingParams(5),
    ]
    choices = next_tokens(logits, [sequence(p, vocab_size=40) for p in params], NOTHING)
    assert choices[0].token == 7
    assert choices[0].logprobs.chosen == pytest.approx(float(raw[0, 7]), abs=1e-6)
    best = raw[0].topk(3)
    assert [token for token, _ in choices[0].logprobs.top] == best.indices.tolist()
    found = [value for _, value in choices[0].logprobs.top]
    assert found == pytest.approx(best.values.tolist(), abs=1e-6)
    second = int(raw[1].topk(2).indices[1])
    assert choices[1].token == second
    assert choices[1].logprobs.chosen == pytest.approx(float(raw[1, second]), abs=1e-6)
    assert choices[1].logprobs.top == ()
    assert choices[2].logprobs is None


def test_samples_of_a_request_draw_apart():
    params = SamplingParams(9, temperature=1.0, seed=3)
    samples = [dataclasses.replace(sequence(params), sample=i) for i in range(400)]
    together = next_tokens(torch.zeros(400, VOCAB), samples, NOTHING)
    assert len({choice.token for choice in together}) > 200
    for i in (0, 7, 399):
        assert next_tokens(torch.zeros(1, VOCAB), [samples[i]], NOTHING) == [together[i]]
    other_seed = sequence(dataclasses.replace(params, seed=4))
    assert next_tokens(torch.zeros(1, VOCAB), [other_seed], NOTHING) != [together[1]]


def test_rows_that_ask_for_nothing_are_left_alone():
    """The plain path: no copy, no change, the argmax."""
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    busy = sequence(SamplingParams(3, frequency_penalty=1.0), generated=[1, 1])
    plain = sequence(SamplingParams(3))
    assert plain.processors is None
    choices = next_tokens(logits, [plain, plain, busy, plain], NOTHING)
    kept = [0, 1, 3]
    assert torch.equal(logits[kept], before[kept])
    assert [choices[i].token for i in kept] == before.argmax(-1)[kept].tolist()


@pytest.mark.parametrize("value", [float("nan"), INF, -INF])
def test_a_row_that_is_not_finite_costs_only_itself(value):
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    rows = [
        sequence(SamplingParams(3, temperature=t, logprobs=2, presence_penalty=1.0, seed=1))
        for t in (0.0, 1.0, 1.0)
    ]
    expected = next_tokens(logits.clone(), rows, NOTHING)
    logits[1, 99] = value
    found = next_tokens(logits, rows, NOTHING)
    assert found == [expected[0], None, expected[2]]


def test_a_token_that_is_never_chosen_is_not_the_best_of_any_row():
    """Its rows are searched anew, whether or not a request changes scores itself."""
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))
    banned = torch.tensor([7, 40])
    logits[1, 7] = logits[3, 40] = logits[3, 7] = 50.0
    allowed = logits.clone()
    allowed[:, banned] = -INF
    plain = sequence(SamplingParams(3))
    assert plain.processors is None
    choices = next_tokens(logits, [plain] * 4, banned)
    assert [choice.token for choice in choices] == allowed.argmax(-1).tolist()


def test_a_row_in_which_everything_is_blocked_has_no_choice():
    rows = [
        sequence(SamplingParams(3, temperature=t, bad_words=((0,), (1,)), seed=1), vocab_size=4)
        for t in (0.0, 1.0)
    ]
    assert next_tokens(torch.zeros(2, 4), rows, torch.tensor([2, 3])) == [None, None]
    assert [one.token for one in next_tokens(torch.zeros(2, 4), rows, torch.tensor([2]))] == [3, 3]


# --- whole texts


def test_min_tokens_hold_the_end_back(model, token_bytes):
    free = one(model, token_bytes, generate(max_tokens=12))
    end = free.token_ids[1]
    early = one(model, token_bytes, generate(max_tokens=12, stop_token_ids=(end,)))
    assert early.token_ids == free.token_ids[: free.token_ids.index(end) + 1]
    late = one(model, token_bytes, generate(max_tokens=12, stop_token_ids=(end,), min_tokens=5))
    assert end not in late.token_ids[:5]
    assert len(late.token_ids) >= 5
    eos = generate(max_tokens=12, ignore_eos=False, min_tokens=5)
    assert end not in one(model, token_bytes, eos, eos_token_ids=(end,)).token_ids[:5]
    # Past them the end is free again.
    every = generate(max_tokens=12, logit_bias={end: 100.0}, stop_token_ids=(end,), min_tokens=5)
    result = one(model, token_bytes, every)
    assert (len(result.token_ids), result.finish_reason) == (6, "stop")


def test_a_stop_string_within_min_tokens_does_not_end_the_text(model, token_bytes):
    free = one(model, token_bytes, generate(max_tokens=12))
    pieces = [token_bytes[i] for i in free.token_ids]
    stop = pieces[1]
    assert stop
    first = next(i for i, piece in enumerate(pieces) if stop in b"".join(pieces[: i + 1]))
    result = one(model, token_bytes, generate(max_tokens=12, stop=(stop,), min_tokens=first + 1))
    later = b"".join(pieces[: first + 1])
    assert result.text.startswith(later)
    ended = one(model, token_bytes, generate(max_tokens=12, stop=(stop,), min_tokens=first))
    assert (ended.finish_reason, len(ended.token_ids)) == ("stop", first + 1)


def test_a_stop_token_adds_nothing_to_the_text(model, token_bytes):
    free = one(model, token_bytes, generate(max_tokens=12))
    end = free.token_ids[3]
    first = free.token_ids.index(end)
    result = one(model, token_bytes, generate(max_tokens=12, stop_token_ids=(end, 5)))
    assert result.finish_reason == "stop"
    assert result.token_ids == free.token_ids[: first + 1]
    assert result.text == b"".join(token_bytes[i] for i in free.token_ids[:first])


def test_a_stop_token_counts_although_end_of_text_is_ignored(model, token_bytes):
    free = one(model, token_bytes, generate(max_tokens=12))
    end = free.token_ids[3]
    request = generate(max_tokens=12, stop_token_ids=(end,))
    result = one(model, token_bytes, request, eos_token_ids=(end,))
    assert result.finish_reason == "stop"
    both = generate(max_tokens=12, stop_token_ids=(end,), ignore_eos=False)
    assert one(model, token_bytes, both, eos_token_ids=(end,)).finish_reason == "eos"


def test_bad_words_are_never_generated(model, token_bytes):
    free = one(model, token_bytes, generate(max_tokens=20)).token_ids
    words = ((free[0],), tuple(free[3:5]), tuple(free[6:9]))
    result = one(model, token_bytes, generate(max_tokens=20, bad_words=words)).token_ids
    text = [tuple(result[i : i + n]) for n in (1, 2, 3) for i in range(len(result) - n + 1)]
    assert not set(words) & set(text)
    # One that the prompt ends with the beginning of is no bad word of the answer.
    begun = (ids(5)[-1], free[0])
    assert one(model, token_bytes, generate(max_tokens=20, bad_words=(begun,))).token_ids == free


def test_logprobs_of_a_text(model, token_bytes):
    plain = one(model, token_bytes, generate(max_tokens=7))
    assert (plain.outputs[0].logprobs, plain.outputs[0].cumulative_logprob) == (None, None)
    output = one(model, token_bytes, generate(max_tokens=7, logprobs=4)).outputs[0]
    assert output.token_ids == plain.token_ids
    assert [step.top[0] for step in output.logprobs] == [
        (token, step.chosen) for token, step in zip(output.token_ids, output.logprobs, strict=True)
    ]
    assert {len(step.top) for step in output.logprobs} == {4}
    total = sum(step.chosen for step in output.logprobs)
    assert output.cumulative_logprob == pytest.approx(total)
    # The ranking of the same continuation sums the same log-probabilities.
    ranked = one(model, token_bytes, RankRequest(0, ids(5), [output.token_ids]))
    assert -total / 7 == pytest.approx(ranked.mean_nll[0], abs=1e-5)


BAD = [
    ({"temperature": float("nan")}, "temperature is nan"),
    ({"temperature": INF}, "temperature is inf"),
    ({"temperature": 1e39}, "temperature is 1e+39: must be from 0 to 100"),
    ({"min_p": -0.1}, "min_p is -0.1: must be from 0 to 1"),
    ({"min_p": 1.1}, "min_p"),
    ({"min_p": float("nan")}, "min_p is nan"),
    ({"top_a": -0.1}, "top_a is -0.1: must be from 0 to 1"),
    ({"top_a": float("nan")}, "top_a is nan"),
    ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0: must be from 0.01 to 100"),
    ({"repetition_penalty": -1.0}, "repetition_penalty"),
    ({"repetition_penalty": INF}, "repetition_penalty"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": float("nan")}, "frequency_penalty"),
    ({"logit_bias": {VOCAB: 1.0}}, "logit_bias: token id 512 is not in the model's vocabulary"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias: token id -1"),
    ({"logit_bias": {3: 101.0}}, "logit_bias of token 3 is 101.0: must be from -100 to 100"),
    ({"logit_bias": {3: float("nan")}}, "logit_bias of token 3"),
    ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "1025 tokens"),
    ({"stop_token_ids": (VOCAB,)}, "stop_token_ids: token id 512"),
    ({"stop_token_ids": (1,) * 257}, "257 ids"),
    ({"bad_words": ((1, VOCAB),)}, "bad_words: token id 512"),
    ({"bad_words": ((),)}, "a word has no tokens"),
    ({"bad_words": ((1, 2),) * 2049}, "2049 words"),
    ({"bad_words": tuple((i,) for i in range(257))}, "257 of the model's 512 tokens"),
    ({"min_tokens": 9}, "min_tokens is 9, more than max_tokens, which is 8"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"stop": (b"a",) * 10_000}, "10000 stops: at most 16"),
    ({"stop": (b"a" * 1_000_000,)}, "1000000 bytes"),
    ({"logprobs": 21}, "logprobs is 21: must be from 0 to 20"),
    ({"logprobs": -1}, "logprobs"),
    ({"n": 1_000_000, "temperature": 1.0}, "n is 1000000: must be from 1 to 128"),
    ({"n": 0}, "n is 0"),
    ({"n": 2}, "n is 2 with temperature 0"),
    ({"beams": BeamSearch(0)}, "beam_width is 0"),
    ({"beams": BeamSearch(129)}, "beam_width is 129"),
    ({"beams": BeamSearch(2), "n": 3}, "n is 3, more than the 2 beams"),
    (
        {"beams": BeamSearch(2), "temperature": 0.7},
        "temperature cannot be combined",
    ),
    ({"beams": BeamSearch(2, float("nan"))}, "length_penalty is nan"),
    (
        {"beams": BeamSearch(2), "repetition_penalty": 1.2},
        "repetition_penalty cannot be combined",
    ),
    (
        {"beams": BeamSearch(2), "logit_bias": {1: 1.0}},
        "logit_bias cannot be combined",
    ),
]


def test_bad_parameters_are_refused_and_the_batch_goes_on(model, token_bytes):
    """All of them at once, between good requests: each is refused for its own reason."""
    good = [
        generate(1000, max_tokens=5),
        generate(1001, temperature=1.0, min_p=0.1, presence_penalty=0.4, logprobs=2),
        RankRequest(1002, ids(4), [ids(3)]),
    ]
    expected = run(model, token_bytes, good)
    bad = [generate(i, **params) for i, (params, _) in enumerate(BAD)]
    results = run(model, token_bytes, [good[0], *bad[:20], good[1], *bad[20:], good[2]])
    for i, (params, words) in enumerate(BAD):
        failure = results.pop(i)
        assert isinstance(failure, RequestFailed), params
        assert failure.code == "invalid_sampling"
        assert words in failure.message
    assert results == expected


def test_the_widest_parameters_that_are_let_in(model, token_bytes):
    """At every bound: computed, and finite."""
    for repetition in (0.01, 100.0):
        request = generate(
            temperature=1.0,
            repetition_penalty=repetition,
            presence_penalty=-2.0,
            frequency_penalty=2.0,
            logit_bias=dict.fromkeys(range(VOCAB), -100.0),
            stop_token_ids=tuple(range(256)),
            min_tokens=8,
            logprobs=20,
        )
        result = one(model, token_bytes, request)
        assert len(result.token_ids) == 8
        assert min(result.token_ids) > 255


@st.composite
def workloads(draw):
    """Requests with all manner of parameters, and an order and limits to run them under."""
    requests = []
    for i in range(draw(st.integers(2, 8))):
        if draw(st.integers(0, 4)) == 0:
            requests.append(RankRequest(i, ids(9, i), [ids(5, i), ids(1, i)]))
            continue
        params = {
            "max_tokens": draw(st.integers(1, 14)),
            "temperature": draw(st.sampled_from([0.0, 0.8, 1.5])),
            "top_k": draw(st.sampled_from([0, 20])),
            "top_p": draw(st.sampled_from([1.0, 0.9])),
            "min_p": draw(st.sampled_from([0.0, 0.05])),
            "repetition_penalty": draw(st.sampled_from([1.0, 1.3])),
            "presence_penalty": draw(st.sampled_from([0.0, 0.9])),
            "frequency_penalty": draw(st.sampled_from([0.0, -0.3])),
            "logit_bias": draw(st.sampled_from([{}, {5: 6.0, 9: -3.5}])),
            "bad_words": draw(st.sampled_from([(), ((5,), (9, 10))])),
            "stop": draw(st.sampled_from([(), (b"e", b"an")])),
            "logprobs": draw(st.sampled_from([None, 0, 3, 20])),
            "seed": draw(st.integers(0, 3)),
        }
        params["min_tokens"] = draw(st.integers(0, params["max_tokens"]))
        requests.append(generate(i, prompt=ids(draw(st.integers(1, 40)), i), **params))
    config = {
        "max_running": draw(st.sampled_from([1, 3, 64])),
        "max_step_tokens": draw(st.sampled_from([32, 4096])),
    }
    return requests, draw(st.permutations(requests)), config


@settings(max_examples=12, deadline=None)
@given(workload=workloads())
def test_results_are_bitwise_the_same_in_any_company(any_model, token_bytes, workload):
    """Log-probabilities included, and in a fresh engine, as after a restart."""
    requests, order, config = workload
    together = run(any_model, token_bytes, order, **config)
    for request in requests:
        assert one(any_model, token_bytes, request) == together[request.request_id]
