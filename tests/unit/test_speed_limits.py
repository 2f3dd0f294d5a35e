"""The probe of the machine, which the report of a run makes: `nightjar run` has little memory."""

import tracemalloc

import pytest

from nightjar.pipeline.front import speed_limits


@pytest.mark.parametrize(("threads", "most_mib"), [(2, 64), (8, 64), (16, 128)])
def test_the_probe_is_bounded_in_memory(
    threads: int, most_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed_limits, "_PROBE_S", 0.001)
    tracemalloc.start()
    try:
        found = speed_limits.measure(threads)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.copy_bytes_per_s > 0
    assert found.flops_per_s > 0
    assert most_mib << 19 < peak < (most_mib + 16) << 20
