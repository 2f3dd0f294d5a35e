"""`nightjar verify --logits`: the source framework's logits beside the model's, and the page."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nightjar.checkpoints import ModelDirectory
from nightjar.checkpoints.precision_plan import LayerPlan, PrecisionPlan
from nightjar.gpu_worker.models import load_model
from nightjar.gpu_worker.verify.agreement import Agreement
from nightjar.gpu_worker.verify.couplings import Coupling
from nightjar.gpu_worker.verify.losses import Losses
from nightjar.gpu_worker.verify.peaks import Peak
from nightjar.gpu_worker.verify.report import Finding, Report, judge_logits
from nightjar.gpu_worker.verify.source_logits import compare_logits, read_source_logits
from nightjar.jobs.report.model_page import render_model_page
from tests.source_logits import DEMO, demo_outputs, saved


@pytest.fixture(scope="module", name="source")
def source_outputs():
    return demo_outputs()


def changed_model(folder, change):
    shutil.copytree(DEMO, folder)
    weights = load_file(DEMO / "model.safetensors")
    change(weights)
    saved(weights, folder / "model.safetensors")
    return folder


def compared(model, path):
    directory = ModelDirectory.open(model)
    source = read_source_logits(path, directory.config)
    return compare_logits(load_model(directory, "fp32"), source)


def heads_of_keys(weights):
    """In layer 1 the keys of two heads change places."""
    rows = list(weights["transformer.h.1.attn.c_attn.weight"].chunk(9, dim=1))
    rows[3], rows[4] = rows[4], rows[3]
    weights["transformer.h.1.attn.c_attn.weight"] = torch.cat(rows, 1)


def inputs_of_down(weights):
    weights["transformer.h.2.mlp.c_proj.weight"] = weights[
        "transformer.h.2.mlp.c_proj.weight"
    ].flip(0)


def test_logits_of_another_framework_agree(source, tmp_path):
    found = compared(DEMO, saved(source, tmp_path / "source.safetensors"))
    assert found.difference < 1e-4
    assert found.greedy == 1.0
    assert judge_logits(found).verdict == "ok"
    lengths = (source["token_ids"] >= 0).sum()
    assert found.positions == int(lengths)


def test_logits_of_half_precision_agree(source, tmp_path):
    half = {"token_ids": source["token_ids"].int(), "logits": source["logits"].bfloat16()}
    assert judge_logits(compared(DEMO, saved(half, tmp_path / "half.safetensors"))).verdict == "ok"


@pytest.mark.parametrize(("change", "layer"), [(heads_of_keys, 1), (inputs_of_down, 2)])
def test_the_layer_where_they_begin_to_differ_is_named(change, layer, source, tmp_path):
    model = changed_model(tmp_path / "model", change)
    found = compared(model, saved(source, tmp_path / "source.safetensors"))
    assert found.stage == f"layer {layer}"
    finding = judge_logits(found)
    assert finding.verdict == "failure"
    assert f"hidden states that differ are those of layer {layer}" in finding.text


def test_without_hidden_states_the_position_tells(source, tmp_path):
    """One token alone attends only to itself: wrong keys change nothing there."""
    path = tmp_path / "source.npz"
    np.savez(path, token_ids=source["token_ids"].numpy(), logits=source["logits"].numpy())
    keys = judge_logits(compared(changed_model(tmp_path / "keys", heads_of_keys), path))
    assert "look at queries, keys and positions" in keys.text
    down = judge_logits(compared(changed_model(tmp_path / "down", inputs_of_down), path))
    assert "from text 0, token 0 on; the first token differs" in down.text


class Marked:
    """Its pickle would create a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def broken_files(source, tmp_path):
    ids, logits = source["token_ids"], source["logits"]
    mark = tmp_path / "mark"
    np.savez(tmp_path / "pickle.npz", token_ids=np.array([Marked(mark)], dtype=object), logits=[1])
    (tmp_path / "text.npz").write_bytes(b"no archive")
    (tmp_path / "text.safetensors").write_bytes(b"no tensors")
    return [
        (tmp_path / "pickle.npz", "cannot be read as logits"),
        (tmp_path / "text.npz", "cannot be read as logits"),
        (tmp_path / "text.safetensors", "cannot be read as logits"),
        (tmp_path / "missing.safetensors", "cannot be read as logits"),
        (saved({"logits": logits}, tmp_path / "a.safetensors"), "no tensor 'token_ids'"),
        (
            saved({"token_ids": ids, "logits": logits[:, :, :5]}, tmp_path / "b.safetensors"),
            "logits of 5 tokens; the model has",
        ),
        (
            saved({"token_ids": ids + 90_000, "logits": logits}, tmp_path / "c.safetensors"),
            "ids from 0 to",
        ),
        (
            saved({"token_ids": ids.float(), "logits": logits}, tmp_path / "d.safetensors"),
            "token_ids must be integers",
        ),
        (
            saved({"token_ids": ids[:1], "logits": logits}, tmp_path / "e.safetensors"),
            "expected [texts, tokens, vocabulary]",
        ),
        (
            saved({**source, "hidden_states": logits.clone()}, tmp_path / "f.safetensors"),
            "hidden_states",
        ),
    ]


def test_files_that_do_not_fit_are_refused(source, tmp_path):
    config = ModelDirectory.open(DEMO).config
    for path, message in broken_files(source, tmp_path):
        with pytest.raises(ValueError, match=path.name) as refused:
            read_source_logits(path, config)
        assert message in str(refused.value)
    assert not (tmp_path / "mark").exists()


def test_the_page_shows_findings_and_no_markup_of_others():
    losses = Losses(2.0, 5.0, 6.0, (2.5, 2.25), 100)
    report = Report(
        model="models/<b>x</b>",
        fingerprint="f" * 64,
        findings=(Finding("loss", "ok", "as it <i>should</i> be"), Finding("fp16", "warning", "1")),
        losses=losses,
        couplings=(Coupling(0, "query-key", (9.0, 4.5)), Coupling(1, "query-key", (8.0, 7.0))),
        peaks=(Peak(0, "up", 12.0), Peak(1, "down", 99_000.0)),
        agreements=(Agreement("bf16", 1.0, 0.75, 1.0, 0.01, 0),),
        plan=PrecisionPlan("f" * 64, {1: LayerPlan(up=True)}),
    )
    page = render_model_page(report.as_json())
    assert 'class="state good">sound' in page
    assert "f" * 64 in page
    assert "<b>1</b><span>warnings</span>" in page
    assert "layer 1: 9.9e+04" in page
    assert "75%" in page
    assert "<script" not in page
    assert "<b>x" not in page
    assert "<i>should" not in page
    failed = replace(report, findings=(Finding("loss", "failure", "too large"),))
    assert "do not serve it" in render_model_page(failed.as_json())


@pytest.mark.slow
def test_the_command_writes_the_page(source, tmp_path):
    path = saved(source, tmp_path / "source.safetensors")
    page = tmp_path / "verify.html"
    words = ["verify", DEMO, "--precisions", "", "--logits", path, "--report", page, "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "nightjar", *map(str, words)],
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["logits"]["text"] is None
    html = page.read_text()
    assert "<script" not in html
    assert found["fingerprint"] in html
    assert "checks passed" in html
    assert 'class="state good">sound' in html
