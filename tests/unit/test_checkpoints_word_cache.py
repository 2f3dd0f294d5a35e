"""Words that were met before: their ids are the tokenizer's own."""

import json
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nightjar.checkpoints import PROMPT_TOKEN, ModelDirectory
from nightjar.checkpoints.word_cache import MOST_CHARACTERS, WordCache, cuts_at_blanks
from tests.models import EOS_TOKEN, save_gpt2
from tests.tokenizer_styles import LLAMA3_SPLIT, STYLES

AWKWARD = [" ", "  ", "\n", "\t", "\u00a0", "\u3000", "\u180e", "\u200b", "\x1c", "\x85", "\u0308"]
WORDS = ["a", "안녕", "don't", "12345", "…", "é", EOS_TOKEN, PROMPT_TOKEN, "'s", "x" * 40]
texts = st.lists(st.sampled_from([*AWKWARD, *WORDS]) | st.text(max_size=4), max_size=12).map(
    "".join
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return ModelDirectory.open(save_gpt2(tmp_path_factory.mktemp("words") / "model")).tokenizer()


@pytest.fixture(scope="module")
def cache(tokenizer):
    """One for all examples, so that what one of them leaves is met by the others."""
    encode = tokenizer.encode
    return WordCache(encode, lambda given: [encode(text) for text in given], most_words=500)


@given(st.lists(texts, max_size=6))
@example(["a b", " a b", "a  b", "a b ", "a\n b", "a \nb", "b a"])
def test_ids_are_the_tokenizers_own(tokenizer, cache, given):
    assert cache.encode_batch(given) == [tokenizer.encode(text) for text in given]


@pytest.mark.parametrize("style", ["llama3", "qwen2"])
@given(given=st.lists(texts, max_size=6))
@example(given=["a b", "a 12345 b", "a\r\n b", "a ...\r\n b", "e \u0308 b", "I 'm he 'LL"])
def test_ids_are_those_of_other_byte_level_tokenizers(style, given):
    backend = STYLES[style]()
    assert cuts_at_blanks(json.loads(backend.to_str()))

    def encode(text):
        return list(backend.encode(text, add_special_tokens=False).ids)

    whole = [encode(text) for text in given]
    cache = WordCache(encode, lambda several: [encode(text) for text in several])
    assert cache.encode_batch(given) == whole


class Counting:
    """Gives each text the id of its length, and notes what it was asked: words, or whole texts."""

    def __init__(self):
        self.words = []
        self.texts = []

    def cache(self, **options):
        return WordCache(self._word, self._whole, **options)

    def _word(self, text):
        self.words.append(text)
        return [len(text)]

    def _whole(self, texts):
        self.texts += texts
        return [[len(text)] for text in texts]


def test_each_word_is_tokenized_once():
    asked = Counting()
    cache = asked.cache()
    assert cache.encode_batch(["one two two", "one two"]) == [[3, 4, 4], [3, 4]]
    assert cache.encode_batch(["one two"]) == [[3, 4]]
    assert asked.words == ["one", " two"]
    assert asked.texts == []


def test_a_words_ids_are_not_shared_with_whoever_asked():
    cache = Counting().cache()
    cache.encode_batch(["one two"])[0].append(99)
    assert cache.encode_batch(["one two", "one"]) == [[3, 4], [3]]


def test_no_more_words_are_kept_than_there_is_room_for():
    cache = Counting().cache(most_words=10)
    given = [f"w{number} v{number}" for number in range(50)]
    assert cache.encode_batch(given) == [
        [len(first), 1 + len(second)] if number < 5 else [len(first) + 1 + len(second)]
        for number, (first, second) in enumerate(map(str.split, given))
    ]
    assert cache.encode_batch(["new one"]) == [[3, 4]]  # it has begun anew


def test_words_that_begin_texts_and_never_come_again_leave_the_others_known():
    asked = Counting()
    cache = asked.cache(most_words=10)
    for number in range(50):
        assert cache.encode_batch([f"{number:03d} two three"]) == [[3, 4, 6]]
    assert asked.words.count(" two") == asked.words.count(" three") == 1


def test_a_text_with_more_words_than_there_is_room_for_is_taken_whole():
    asked = Counting()
    text = " ".join(map(str, range(100, 120)))
    assert asked.cache(most_words=10).encode_batch([text]) == [[len(text)]]
    assert asked.words == []


def test_long_words_are_not_kept():
    asked = Counting()
    word = "x" * (MOST_CHARACTERS + 1)
    assert asked.cache().encode_batch([f"a {word}"]) == [[2 + len(word)]]
    assert asked.words == []


def described(**changes):
    return {
        "normalizer": None,
        "added_tokens": [],
        "model": {"type": "BPE", "dropout": None},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
    } | changes


def added(**changes):
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": 1, "content": "<x>", **flags, **changes}


def split_by(expression, **changes):
    split = {
        "type": "Split",
        "pattern": {"Regex": expression},
        "behavior": "Isolated",
        "invert": False,
    }
    bytes_of_words = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [split | changes, bytes_of_words]}


@pytest.mark.parametrize(
    "description",
    [
        described(),
        described(normalizer={"type": "NFC"}),
        described(added_tokens=[added()]),
        described(pre_tokenizer=split_by(LLAMA3_SPLIT)),
    ],
)
def test_tokenizers_that_cut_at_blanks(description):
    assert cuts_at_blanks(description)


@pytest.mark.parametrize(
    "description",
    [
        described(normalizer={"type": "Replace"}),
        described(model={"type": "BPE", "dropout": 0.1}),
        described(model={"type": "Unigram"}),
        described(pre_tokenizer=None),
        described(pre_tokenizer={"type": "Metaspace"}),
        described(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}),
        described(pre_tokenizer=split_by(r"\S+ \S+|.")),
        described(pre_tokenizer=split_by(LLAMA3_SPLIT, invert=True)),
        described(pre_tokenizer=split_by(LLAMA3_SPLIT, behavior="Removed")),
        described(added_tokens=[added(content="a b")]),
        described(added_tokens=[added(lstrip=True)]),
        described(added_tokens=[added(rstrip=True)]),
        described(added_tokens=[added(single_word=True)]),
    ],
)
def test_tokenizers_that_may_not(description):
    assert not cuts_at_blanks(description)


def test_a_new_word_costs_no_more_where_many_are_known():
    def seconds(known):
        cache = Counting().cache()
        cache.encode_batch([f"a {number}" for number in range(known)])
        texts = [f"{number} a 7" for number in range(1_000)]
        begun = time.process_time()
        cache.encode_batch(texts)
        return time.process_time() - begun

    few = min(seconds(10) for _ in range(3))
    assert min(seconds(10_000) for _ in range(3)) < 8 * few
