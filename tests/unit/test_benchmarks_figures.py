"""From seconds to figures, on made-up measurements; and from figures to the page."""

import json
import math
from unittest.mock import Mock

import pytest

from benchmarks import report, scaling
from benchmarks.figures import (
    Measured,
    SystemRecord,
    agreement,
    first_token,
    ratios,
    record_figures,
)
from benchmarks.peers.protocol import Generated, Generation, Outcome, Workload


def record(system, precision, seconds, *, ours=False, units=10, tokens=0):
    texts = [Generated("", tokens)] if tokens else []
    measured = {"generate": Measured(units, 10, seconds, [Outcome(texts)])}
    return SystemRecord(system, precision, ours, measured=measured)


RECORDS = [
    record("nightjar", "fp32", [1.0, 100.0, 2.0], ours=True),
    record("nightjar", "int8", [1.0], ours=True),
    record("slow", "fp32", [10.0]),
    record("quick", "fp32", [4.0, 4.0]),
    record("quick", "int8", [1.0], units=5),
    SystemRecord("broken", "fp32", ours=False, failed="no wheel"),
]


def test_a_rate_is_of_the_median_round():
    assert RECORDS[0].measured["generate"].rate == 5.0


def test_ratios_over_the_fastest_peer():
    assert ratios(RECORDS, ["generate", "rank"]) == {
        "by_precision": {
            "fp32": {"generate": {"ratio": 2.0, "ours": "nightjar fp32", "peer": "quick fp32"}},
            "int8": {"generate": {"ratio": 2.0, "ours": "nightjar int8", "peer": "quick int8"}},
        },
        "over_fastest_peer": {
            "fp32": {"generate": {"ratio": 1.0, "ours": "nightjar fp32", "peer": "quick int8"}},
            "int8": {"generate": {"ratio": 2.0, "ours": "nightjar int8", "peer": "quick int8"}},
        },
    }


def test_ratios_by_generated_token():
    """Texts twice as long in the same time: the same requests a second, twice the tokens."""
    ours = record("nightjar", "int8", [2.0], ours=True, tokens=600)
    peer = record("quick", "int8", [1.0], tokens=150)
    by_request = ratios([ours, peer], ["generate"])["over_fastest_peer"]["int8"]
    assert by_request["generate"]["ratio"] == 0.5
    found = ratios([ours, peer], ["generate", "rank"], by_token=True)["over_fastest_peer"]["int8"]
    assert found == {"generate": {"ratio": 2.0, "ours": "nightjar int8", "peer": "quick int8"}}


def test_nothing_generated_has_no_ratio_by_token():
    ranked = [record("nightjar", "fp32", [2.0], ours=True), record("quick", "fp32", [1.0])]
    assert ratios(ranked, ["generate"], by_token=True)["over_fastest_peer"] == {}


def test_a_record_says_how_many_texts_ended_at_their_stop():
    asked = [Generation([1], 64, stop) for stop in ("a", "b", "c", None)]
    one = record("quick", "int8", [2.0, 4.0], units=4)
    texts = [Generated("", 12), Generated("", 20), Generated("", 64), Generated("", 64)]
    one.measured["generate"].outcomes = [Outcome(texts)]
    workloads = {"generate": Workload("generate", asked)}
    entry = record_figures(one, None, workloads)["workloads"]["generate"]
    assert entry == {
        "units": 4,
        "of": 10,
        "rate": 1.333,
        "seconds": [2.0, 4.0],
        "tokens_a_text": 40.0,
        "tokens_per_s": 53.33,
        "ended_by_stop": 0.6667,
    }


def test_no_peer_no_ratio():
    assert ratios(RECORDS[:2], ["generate"]) == {"by_precision": {}, "over_fastest_peer": {}}


def test_agreement_over_the_part_both_have():
    reference = Outcome([Generated("a", 1), Generated("b", 1), Generated("c", 1)], [[2.0, 4.0]])
    other = Outcome([Generated("a", 1), Generated("x", 1)], [[2.0, 4.5], [9.0]])
    assert agreement(reference, other) == {
        "texts_equal": 0.5,
        "texts_compared": 2,
        "max_relative_score_difference": 0.125,
        "scores_compared": 2,
    }


def test_time_to_first_token():
    rounds = [[9, 1, 4, 9, 3, 8, 9, 2, 6], [9, 2, 6], [9, 4, 6]]
    measured = Measured(9, 9, [1.0], [Outcome(seconds_each=each) for each in rounds])
    assert first_token(measured) == {"repeated_s": 2, "fresh_s": 6, "speedup": 3.0}


def system(name, precision, **measured):
    workloads = {
        workload: {"units": 10, "of": 12, "rate": rate, "seconds": [1.0]}
        for workload, rate in measured.items()
    }
    return {
        "system": name,
        "precision": precision,
        "versions": {name: "1.2"},
        "settings": "as its makers say",
        "workloads": workloads,
    }


@pytest.fixture
def peers():
    quick = system("quick", "fp32", generate=2.0, rank=math.pi)
    quick["workloads"]["generate"] |= {
        "texts_equal": 0.9875,
        "texts_compared": 80,
        "tokens_a_text": 14.2,
        "ended_by_stop": 0.9625,
        "tokens_per_s": 28.4,
    }
    quick["first_token"] = {"repeated_s": 2.0, "fresh_s": 5.0, "speedup": 2.5}
    over = {"fp32": {"generate": {"ratio": 3.25, "ours": "nightjar fp32", "peer": "quick fp32"}}}
    by_token = {"fp32": {"generate": {"ratio": 3.5, "peer": "slow fp32"}}}
    machine = {"flags": ["avx2"], "memory_gib": 24, "torch": "2", "threads": 2, "cpu": "C"}
    model = {
        "command": "python -m benchmarks.compare",
        "date": "2026-11-21",
        "minutes": 20.0,
        "machine": machine | {"cores": 2},
        "options": {"rounds": 3},
        "rounds_done": 3,
        "systems": {
            "nightjar fp32": system("nightjar", "fp32", generate=6.5),
            "quick fp32": quick,
            "broken fp32": {"system": "broken", "precision": "fp32", "failed": "no wheel"},
        },
        "ratios_of": {"by_precision": over, "over_fastest_peer": over},
        "ratios_by_token": {"over_fastest_peer": by_token},
        "engine": {
            "fp32": {
                "mixed_over_even": 0.97,
                "prefill_share": 0.915,
                "first_token": {"speedup": 4.5},
                "memory": {"peak_over_budget": 1.13},
            }
        },
    }
    return {"gpt2-small": model, "small": model}


def test_blocks_are_filled(peers):
    names = ("about", "targets", "rates", "ratios", "agreement", "settings", "rates-small")
    page = "Words.\n" + "".join(
        f"<!-- figures: {name} -->\nold\n<!-- end of figures -->\nkept {name}\n" for name in names
    )
    filled = report.fill(page, peers, {})
    assert "old" not in filled
    assert all(f"kept {name}" in filled for name in names)
    for line in (
        "| generation with stops, over the fastest peer | 2.5x | 4x | 3.25x |",
        "| ranking, over the fastest peer | 12x | 20x | - |",
        "| prefill, share of the bare forward | 80% | 95% | 92% |",
        "| mixed lengths over even lengths | 0.9x | 1x | 0.97x |",
        "| 80% repeated: time to first token | 3x | 5x | 4.5x |",
        "| peak memory over weights + KV budget | +20% | +10% | +13% |",
        "| quick fp32 | 2 (10) | 3.14 (10) | - | - | - | - | 2.5x |",
        "- broken fp32: no wheel",
        "| generate | fp32 | 3.25x (quick fp32) | 3.25x (quick fp32) | 3.5x (slow fp32) |",
        "| quick fp32 | 98.8% | 80 | 14.2 | 96.2% | 28.4 | - | - |",
        "C, 2 cores (avx2), 24 GiB; torch 2, 2 threads; 3 rounds, medians.",
        "| quick | quick 1.2 | as its makers say |",
    ):
        assert line in filled.splitlines()
    assert report.fill(filled, peers, {}) == filled


def test_a_run_cut_short_says_so(peers):
    peers["gpt2-small"]["rounds_done"] = 1
    assert "cut short after 1 of 3 rounds" in report.block("about", peers, {})


def test_decode_is_timed_with_its_prompts_in_the_prefix_cache(monkeypatch):
    """Else two long times are subtracted, and what is left is their noise."""
    many, one = (Workload("scaling", [Generation([1], n)]) for n in (33, 1))
    engine = Mock(spec=["config", "reset", "start_engine"])
    timed = []

    def seconds(_, workload):
        assert engine.reset.call_count == 1
        timed.append(workload)
        if workload is many:
            return 0.75
        return 5.0 if len(timed) == 1 else 0.25

    monkeypatch.setattr(scaling, "_seconds", seconds)
    point = scaling.Point(32, many, one)
    assert scaling.measure_point(engine, point) == 64.0
    assert timed == [one, one, many]


def test_plots_of_scaling():
    curve = {
        "x_label": "texts",
        "y_label": "tokens/s",
        "points": [{"x": 1, "median": 12.5}, {"x": 64, "median": 1500.0}],
    }
    measured = {
        "file": "scaling-2026-11-21.json",
        "command": "c",
        "date": "d",
        "machine": {"cpu": "C", "threads": 2},
        "curves": {"batch": {"fp32": curve}},
    }
    assert report.block("scaling", {}, measured).startswith("`c`, d, C, 2 threads;")
    text = report.block("curve-batch", {}, measured)
    assert "(../benchmarks/results/scaling-2026-11-21-batch.svg)" in text
    assert "| tokens/s, fp32 | 12.5 | 1,500 |" in text


def test_the_newest_figures_are_taken_of_each_model(tmp_path):
    for date, models in (("2026-11-20", {"a": 1, "b": 1}), ("2026-12-01", {"a": 2})):
        (tmp_path / f"peers-{date}.json").write_text(json.dumps({"models": models}))
        (tmp_path / f"scaling-{date}.json").write_text(json.dumps({"date": date}))
    (tmp_path / "peers-trial.json").write_text("{}")
    assert report.newest_models(tmp_path) == {"a": 2, "b": 1}
    newest = {"date": "2026-12-01", "file": "scaling-2026-12-01.json"}
    assert report.results(tmp_path, "scaling")[-1] == newest


def test_an_unknown_block_is_refused(peers):
    with pytest.raises(KeyError, match="rated"):
        report.fill("<!-- figures: rated -->\n<!-- end of figures -->", peers, {})


def test_the_page_is_what_the_committed_figures_say():
    page = report.PAGE.read_text(encoding="utf-8")
    scaling = report.results(report.RESULTS, "scaling")[-1]
    found = report.newest_models(report.RESULTS), scaling
    assert report.fill(page, *found) == page
    assert len(report.BLOCK.findall(page)) == 16
