"""Logits processors, samplers and beam search against transformers' own."""

from itertools import pairwise

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nightjar import kernels
from nightjar.gpu_worker.engine import BeamSearch, GenerateRequest, SamplingParams
from nightjar.gpu_worker.engine.beams import BeamState
from nightjar.gpu_worker.engine.sampling import next_tokens
from nightjar.gpu_worker.engine.stopping import end_tokens
from tests.models import SENTENCES, Gpt2Shape, save_gpt2
from tests.parity.oracle import Pair
from tests.sequences import written_text

NOTHING = torch.empty(0, dtype=torch.int64)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    path = tmp_path_factory.mktemp("sampling") / "model"
    return Pair(save_gpt2(path, Gpt2Shape(block_scale=6.0), seed=11))


@pytest.fixture(scope="module")
def prompts(pair):
    return [ids[:12] for ids in pair.tokenizer.encode_batch(SENTENCES[:4])]


def reference(pair, prompt, max_tokens, **options):
    """transformers' generate of one prompt, without the prompt."""
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0} | options
    found = pair.reference.generate(torch.tensor([prompt]), max_new_tokens=max_tokens, **options)
    return found[:, len(prompt) :].tolist()


def generated(pair, prompt, max_tokens, **params):
    params = {"ignore_eos": True} | params
    return pair.run([GenerateRequest(0, prompt, SamplingParams(max_tokens, **params))])[0].token_ids


@pytest.mark.parametrize("penalty", [1.2, 2.0, 0.8])
def test_greedy_with_a_repetition_penalty_equals_generate(pair, prompts, penalty):
    changed = 0
    for prompt in prompts:
        (expected,) = reference(pair, prompt, 20, repetition_penalty=penalty)
        assert generated(pair, prompt, 20, repetition_penalty=penalty) == expected
        changed += generated(pair, prompt, 20) != expected
    assert changed > len(prompts) // 2


def test_greedy_with_bad_words_and_bias_equals_generate(pair, prompts):
    """Bad words of one token and of two; transformers looks for beginnings in the prompt too, so
    none of these begin there."""
    for prompt in prompts:
        free = generated(pair, prompt, 20)
        words = [[free[0]], free[4:6]]
        if free[4] in prompt:
            words = words[:1]
        (expected,) = reference(pair, prompt, 20, bad_words_ids=words)
        assert expected != free
        assert generated(pair, prompt, 20, bad_words=tuple(map(tuple, words))) == expected
        bias = {free[1]: -4.0, 33: 2.5}
        tokens = [[[token], value] for token, value in bias.items()]
        (expected,) = reference(pair, prompt, 20, sequence_bias=tokens)
        assert generated(pair, prompt, 20, logit_bias=bias) == expected


def test_min_tokens_equal_generates_min_new_tokens(pair, prompts):
    for prompt in prompts:
        free = generated(pair, prompt, 16)
        end = free[2]
        (expected,) = reference(pair, prompt, 16, min_new_tokens=9, eos_token_id=end)
        found = generated(pair, prompt, 16, min_tokens=9, stop_token_ids=(end,))
        assert found == expected


def test_processors_equal_transformers_on_random_logits():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 300, generator=generator) * 5
    history = torch.randint(0, 300, (3, 40), generator=generator)
    words = [[7], [*history[0, -2:].tolist(), 9], [5, 6]]
    bias = {3: -2.0, 250: 6.5}
    expected = NoBadWordsLogitsProcessor(words)(history, logits.clone())
    expected = SequenceBiasLogitsProcessor([[[k], v] for k, v in bias.items()])(history, expected)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(history, expected)
    params = SamplingParams(
        64, repetition_penalty=1.3, logit_bias=bias, bad_words=tuple(map(tuple, words))
    )
    rows = []
    for row in history.tolist():
        rows.append(written_text(params, row[:10], row[10:], vocab_size=300))
    next_tokens(logits, rows, NOTHING)
    assert expected.isneginf().any()
    assert torch.equal(logits, expected)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (0.7, 50, 1.0, 0.0),
        (1.3, 0, 0.9, 0.0),
        (1.0, 0, 1.0, 0.05),
        (1.5, 40, 0.95, 0.02),
        (0.4, 3, 0.5, 0.3),
    ],
)
def test_what_can_be_drawn_equals_transformers_warpers(temperature, top_k, top_p, min_p):
    """A grid of draws reaches every token whose probability is wider than its meshes."""
    n = 4000
    logits = torch.randn(1, 400, generator=torch.Generator().manual_seed(8)) * 2
    scores = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(None, scores)
    expected = scores.double().softmax(-1)[0]
    each = (torch.full((n,), value) for value in (temperature, top_k, top_p, min_p))
    draws = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    counts = torch.bincount(kernels.sample(logits.repeat(n, 1), *each, draws), minlength=400)
    assert (counts[expected == 0] == 0).all()
    # Of evenly spaced draws a token gets its share, give or take one at either border.
    assert (counts - expected * n).abs().max() <= 1


def beam_search(pair, prompt, max_tokens, search, eos, **params):
    """The search over texts computed from scratch: (tokens, total, score), best first."""
    params = SamplingParams(max_tokens, beams=search, **params)
    ends = end_tokens(params, eos)
    state, running = BeamState(search), [[]]
    while not state.done:
        rows = [written_text(params, prompt, text, ends, pair.vocab_size) for text in running]
        logits = torch.stack([pair.logits([*prompt, *text])[-1] for text in running])
        choices = next_tokens(logits, rows, NOTHING)
        candidates = state.candidates([choice.candidates for choice in choices])
        going = []
        for place, candidate in enumerate(candidates):
            text = [*running[candidate.parent], candidate.token]
            if candidate.token not in ends and len(text) < max_tokens:
                going.append(candidate)
            elif state.may_finish(place):
                state.finish(text, candidate.total)
        running = [[*running[one.parent], one.token] for one in state.keep(going)]
    return [(one.output, one.total, one.score) for one in state.finished]


@pytest.mark.sampled
@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0, -0.5])
@pytest.mark.parametrize("width", [1, 3, 5])
def test_beam_search_equals_generate(pair, prompts, width, length_penalty, early_stopping):
    lengths = set()
    for prompt in prompts:
        # Ends that occur, so that texts of several lengths compete.
        eos = sorted({*generated(pair, prompt, 9)[3:9:3], 40, 77})
        found = pair.reference.generate(
            torch.tensor([prompt]),
            max_new_tokens=10,
            do_sample=False,
            num_beams=width,
            num_return_sequences=width,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            eos_token_id=eos,
            pad_token_id=1,
            output_scores=True,
            return_dict_in_generate=True,
        )
        texts = found.sequences[:, len(prompt) :].tolist()
        search = BeamSearch(width, length_penalty, early_stopping)
        ours = beam_search(pair, prompt, 10, search, eos)
        assert len(ours) == width
        for (tokens, total, score), expected in zip(ours, texts, strict=True):
            assert tokens == expected[: len(tokens)]
            assert set(expected[len(tokens) :]) <= {1}  # padding
            assert score == pytest.approx(total / len(tokens) ** length_penalty)
            lengths.add(len(tokens))
        if width > 1:  # for one beam transformers takes its greedy path, without scores
            scores = [score for _, _, score in ours]
            assert scores == pytest.approx(found.sequences_scores.tolist(), abs=1e-4)
    # A penalty of 2 makes the longest text the best, unless the search ends before.
    assert len(lengths) > 1 or length_penalty > 1


def test_beams_obey_bad_words_and_min_tokens(pair, prompts):
    prompt, search = prompts[0], BeamSearch(3)
    free = beam_search(pair, prompt, 8, search, [])
    words = (tuple(free[0][0][:1]), tuple(free[1][0][2:4]))
    eos = [free[0][0][1]]
    found = beam_search(pair, prompt, 8, search, eos, bad_words=words, min_tokens=4)
    for text, _, _ in found:
        assert words[0][0] not in text
        assert words[1] not in set(pairwise(text))
        assert eos[0] not in text[:4]
