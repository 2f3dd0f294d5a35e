"""The choice between loading and computing, by given and by measured speeds."""

from types import SimpleNamespace

import pytest

from benchmarks.gpu.scale import SCALES
from nightjar.gpu_worker.engine.load_costs import FEWEST_ROWS, MEASURES, LoadCosts, Recent
from nightjar.gpu_worker.engine.plan import PrefixChunk, StepPlan


def chunk(rows):
    return SimpleNamespace(chunk=PrefixChunk(None, 0, rows), starts=[object()])


def test_a_beginning_is_loaded_where_the_bus_is_faster():
    """1,024 tokens of a 1.3B GPT: 201 MB, 4 ms over a bus of 50 GB/s, 6 ms to compute."""
    fast = LoadCosts(6e-3 / 1024, 1 / 50e9, 0.0)
    assert fast.loading_pays(1024, 201_000_000, 0)
    slow = LoadCosts(6e-3 / 1024, 1 / 30e9, 0.0)
    assert not slow.loading_pays(1024, 201_000_000, 0)


def test_what_waits_for_the_bus_counts():
    costs = LoadCosts(6e-3 / 1024, 1 / 50e9, 0.0)
    assert costs.loading_pays(1024, 201_000_000, 90_000_000)
    assert not costs.loading_pays(1024, 201_000_000, 110_000_000)


def test_few_tokens_do_not_pay_for_the_launches():
    costs = LoadCosts(6e-6, 4e-6 / 200_000, 24 * 20e-6)
    assert not costs.loading_pays(32, 32 * 200_000, 0)
    assert costs.loading_pays(1024, 1024 * 200_000, 0)


def test_it_begins_with_what_devices_of_a_kind_can_do():
    """The 1.3B GPT: 1.2e9 weights in its blocks, 2.4e9 operations a token."""
    costs = LoadCosts.estimated(SCALES["full"].config(), "cuda:1")
    assert costs.token_s == pytest.approx(24 * 24 * 2048**2 / 200e12)
    assert costs.byte_s == 1 / 20e9
    assert LoadCosts.estimated(SCALES["full"].config(), "cpu").token_s > 1000 * costs.token_s


def test_one_slow_measurement_changes_little():
    recent = Recent(1.0)
    recent.add(1000.0)
    assert recent.value == 1.0
    for _ in range(MEASURES):
        recent.add(3.0)
    recent.add(1000.0)
    assert recent.value == 3.0


def test_transfers_and_prompts_take_the_place_of_the_estimate():
    costs = LoadCosts(1.0, 1.0, 0.0)
    for _ in range(MEASURES):
        costs.moved(1000, 2e-6)
        costs.stepped(StepPlan(prompts=[chunk(100)]), 0.5)
    assert costs.byte_s == pytest.approx(2e-9)
    assert costs.token_s == pytest.approx(0.005)


def test_a_step_that_nobody_waits_for_counts_with_the_next():
    """On a GPU the host knows the time of both only when it reads a token."""
    costs = LoadCosts(1.0, 1.0, 0.0)
    first = SimpleNamespace(chunk=PrefixChunk(None, 0, 300), starts=[])
    costs.stepped(StepPlan(prompts=[first]), 0.1)
    assert costs.token_s == 1.0
    costs.stepped(StepPlan(prompts=[chunk(100)]), 0.7)
    assert costs.token_s == pytest.approx(0.8 / 400)


@pytest.mark.parametrize(
    "plan",
    [
        StepPlan(prompts=[chunk(FEWEST_ROWS - 1)]),
        StepPlan(prompts=[chunk(100)], decodes=[object()] * 26),
        StepPlan(prompts=[chunk(100)], arrivals=object()),
    ],
    ids=["few rows", "many sequences", "a load"],
)
def test_steps_that_say_nothing_of_prompts_do_not_count(plan):
    costs = LoadCosts(1.0, 1.0, 0.0)
    costs.stepped(plan, 0.5)
    assert costs.token_s == 1.0
    costs.stepped(StepPlan(prompts=[chunk(100)]), 0.2)  # counts by itself
    assert costs.token_s == pytest.approx(0.2 / 100)
