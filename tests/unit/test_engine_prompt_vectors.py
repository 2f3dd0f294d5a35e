"""The store of prompt vectors."""

import pytest
import torch

from nightjar.gpu_worker.engine.prompt_vectors import PromptVectorStore


def test_sets_lie_one_after_another():
    store = PromptVectorStore(4, torch.float32)
    first, second = torch.randn(3, 4), torch.randn(2, 4)
    store.register("a", first)
    store.register("b", second)
    assert (store.span("a"), store.span("b"), store.span(None)) == ((0, 3), (3, 2), (0, 0))
    assert torch.equal(store.rows, torch.cat((first, second)))


def test_the_same_again_takes_no_room():
    store = PromptVectorStore(4, torch.bfloat16)
    vectors = torch.randn(3, 4)
    for _ in range(5):
        store.register("a", vectors)
    assert store.rows.shape == (3, 4)


def test_other_vectors_under_a_key_leave_the_old_rows_to_those_who_read_them():
    store = PromptVectorStore(4, torch.float32)
    store.register("a", torch.zeros(3, 4))
    store.register("a", torch.ones(1, 4))
    assert store.span("a") == (3, 1)
    assert torch.equal(store.rows[:3], torch.zeros(3, 4))


def test_the_store_keeps_its_own_copy():
    store = PromptVectorStore(4, torch.float32)
    vectors = torch.zeros(1, 4)
    store.register("a", vectors)
    vectors += 1
    assert torch.equal(store.rows, torch.zeros(1, 4))


@pytest.mark.parametrize(
    ("vectors", "words"),
    [
        (torch.zeros(3, 5), "needs"),
        (torch.zeros(4), "needs"),
        (torch.zeros(3, 4, dtype=torch.int64), "floating"),
        (torch.full((1, 4), float("nan")), "finite"),
    ],
)
def test_what_does_not_fit_is_refused_when_asked_for(vectors, words):
    store = PromptVectorStore(4, torch.float32)
    store.register("a", torch.zeros(1, 4))
    store.register("a", vectors)
    with pytest.raises(KeyError, match=words):
        store.span("a")
    store.register("a", torch.zeros(1, 4))
    assert store.span("a")[1] == 1


def test_an_unknown_key():
    with pytest.raises(KeyError, match="not registered"):
        PromptVectorStore(4, torch.float32).span("x")
