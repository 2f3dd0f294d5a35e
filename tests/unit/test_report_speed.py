"""The machine's own limit, beside which a report sets the engine's time."""

from dataclasses import replace

import msgspec
import pytest

from nightjar.checkpoints import ModelDirectory
from nightjar.jobs.job_report import Machine
from nightjar.jobs.report.page import ReportContext, render_report, report_json
from nightjar.jobs.tallies import Tally
from nightjar.pipeline.front.speed_limits import speed_limit
from tests.reported_jobs import built, micro_batch

# The tiny model: in each of 2 layers 32 x 96, 32 x 32, 32 x 128 and 128 x 32, and the tied table.
WEIGHTS = 2 * 32 * (96 + 32 + 128 + 128) + 512 * 32
TALLY = Tally(
    rows=28,
    prompt_tokens=300,
    cached_tokens=20,
    completion_tokens=100,
    engine_s=2.0,
    steps=50.0,
    precisions={"bf16": 27, "fp32": 1},
)
REPORT = built(micro_batch(28, 20, 120, tally=TALLY))


@pytest.mark.parametrize(
    ("copied", "flops", "bound"), [(1e6, 1e12, "memory_s"), (1e12, 1e6, "arithmetic_s")]
)
def test_the_limit_is_the_longer_of_memory_and_arithmetic(
    directory: ModelDirectory, copied: float, flops: float, bound: str
) -> None:
    limit = speed_limit(REPORT, directory, Machine(copied, flops, 2))
    assert limit is not None
    assert (limit.weights, limit.weight_bytes, limit.precision) == (WEIGHTS, 2 * WEIGHTS, "bf16")
    assert limit.memory_s == pytest.approx(50 * 2 * WEIGHTS / copied)
    assert limit.arithmetic_s == pytest.approx(2 * WEIGHTS * (300 - 20 + 100) / flops)
    assert limit.share == pytest.approx(getattr(limit, bound) / 2.0)


def test_keys_and_values_in_fp8_leave_the_limit_of_the_weights(directory: ModelDirectory) -> None:
    narrow = replace(REPORT, tally=msgspec.structs.replace(TALLY, precisions={"bf16+fp8-kv": 28}))
    limit = speed_limit(narrow, directory, Machine(1e9, 1e10, 2))
    assert limit is not None
    assert (limit.weight_bytes, limit.precision) == (2 * WEIGHTS, "bf16+fp8-kv")


def test_the_lm_head_of_a_model_in_fp8_has_two_bytes_a_weight(directory: ModelDirectory) -> None:
    narrow = replace(REPORT, tally=msgspec.structs.replace(TALLY, precisions={"fp8+fp8-kv": 28}))
    limit = speed_limit(narrow, directory, Machine(1e9, 1e10, 2))
    assert limit is not None
    assert (limit.weight_bytes, limit.precision) == (WEIGHTS + 512 * 32, "fp8+fp8-kv")


def test_the_report_names_it_or_says_why_it_is_not_known(directory: ModelDirectory) -> None:
    limit = speed_limit(REPORT, directory, Machine(1e9, 1e10, 2))
    assert limit is not None
    told = report_json(REPORT, ReportContext("x", limit=limit))["limit"]
    assert told["share"] == limit.share
    assert "10 GFLOP/s" in render_report(REPORT, ReportContext("x", limit=limit))
    assert "for no reason" in render_report(REPORT, ReportContext("x", no_limit="for no reason"))


@pytest.mark.parametrize("changes", [{"precisions": {}}, {"engine_s": 0.0}])
def test_made_up_answers_have_no_limit(
    directory: ModelDirectory, changes: dict[str, object]
) -> None:
    changed = Tally(**{name: getattr(TALLY, name) for name in ("rows", "steps")})
    for name, value in ({"engine_s": 2.0, "precisions": {"fp32": 1}} | changes).items():
        setattr(changed, name, value)
    report = replace(REPORT, tally=changed)
    assert speed_limit(report, directory, Machine(1e9, 1e10, 2)) is None
