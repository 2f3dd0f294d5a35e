"""Long benchmarks fail at their beginning, not after hours."""

from pathlib import Path

import pytest

from benchmarks import real_run


class BegunError(Exception):
    """The benchmark has come to its data."""


def test_the_real_run_has_a_place_for_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_data(path: Path) -> None:
        raise BegunError

    monkeypatch.setattr(real_run, "RESULTS", tmp_path / "new" / "results")
    monkeypatch.setattr(real_run, "load_data", load_data)
    command = ["real_run", "--data", str(tmp_path), "--work", str(tmp_path / "work")]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(BegunError):
        real_run.main()
    assert real_run.RESULTS.is_dir()
