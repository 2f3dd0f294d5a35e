"""`nightjar verify --results`: answers of a run are computed again, and a changed one is found."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nightjar.checkpoints import ModelDirectory

DEMO = Path(__file__).parents[2] / "examples" / "demo_model"


def nightjar(*words):
    return subprocess.run(
        [sys.executable, "-m", "nightjar", *map(str, words)],
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )


def lines():
    made = [
        {"url": "/v1/completions", "body": {"prompt": f"사용자: {n}\n", "max_tokens": 6 + n % 5}}
        for n in range(12)
    ]
    for line in made[::2]:
        line["body"]["temperature"] = 0
    ranked = {"query": "리뷰: 재미있다", "documents": ["좋다", "나쁘다", "또 보고 싶다"]}
    made.append({"url": "/v1/rerank", "body": ranked})
    return [{"custom_id": f"row-{n}", "method": "POST"} | line for n, line in enumerate(made)]


@pytest.mark.slow
def test_answers_are_the_same_alone_and_in_company_and_a_changed_one_is_found(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines())))
    done = nightjar("run", source, "--model", DEMO, "--out", out, "--receipts", "--dtype", "fp32")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    receipts = [row["response"]["body"]["receipt"] for row in rows]
    assert {receipt["model"] for receipt in receipts} == {ModelDirectory.open(DEMO).fingerprint}
    assert sum("seed" in receipt for receipt in receipts) == 12
    again = ["verify", DEMO, "--results", out, "--requests", source, "--sample", "100%"]
    same = nightjar(*again, "--json")
    assert same.returncode == 0, same.stderr
    found = json.loads(same.stdout)
    assert (found["sampled"], found["receipts"], found["other_receipts"]) == (13, 13, {})
    rows[3]["response"]["body"]["choices"][0]["text"] += "!"
    out.write_text("\n".join(map(json.dumps, rows)))
    changed = nightjar(*again)
    assert changed.returncode == 3, changed.stderr
    assert f"'{rows[3]['custom_id']}' differs alone: choices; in company: choices" in changed.stdout
