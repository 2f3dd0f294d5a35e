"""The work that systems are compared on: the same for a seed, of the stated lengths."""

import json
import random
from dataclasses import replace
from itertools import pairwise
from statistics import median

import msgspec
import pytest

from benchmarks.models import save_model
from benchmarks.peers.nightjar_peer import NightjarEngine
from benchmarks.peers.protocol import Generated, Generation, Workload
from benchmarks.weights import TINY_GPT2, TINY_LLAMA
from benchmarks.workloads import Sizes, build, log_normal_lengths, stop_in, token_ends, with_stops
from nightjar.checkpoints import ModelDirectory

SIZES = Sizes().scaled(0.1)


def fake_reference(asked):
    """Texts of distinct words, as long as they are asked for."""
    words = [f" {'bcdfghjklm'[i % 10]}a{'nprstvwxyz'[i // 10]}o" for i in range(100)]
    return [
        Generated("".join(words[: request.max_tokens]), request.max_tokens) for request in asked
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("benchmarks") / "tiny", TINY_GPT2)


@pytest.fixture(scope="module")
def words():
    return TINY_GPT2.words


@pytest.fixture(scope="module")
def workloads(words):
    return build(words, SIZES, fake_reference)


def test_the_same_seed_makes_the_same_work(words, workloads):
    assert build(words, SIZES, fake_reference) == workloads


def test_a_size_moves_no_other_workload(words, workloads):
    more = build(words, replace(SIZES, rank_queries=5), fake_reference)
    assert [name for name in workloads if more[name] != workloads[name]] == ["rank"]


def test_every_text_is_its_tokens(model, workloads):
    tokenizer = ModelDirectory.open(model).tokenizer()
    asked = [ids for r in workloads["rank"].rankings for ids in (r.query, *r.documents)]
    texts = [b"".join(tokenizer.token_bytes[i] for i in ids).decode() for ids in asked]
    assert tokenizer.encode_batch(texts) == asked
    assert all(tokenizer.token_bytes[i].startswith(b" ") for i in TINY_GPT2.words)


def test_lengths_are_as_stated(workloads):
    rank = workloads["rank"].rankings
    assert {len(ranking.documents) for ranking in rank} == {16}
    assert all(135 <= len(ranking.query) <= 165 for ranking in rank)
    assert all(8 <= len(document) <= 14 for r in rank for document in r.documents)
    long = workloads["rank_long"].rankings
    assert {(len(r.query), len(r.documents)) for r in long} == {(500, 100)}
    assert all(25 <= len(document) <= 35 for r in long for document in r.documents)
    catalogue = workloads["catalogue"].rankings
    assert len({json.dumps(r.documents) for r in catalogue}) == 1
    assert len(catalogue[0].documents) == 200
    assert len({tuple(r.query) for r in catalogue}) == SIZES.catalogue_queries
    assert {len(g.token_ids) for g in workloads["long_prompts"].generations} == {900}


def test_generation_lengths_are_log_normal_around_64():
    lengths = log_normal_lengths(random.Random(0), 2000)
    assert (min(lengths), max(lengths)) == (8, 400)
    assert 58 <= median(lengths) <= 70


def test_mixed_and_even_lengths_hold_the_same_tokens(words):
    made = build(words, Sizes(), fake_reference)
    mixed, even = (
        [len(g.token_ids) for g in made[name].generations]
        for name in ("mixed_lengths", "even_lengths")
    )
    assert sum(mixed) == sum(even)
    assert (len(mixed), len(even), min(mixed), max(mixed)) == (64, 64, 8, 400)
    assert max(even) - min(even) <= 1


def test_turns_repeat_four_fifths(workloads):
    asked = workloads["multi_turn"].generations
    waves = [[g for g in asked if g.wave == number] for number in range(SIZES.turns)]
    assert sum(map(len, waves)) == len(asked)
    for before, after in pairwise(waves):
        for old, new in zip(before, after, strict=True):
            assert new.token_ids[: len(old.token_ids)] == old.token_ids
            assert len(old.token_ids) / len(new.token_ids) == pytest.approx(0.8, abs=0.01)
    longest = max(len(g.token_ids) + g.max_tokens for g in waves[-1])
    assert longest <= TINY_GPT2.context


def test_first_tokens_come_in_threes(workloads):
    prompts = [g.token_ids for g in workloads["first_token"].generations]
    for prefix, repeated, fresh in zip(prompts[::3], prompts[1::3], prompts[2::3], strict=True):
        assert (len(prefix), len(repeated), len(fresh)) == (400, 500, 500)
        assert repeated[:400] == prefix
        assert fresh[:1] != prefix[:1] or fresh[:32] != prefix[:32]


def test_full_answers_are_short_answers_without_stops(workloads):
    short, full = (workloads[name].generations for name in ("short_answers", "full_answers"))
    assert all(generation.stop for generation in short)
    assert full == [replace(generation, stop=None) for generation in short]


def test_a_stop_is_complete_with_the_next_token():
    text = " bado kele mumu bado"
    ends = token_ends(text)
    assert ends == [5, 10, 15, 20]
    stop = stop_in(text, ends, 2)
    assert stop == "o kele "
    assert text.find(stop) + len(stop) == 11
    assert stop_in(text, ends, 4) is None


def test_a_stop_never_occurs_earlier():
    text = " ba" * 30 + " dodo kiki"
    generation = Generation([1], 40)
    (stopped,) = with_stops([generation], [Generated(text, 32)], [10])
    assert stopped.stop is not None
    assert text.find(stopped.stop) > 80
    (never,) = with_stops([generation], [Generated(" ba" * 30, 30)], [10])
    assert never.stop is None


@pytest.mark.parametrize("scale", [0, -1, 1.5])
def test_a_scale_that_is_none(scale):
    with pytest.raises(ValueError, match="above 0, at most 1"):
        Sizes().scaled(scale)


def test_the_stops_really_occur(model, words):
    """With the engine itself as the reference: every text ends at its stop, where it was meant."""
    system = engine(model)
    sizes = replace(SIZES, generations=12, short_answers=4)
    made = build(words, sizes, system.generate)
    stops = [generation.stop for generation in made["generate"].generations]
    assert len({stop for stop in stops if stop}) >= 10
    system.reset()
    free = system.generate([replace(g, stop=None) for g in made["generate"].generations])
    system.reset()
    ended = system.generate(made["generate"].generations)
    for stop, whole, generated in zip(stops, free, ended, strict=True):
        if stop is None:
            assert generated == whole
            continue
        assert stop in whole.text
        assert generated.text == whole.text[: whole.text.find(stop)]
        assert generated.tokens < 33


def engine(directory, precision="fp32"):
    system = NightjarEngine()
    system.load(directory, precision, 2, directory)
    return system


@pytest.fixture(scope="module", params=[TINY_GPT2, TINY_LLAMA], ids=lambda shape: shape.family)
def either(request, tmp_path_factory):
    return save_model(tmp_path_factory.mktemp(request.param.family), request.param)


@pytest.mark.slow
def test_a_text_depends_on_words_far_before_its_beginning(either, words):
    """Prompts that differ in all but their last ten words: most texts differ, from the start."""
    rng = random.Random(3)
    end = rng.choices(words, k=10)
    texts = engine(either).generate(
        [Generation(rng.choices(words, k=50) + end, 20) for _ in range(24)]
    )
    assert len({generated.text for generated in texts}) >= 6
    assert len({generated.text.split()[0] for generated in texts}) >= 6
    assert all(len(set(generated.text.split())) >= 19 for generated in texts)


@pytest.mark.slow
def test_a_text_depends_on_the_last_word(either, words):
    rng = random.Random(4)
    start = rng.choices(words, k=50)
    prompts = [Generation([*start, word], 20) for word in rng.choices(words, k=12)]
    assert len({generated.text for generated in engine(either).generate(prompts)}) == 12


@pytest.mark.sampled
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_every_precision_says_the_same_and_meets_the_stops(either, words, precision):
    """But where the two most salient words of a prompt are as salient as rounding can tell."""
    exact, rounded = engine(either), engine(either, precision)
    asked = build(words, replace(SIZES, generations=64), exact.generate)["generate"].generations
    exact.reset()
    pairs = list(zip(exact.generate(asked), rounded.generate(asked), strict=True))
    assert sum(one.text == other.text for one, other in pairs) >= 61
    assert all(generation.stop for generation in asked)
    assert sum(other.tokens <= 17 for _, other in pairs) >= 61
    assert {one.tokens for one, _ in pairs} == set(range(12, 18))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [TINY_GPT2, TINY_LLAMA])
def test_a_model_is_the_same_for_a_seed(tmp_path, shape):
    files = [save_model(tmp_path / str(i), shape) / "model.safetensors" for i in range(2)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_first_part_of_a_workload(workloads):
    rank = workloads["rank"]
    part = rank.head(20)
    assert [len(ranking.documents) for ranking in part.rankings] == [16, 4]
    assert part.rankings[1].documents == rank.rankings[1].documents[:4]
    assert (part.units, rank.head(10_000).units) == (20, rank.units)
    assert [rank.whole(units) for units in (1, 16, 17)] == [16, 16, 32]
    assert workloads["generate"].head(3).generations == workloads["generate"].generations[:3]
    assert workloads["generate"].whole(3) == 3
    assert msgspec.json.decode(msgspec.json.encode(rank), type=Workload) == rank
