"""Attention of prompt rows to the pages of a cache in FP8, against the formula in float64."""

import pytest
import torch

from nightjar.kernels import cuda
from tests.kernels_cuda.devices import moved, storages
from tests.kernels_cuda.prompt_problems import KEYS, Prompts


@pytest.mark.parametrize("head_size", [64, 80, 96, 128])
@pytest.mark.parametrize("storage", storages)
def test_every_head_size_and_storage(device, head_size, storage):
    Prompts([(0, 3), (30, 45)], 4, 2, head_size, storages[storage], fp8=True).compare(device)


@pytest.mark.parametrize("block_size", [4, 16, 64])
@pytest.mark.parametrize("storage", storages)
def test_pages_of_other_sizes(device, storage, block_size):
    spans = [(0, 7), (13, 41), (60, 70)]
    Prompts(spans, 2, 1, 64, storages[storage], block_size=block_size, fp8=True).compare(device)


def exponents(name, count):
    """Powers of two that keys and values of `count` positions are multiplied by.

    A value of 1 is kept as 256 times a factor of 2 ** -8.
    """
    place, none = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    return {
        "rising": (none, place // 3 - 24),
        "falling": (none, -(place // 3)),
        "small": (none, none - 14),
        "large": (none, none + 9),
        "few large": (none, torch.where(place % 29 == 3, 8, -10)),
        # The first tile weighs almost nothing as soon as the second is seen.
        "large that weigh nothing": (
            torch.where(place < KEYS, -20, 1),
            torch.where(place < KEYS, 10, -10),
        ),
    }[name]


SIZES = ("rising", "falling", "small", "large", "few large", "large that weigh nothing")


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("storage", storages)
def test_values_of_very_different_sizes(device, storage, name):
    """Weights keep their digits, whatever the factors of their values are."""
    problem = Prompts([(66, 76)], 3, 1, 64, storages[storage], spread=6.0, fp8=True)
    problem.rescale(0, *exponents(name, 76))
    problem.compare_each(device)


@pytest.mark.parametrize("exponent", [-110, 110])
def test_factors_past_the_range_of_fp16(device, exponent):
    """Where bfloat16 and FP32 hold the values, and FP16 does not."""
    for storage in (torch.bfloat16, torch.float32):
        problem = Prompts([(30, 40)], 2, 1, 64, storage, fp8=True)
        problem.rescale(0, torch.zeros(40, dtype=torch.int64), torch.full((40,), exponent))
        problem.compare_each(device)


def test_values_that_are_zeros_weigh_as_much_as_others(device):
    """Their factor is the least there is."""
    for storage in storages.values():
        problem = Prompts([(30, 40)], 2, 1, 64, storage, fp8=True)
        zeros = torch.where(torch.arange(40) % 3 == 0, -118, 0)
        (_, values), blocks = problem.own[0], torch.tensor(problem.tables[0])
        for i in range(0, 40, 3):
            problem.values[blocks[i // KEYS], :, i % KEYS] = 0
            values[i] = 0.0
        problem.rescale(0, torch.zeros(40, dtype=torch.int64), zeros)
        problem.compare_each(device)


@pytest.mark.parametrize("name", ["rising", "few large"])
@pytest.mark.parametrize("storage", storages)
def test_a_row_as_decode_attention_computes_it(device, storage, name):
    """Which multiplies each weight as two numbers of 16 bits: what differs is one rounding."""
    problem = Prompts([(75, 76)], 4, 1, 64, storages[storage], fp8=True)
    problem.rescale(0, *exponents(name, 76))
    tables = torch.tensor([problem.tables[0]], dtype=torch.int32)
    given = problem.q, problem.keys, problem.values, tables, torch.tensor([76], dtype=torch.int32)
    decoded = cuda.decode_attention.decode_attention(
        *(x.to(device) for x in given), problem.scale, scales=moved(problem.scales, device)
    )
    problem.compare_each(device, decoded)
    problem.compare_each(device)


@pytest.mark.parametrize("storage", storages)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1)])
def test_a_row_has_the_same_bits_however_its_prompt_is_cut(device, heads, kv_heads, storage):
    """And whatever is cached behind it: the largest factors, and none."""
    whole = Prompts([(0, 70)], heads, kv_heads, 64, storages[storage], fp8=True)
    whole.rescale(0, *exponents("rising", 70))
    wanted = whole.run(device)
    for start, end in ((0, 31), (31, 70), (64, 70)):
        part = Prompts([(0, 70)], heads, kv_heads, 64, storages[storage], fp8=True)
        part.rescale(0, *exponents("rising", 70))
        part.spans, part.lengths, part.q = [(start, end)], [end - start], whole.q[start:end]
        assert torch.equal(part.run(device), wanted[start:end])
    for name in ("keys", "values"):
        getattr(whole.scales, name)[whole.tables[0][1], :, 9:] = 255  # from position 41 on
        found = whole.run(device)
        assert torch.equal(found[:41], wanted[:41])
        assert found[41:].isnan().all()


@pytest.mark.parametrize("storage", storages)
def test_a_row_that_is_not_finite_reaches_what_sees_it_and_nothing_else(device, storage):
    for name in ("keys", "values"):
        problem = Prompts([(0, 40), (0, 40)], 2, 1, 64, storages[storage], fp8=True)
        wanted = problem.run(device)
        getattr(problem.scales, name)[problem.tables[1][0], 0, 5] = 255
        found = problem.run(device)
        assert torch.equal(found[:45], wanted[:45])
        assert found[45:].isnan().all()
