"""Receipts of answers, the sample of a file of results, and what of an answer differs."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from nightjar import __version__
from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.worker.receipts import Receipts
from nightjar.jobs.equality import derived_seed
from nightjar.jobs.records import ClaimedRequest, NewResult
from nightjar.jobs.states import RequestKind
from nightjar.pipeline.embedded import recomputing
from nightjar.pipeline.embedded.recomputing import Difference, Recomputed, comparable, compare
from nightjar.pipeline.embedded.sampling_results import sample_rows, sample_share
from nightjar.pipeline.embedded.workdir import UsageError

DEMO = Path(__file__).parents[2] / "examples" / "demo_model"


def claimed(kind=RequestKind.GENERATE, seed=None, vector=None, adapter=None):
    return ClaimedRequest(1, 0, "row-1", kind, {"seed": seed}, [[1]], vector, adapter)


def receipt_of(request, precision="fp16+plan-1", **digests):
    result = NewResult(1, 200, {"model": "demo"})
    Receipts("f" * 64, "t" * 64).add(result, request, precision, digests)
    return result.body["receipt"]


def test_a_receipt_names_what_an_answer_was_computed_with():
    digests = {"polite@2": "a" * 64, "short@1": "b" * 64, "absent@1": None}
    named = claimed(seed=7, vector="polite@2", adapter="short@1")
    assert receipt_of(named, **digests) == {
        "model": "f" * 64,
        "tokenizer": "t" * 64,
        "precision": "fp16+plan-1",
        "version": __version__,
        "seed": 7,
        "prompt_vector": {"name": "polite@2", "sha256": "a" * 64},
        "adapter": {"name": "short@1", "sha256": "b" * 64},
    }
    assert "adapter" not in receipt_of(claimed(adapter="absent@1"), **digests)
    assert receipt_of(claimed())["seed"] == derived_seed("row-1")
    assert "seed" not in receipt_of(claimed(RequestKind.RANK))
    failed = NewResult.failure(1, "not_finite", "NaN")
    Receipts("f", "t").add(failed, claimed(), "fp32", {})
    assert failed.body is None


def test_the_hashes_are_those_of_the_files():
    directory = ModelDirectory.open(DEMO)
    found = Receipts.of(directory)
    assert found.model == directory.fingerprint
    data = (DEMO / "tokenizer.json").read_bytes()
    assert found.tokenizer == hashlib.sha256(data).hexdigest()


def answer(number, **body):
    body = {"precision": "fp32", "choices": [{"text": f"t{number}"}]} | body
    return {"custom_id": f"row-{number}", "response": {"status_code": 200, "body": body}}


def written(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(name="files")
def results_and_requests(tmp_path):
    rows = [answer(n) for n in range(200)]
    rows[5] = {"custom_id": "row-5", "response": {"status_code": 500, "body": {"error": {}}}}
    lines = [{"custom_id": f"row-{n}", "body": {"prompt": str(n)}} for n in range(0, 200)]
    return written(tmp_path / "out.jsonl", rows), written(tmp_path / "in.jsonl", lines)


def test_the_sample_is_the_same_each_time_and_grows_with_the_share(files):
    small, again, large = (sample_rows(*files, sample_share(s)) for s in ("5%", "5%", "50%"))
    assert small == again
    assert small.of == 199
    assert len(small.rows) == 10
    ids = [{row.custom_id for row in sample.rows} for sample in (small, large)]
    assert ids[0] < ids[1]
    assert len(ids[1]) == 100
    assert all(json.loads(row.line)["custom_id"] == row.custom_id for row in small.rows)
    everything = sample_rows(*files, sample_share("100%"))
    assert "row-5" not in {row.custom_id for row in everything.rows}


def test_lines_that_are_missing_are_counted(files, tmp_path):
    results, _ = files
    part = written(tmp_path / "part.jsonl", [{"custom_id": "row-1"}, {"custom_id": "row-1"}, 3])
    sample = sample_rows(results, part, 1.0)
    assert [row.custom_id for row in sample.rows] == ["row-1"]
    assert sample.without_line == 198


@pytest.mark.parametrize("text", ["1", "0%", "101%", "x%", "-1%", "nan%"])
def test_a_share_is_a_part(text):
    with pytest.raises(UsageError, match="give a share such as 1%"):
        sample_share(text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no success"),
        ("[1]", "out.jsonl:1: no line of results"),
        ("{", "out.jsonl:1: no JSON"),
        ('{"response": {"status_code": 200, "body": {}}}', "out.jsonl:1: .* no custom_id or body"),
    ],
)
def test_a_file_of_another_form_is_refused(content, message, tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text(content)
    with pytest.raises(UsageError, match=message):
        sample_rows(path, path, 1.0)
    with pytest.raises(UsageError, match="No such file"):
        sample_rows(tmp_path / "none.jsonl", path, 1.0)


@pytest.mark.parametrize(
    ("precision", "dtype", "cache"),
    [
        ("bf16+fp8-kv", "bf16", "fp8"),
        ("fp16+plan-1+fp8-kv", "fp16", "fp8"),
        ("fp8+fp8-kv", "fp8", "fp8"),
        ("fp8", "fp8", "auto"),
        ("fp32", "fp32", "auto"),
    ],
)
def test_a_sample_is_computed_as_its_precision_says(precision, dtype, cache, tmp_path, monkeypatch):
    """With its own dtype of keys and values, whatever this machine's settings say."""
    monkeypatch.setenv("NIGHTJAR_KV_CACHE_DTYPE", "fp8" if cache == "auto" else "auto")
    results = written(tmp_path / "o.jsonl", [answer(1, precision=precision)])
    requests = written(tmp_path / "i.jsonl", [{"custom_id": "row-1"}])
    asked = []

    def run(arguments, _):
        asked.append((arguments.dtype, os.environ["NIGHTJAR_KV_CACHE_DTYPE"]))
        shutil.copy(results, arguments.work.results)

    monkeypatch.setattr(recomputing, "run", run)
    found = recomputing.recompute(DEMO, sample_rows(results, requests, 1.0), lambda _: None)
    assert found.is_same
    assert asked == [(dtype, cache)] * 2


def test_rows_of_another_precision_and_of_vectors_are_left_out(files, tmp_path):
    rows = [answer(n) for n in range(6)] + [
        answer(6, precision="bf16"),
        answer(7, precision="fake"),
    ]
    lines = [{"custom_id": f"row-{n}"} for n in range(8)]
    lines[0]["body"] = {"adapter": "polite"}
    files = written(tmp_path / "o.jsonl", rows), written(tmp_path / "i.jsonl", lines)
    kept, precision, left_out = comparable(sample_rows(*files, 1.0))
    assert precision == "fp32"
    assert {row.custom_id for row in kept} == {f"row-{n}" for n in range(1, 6)}
    assert left_out == {
        "they name prompt vectors or an adapter": 1,
        "they name no precision that can be computed": 1,
        "their precision is not fp32": 1,
    }


def ranking(*scores):
    return {"results": [{"index": i, "mean_nll": score} for i, score in enumerate(scores)]}


def test_what_differs_is_named(files):
    rows = sample_rows(*files, 0.02).rows
    same = {row.custom_id: row.body | {"id": "other", "created": 3, "usage": {}} for row in rows}
    assert compare(rows, same, same) == ()
    first = rows[0].custom_id
    other = same | {first: rows[0].body | {"choices": [], "recomputed_in": "fp32"}}
    assert compare(rows, same, other) == (Difference(first, (), ("choices", "recomputed_in")),)
    without = {id_: body for id_, body in same.items() if id_ != first}
    assert compare(rows, without, same) == (Difference(first, ("no answer",), ()),)


def test_scores_that_differ_are_told_with_their_distance(tmp_path):
    rows = [answer(0, **ranking(1.0, 2.0))]
    files = (
        written(tmp_path / "o.jsonl", rows),
        written(tmp_path / "i.jsonl", [{"custom_id": "row-0"}]),
    )
    sample = sample_rows(*files, 1.0).rows
    body = sample[0].body
    found = compare(sample, {"row-0": body}, {"row-0": body | ranking(1.0, 2.25)})
    assert found == (Difference("row-0", (), ("results (scores by 0.25)",)),)
    found = compare(sample, {"row-0": body | ranking(1.0)}, {"row-0": body})
    assert found == (Difference("row-0", ("results (other documents)",), ()),)


def test_the_report_is_read_by_people():
    differences = tuple(Difference(f"r{n}", ("choices",), ()) for n in range(22))
    report = Recomputed(900, 30, "fp32", {"why": 2}, 5, {"another model": 5}, differences)
    lines = report.lines()
    assert lines[0] == "30 of 900 rows were computed again in fp32, alone and in company"
    assert "2 rows were left out: why" in lines
    assert "5 receipts name another model" in lines
    assert "'r0' differs alone: choices" in lines
    assert lines[-2:] == ["2 more rows differ", "22 differ"]
    assert not report.as_json()["is_same"]
