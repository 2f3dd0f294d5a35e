"""The store of prompt vectors, and what a step reads of it."""

from __future__ import annotations

import pytest
import torch

from nightjar.gpu_worker.engine.prompt_vectors import PromptVectorStore


def test_vectors_are_found_under_their_key():
    store = PromptVectorStore(4)
    first, second = torch.randn(3, 4), torch.randn(2, 4)
    store.register("a", first)
    store.register("b", second.half())
    assert torch.equal(store.find("a").rows, first)
    assert torch.equal(store.find("b").rows, second.half().float())
    assert store.find(None) is None


def test_the_salt_is_of_the_rows_and_not_of_the_key():
    store = PromptVectorStore(4)
    vectors = torch.randn(3, 4)
    store.register("a", vectors)
    store.register("b", vectors)
    store.register("c", vectors + 1e-6)
    salts = [store.find(key).salt for key in "abc"]
    assert salts[0] == salts[1] != salts[2]
    store.forget("a")
    store.register("a", vectors)
    assert store.find("a").salt == salts[0]
    assert 0 < max(salts) < 1 << 128


def test_other_vectors_under_a_key_leave_the_old_ones_to_those_who_read_them():
    store = PromptVectorStore(4)
    store.register("a", torch.zeros(3, 4))
    read = store.find("a")
    store.register("a", torch.ones(1, 4))
    assert torch.equal(store.find("a").rows, torch.ones(1, 4))
    store.forget("a")
    assert torch.equal(read.rows, torch.zeros(3, 4))
    with pytest.raises(KeyError, match="not registered"):
        store.find("a")


def test_the_store_keeps_its_own_copy():
    store = PromptVectorStore(4)
    vectors = torch.zeros(1, 4)
    store.register("a", vectors)
    vectors += 1
    assert torch.equal(store.find("a").rows, torch.zeros(1, 4))


@pytest.mark.parametrize(
    ("vectors", "words"),
    [
        (torch.zeros(3, 5), "needs"),
        (torch.zeros(4), "needs"),
        (torch.zeros(3, 4, dtype=torch.int64), "floating"),
        (torch.full((1, 4), float("nan")), "finite"),
        (torch.full((1, 4), 1e39, dtype=torch.float64), "finite"),
    ],
)
def test_what_does_not_fit_is_refused_when_asked_for(vectors, words):
    store = PromptVectorStore(4)
    store.register("a", torch.zeros(1, 4))
    store.register("a", vectors)
    with pytest.raises(KeyError, match=words):
        store.find("a")
    store.register("a", torch.zeros(1, 4))
    assert store.find("a").rows.shape[0] == 1


def test_an_unknown_key():
    with pytest.raises(KeyError, match="not registered"):
        PromptVectorStore(4).find("x")
