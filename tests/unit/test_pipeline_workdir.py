"""What a run checks before it begins, and that one run at a time holds a work directory."""

from pathlib import Path

import pytest

from nightjar.jobs.store import Store
from nightjar.pipeline.embedded.line_files import LineOutput
from nightjar.pipeline.embedded.work import RunError
from nightjar.pipeline.embedded.workdir import (
    UsageError,
    check_overwrites,
    check_paths,
    default_workdir,
    file_digest,
    locked_workdir,
    note_asked,
    note_writing,
    note_written,
    output_paths,
    was_written,
    what_changed,
)
from tests.jobs import submit


@pytest.mark.parametrize(
    ("out", "errors"),
    [
        ("out.jsonl", "out.errors.jsonl"),
        ("a.b.json", "a.b.errors.json"),
        ("out", "out.errors.jsonl"),
    ],
)
def test_errors_go_beside_the_output(out: str, errors: str) -> None:
    assert output_paths(Path("d") / out) == (Path("d") / out, Path("d") / errors)


def test_the_error_file_may_not_be_the_input(tmp_path: Path) -> None:
    source = tmp_path / "out.errors.jsonl"
    source.write_text("{}")
    with pytest.raises(UsageError, match="overwrite the input"):
        check_paths(source, tmp_path / "out.jsonl", tmp_path / "work")
    check_paths(source, tmp_path / "other.jsonl", tmp_path / "work")


def test_an_output_that_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("{}")
    with pytest.raises(UsageError, match="not a regular file"):
        check_paths(source, Path("/dev/full"), tmp_path / "work")


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_file_that_was_put_there_while_the_run_computed_is_kept(
    store: Store, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    job = store.jobs.get(submit(store, [{"prompt": "a"}]))
    out.write_text("mine")
    with pytest.raises(RunError, match=f"would overwrite {out}.*results are kept in"):
        LineOutput(out).write(store, job, tmp_path / "work", overwrite=False)
    assert out.read_text() == "mine"


def test_a_second_run_is_turned_away_and_a_later_one_is_not(tmp_path: Path) -> None:
    workdir = default_workdir(tmp_path / "out.jsonl")
    with (
        locked_workdir(workdir),
        pytest.raises(UsageError, match="another run works"),
        locked_workdir(workdir),
    ):
        pytest.fail("two runs hold one work directory")
    with locked_workdir(workdir) as held:
        assert held == tmp_path / "out.jsonl.work"


def test_a_work_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UsageError, match="cannot be used"),
        locked_workdir(tmp_path / "file" / "work"),
    ):
        pytest.fail("a directory inside a file")


def test_digests_tell_files_apart(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"a" * 3_000_000)
    two.write_bytes(b"a" * 3_000_000)
    assert file_digest(one) == file_digest(two)
    two.write_bytes(b"a" * 2_999_999 + b"b")
    assert file_digest(one) != file_digest(two)


def test_a_file_that_is_not_a_runs_own_is_refused_by_name(tmp_path: Path) -> None:
    out, work = tmp_path / "out.jsonl", tmp_path / "work"
    check_overwrites(out, work)
    for path in output_paths(out):
        path.write_text("somebody's work")
        with pytest.raises(UsageError, match=rf"overwrite {path}, and no run.*add --overwrite"):
            check_overwrites(out, work)
        path.write_text("")  # as mktemp leaves it: nothing to lose
        check_overwrites(out, work)


def test_a_runs_own_files_are_known_whenever_it_was_killed(tmp_path: Path) -> None:
    out, work = tmp_path / "out.jsonl", tmp_path / "work"
    work.mkdir()
    note_writing(work, out)
    for path in output_paths(out):  # killed after this move, before the note of it
        path.write_text("results")
        check_overwrites(out, work)
    assert not was_written(work, out)
    note_written(work, out)
    assert was_written(work, out)
    check_overwrites(out, work)
    with pytest.raises(UsageError, match="no run of this work directory"):
        check_overwrites(out, tmp_path / "other work")
    out.write_text("results, edited")
    with pytest.raises(UsageError, match="changed since Nightjar wrote it"):
        check_overwrites(out, work)
    (work / "written.json").write_text('[["half')
    with pytest.raises(UsageError, match="no run of this work directory"):
        check_overwrites(out, work)


def test_what_has_changed_is_named(tmp_path: Path) -> None:
    asked = {"the input": "1", "the model": "2", "--dtype": "bf16", "the prompt vectors": ""}
    everything = "the input, the model, --dtype or the prompt vectors have changed since"
    assert what_changed(tmp_path, asked) == everything  # a version before has noted nothing
    note_asked(tmp_path, asked)
    assert what_changed(tmp_path, asked | {"--dtype": "fp32"}) == "--dtype has changed since"
    both = what_changed(tmp_path, asked | {"the input": "3", "the prompt vectors": "v 1"})
    assert both == "the input and the prompt vectors have changed since"
