"""Prompt tuning: gradients as transformers has them, training that resumes, bad rows."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.engine import Engine, EngineConfig, RankRequest
from nightjar.gpu_worker.models import load_model
from nightjar.gpu_worker.tuning import training
from nightjar.gpu_worker.tuning.__main__ import tune
from nightjar.gpu_worker.tuning.frozen_model import FrozenModel
from nightjar.gpu_worker.tuning.losses import measure, sequence_nll
from nightjar.gpu_worker.tuning.options import TuneError, TuneOptions
from nightjar.gpu_worker.tuning.rows import VECTOR, Sequence, check_classes, read_rows
from tests.engines import VOCAB, drain, ids
from tests.families import CASES, save_family

ANIMALS = [("owl", " hoots"), ("cat", " purrs"), ("dog", " barks")]


@pytest.mark.parametrize("case", sorted(CASES))
def test_scores_and_gradients_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    path = save_family(tmp_path / "m", CASES[case])
    directory = ModelDirectory.open(path)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = FrozenModel(directory)
    rows = model.embed(torch.tensor([ids(11, 1), ids(11, 2)]))
    given, expected = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    scores = model.logits(model.hidden(given).flatten(0, 1))
    wanted = reference(inputs_embeds=expected).logits.flatten(0, 1)
    torch.testing.assert_close(scores, wanted, rtol=2e-4, atol=2e-5)
    for one in (scores, wanted):
        torch.autograd.backward(one.log_softmax(-1)[:, 7].sum())
    assert expected.grad is not None
    largest = float(expected.grad.abs().max())
    torch.testing.assert_close(given.grad, expected.grad, rtol=1e-3, atol=1e-4 * largest)
    assert model.parameters == sum(one.numel() for one in reference.parameters())


def test_the_loss_is_what_the_engine_scores(tiny_model: Path) -> None:
    directory = ModelDirectory.open(tiny_model)
    vectors = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    query, documents = [4, *[VECTOR] * 3, 9, 10], [ids(6, 1), ids(2, 2)]
    sequences = [Sequence([*query, *one], len(query)) for one in documents]
    found = sequence_nll(FrozenModel(directory), vectors, sequences)
    engine = Engine(
        load_model(directory, "fp32"), directory.tokenizer().token_bytes, EngineConfig()
    )
    engine.register_prompt_vectors("v", vectors)
    numbered = [4, VOCAB, VOCAB + 1, VOCAB + 2, 9, 10]
    (result,) = drain(engine, RankRequest(0, numbered, documents, "v")).values()
    means = [float(total) / len(one) for total, one in zip(found, documents, strict=True)]
    assert means == pytest.approx(result.mean_nll, rel=1e-4)  # type: ignore[union-attr]


def test_bf16_is_near_fp32(tiny_model: Path) -> None:
    directory = ModelDirectory.open(tiny_model)
    sequences = [Sequence(ids(30, 3), 5)]
    exact = sequence_nll(FrozenModel(directory), None, sequences)
    rounded = sequence_nll(FrozenModel(directory, torch.bfloat16), None, sequences)
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, exact, rtol=2e-2, atol=0)


def targets(path: Path, count: int = 30) -> Path:
    rows = [ANIMALS[n % 3] for n in range(count)]
    lines = [json.dumps({"input": f"The {a}", "target": b}) for a, b in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def rankings(path: Path, count: int = 30) -> Path:
    documents = [b for _, b in ANIMALS]
    rows = [
        {"query": f"The {ANIMALS[n % 3][0]}", "documents": documents, "best": n % 3}
        for n in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


@pytest.mark.parametrize("encoder", ["none", "mlp"])
def test_vectors_are_learned_and_written_as_peft_does(
    tiny_model: Path, tmp_path: Path, encoder: Literal["none", "mlp"]
) -> None:
    options = TuneOptions(vectors=4, epochs=3, batch=8, learning_rate=0.05, encoder=encoder)
    report = tune(tiny_model, rankings(tmp_path / "r.jsonl"), None, tmp_path / "out", options)
    assert report["tuned"]["loss"] < report["untuned"]["loss"]
    assert [record["epoch"] for record in report["history"]] == [1, 2, 3]
    assert (report["train_rows"], report["valid_rows"]) == (27, 3)
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {name: list(one.shape) for name, one in written.items()} == {
        "prompt_embeddings": [4, 32]
    }
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    kind = "PROMPT_TUNING" if encoder == "none" else "P_TUNING"
    assert (config["peft_type"], config["num_virtual_tokens"]) == (kind, 4)
    model = FrozenModel(ModelDirectory.open(tiny_model))
    rows = read_rows(tmp_path / "r.jsonl", ModelDirectory.open(tiny_model), 4).examples
    found = measure(model, written["prompt_embeddings"], rows, 8)
    assert found.loss < measure(model, None, rows, 8).loss
    assert "polyline" in (tmp_path / "out" / "loss.svg").read_text()


def test_rows_in_parquet_are_learned_as_those_in_lines(tiny_model: Path, tmp_path: Path) -> None:
    lines = rankings(tmp_path / "r.jsonl")
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "r.parquet", row_group_size=7)
    options = TuneOptions(vectors=2, epochs=1, batch=8)
    learned = []
    for file in (lines, tmp_path / "r.parquet"):
        tune(tiny_model, file, None, tmp_path / file.suffix, options)
        learned.append(load_file(tmp_path / file.suffix / "adapter_model.safetensors"))
    assert torch.equal(*(one["prompt_embeddings"] for one in learned))


def test_a_run_that_was_killed_ends_as_if_it_was_not(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = targets(tmp_path / "t.jsonl")
    options = TuneOptions(
        vectors=2, epochs=2, batch=4, accumulate=2, encoder="mlp", checkpoint_steps=1
    )
    made, passes = training.batch_loss, 0

    def counted(*arguments: Any, ends_after: int | None = None) -> Any:
        nonlocal passes
        passes += 1
        if passes == ends_after:
            raise KeyboardInterrupt
        return made(*arguments)

    monkeypatch.setattr(training, "batch_loss", counted)
    whole = tune(tiny_model, rows, None, tmp_path / "whole", options)
    in_second_epoch, passes = passes // 2 + 3, 0
    with monkeypatch.context() as patch:
        patch.setattr(training, "batch_loss", partial(counted, ends_after=in_second_epoch))
        with pytest.raises(KeyboardInterrupt):
            tune(tiny_model, rows, None, tmp_path / "parts", options)
    parts = tune(tiny_model, rows, None, tmp_path / "parts", options)
    assert parts == whole
    first, second = (
        load_file(tmp_path / run / "adapter_model.safetensors")["prompt_embeddings"]
        for run in ("whole", "parts")
    )
    assert torch.equal(first, second)
    with pytest.raises(TuneError, match="begun with other options"):
        tune(tiny_model, rows, None, tmp_path / "parts", TuneOptions(vectors=2, epochs=2))
    (tmp_path / "parts" / "checkpoint.safetensors").write_bytes(b"cut")
    with pytest.raises(TuneError, match="damaged"):
        tune(tiny_model, rows, None, tmp_path / "parts", options)


def test_a_group_of_passes_is_one_update(tiny_model: Path, tmp_path: Path) -> None:
    rows = targets(tmp_path / "t.jsonl")
    small = TuneOptions(vectors=2, epochs=1, batch=2, accumulate=4)
    large = TuneOptions(vectors=2, epochs=1, batch=8)
    losses = [
        tune(tiny_model, rows, None, tmp_path / str(number), one)["history"][0]["valid_loss"]
        for number, one in enumerate((small, large))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_training_stops_where_the_held_out_loss_gets_no_better(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The held-out rows contradict those that are learned."""
    train, valid = rankings(tmp_path / "t.jsonl"), rankings(tmp_path / "v.jsonl", 6)
    rows = [json.loads(line) for line in valid.read_text().splitlines()]
    contrary = [row | {"best": (row["best"] + 1) % 3} for row in rows]
    valid.write_text("\n".join(map(json.dumps, contrary)))
    options = TuneOptions(vectors=4, epochs=50, batch=16, learning_rate=0.1, patience=2)
    report = tune(tiny_model, train, valid, tmp_path / "out", options)
    losses = [record["valid_loss"] for record in report["history"]]
    assert len(losses) < 50
    assert losses.index(min(losses)) == len(losses) - 3
    assert report["tuned"]["loss"] == pytest.approx(min(losses), rel=1e-6)


def test_rows_that_cannot_be_used_are_told_and_left_out(tiny_model: Path, tmp_path: Path) -> None:
    directory = ModelDirectory.open(tiny_model)
    good = {"input": "a <|PROMPT|> b", "target": "c"}
    bad = [
        ('{"input": "a"', "no JSON"),
        ("3", "expected an object"),
        ('{"input": "a"}', "target: expected a text"),
        ('{"input": "a", "target": "  "}', "target: it is empty"),
        (json.dumps({"input": "word " * 300, "target": "b"}), "context is"),
        (json.dumps({"input": "<|PROMPT|><|PROMPT|>", "target": "b"}), "write it once"),
        ('{"query": "a", "documents": ["b"], "best": 0}', "a list of 2"),
        ('{"query": "a", "documents": ["b", ""], "best": 0}', "not empty"),
        ('{"query": "a", "documents": ["b", "c"], "best": 2}', "0 to 1"),
        ('{"query": "a", "documents": ["b", "c"], "best": true}', "0 to 1"),
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([json.dumps(good), *(line for line, _ in bad)]), encoding="utf-8")
    found = read_rows(path, directory, 3)
    (example,) = found.examples
    (sequence,) = example.sequences
    assert sequence.ids.count(VECTOR) == 3
    assert sequence.ids[0] != VECTOR != sequence.ids[-1]
    assert sequence.ids[-1] == directory.config.eos_token_ids[0]
    assert found.bad == len(bad)
    for number, (told, (_, words)) in enumerate(zip(found.told, bad, strict=True), 2):
        assert f"row {number}: " in told
        assert words in told
    with pytest.raises(TuneError, match="all 1 rows have the same target"):
        check_classes(found.examples)


def test_files_that_cannot_be_used(tiny_model: Path, tmp_path: Path) -> None:
    directory = ModelDirectory.open(tiny_model)
    (tmp_path / "empty.jsonl").write_text("\n")
    mixed = rankings(tmp_path / "mixed.jsonl", 1)
    mixed.write_text(mixed.read_text() + '\n{"input": "a", "target": "b"}')
    (tmp_path / "cut.parquet").write_bytes(b"PAR1")
    for name, words in [
        ("absent.jsonl", "cannot be read"),
        ("empty.jsonl", "no row can be used"),
        ("mixed.jsonl", "mixed"),
        ("cut.parquet", "Parquet"),
    ]:
        with pytest.raises(TuneError, match=words):
            read_rows(tmp_path / name, directory, 2)
    with pytest.raises(TuneError, match="would be held out"):
        tune(tiny_model, targets(tmp_path / "t", 3), None, tmp_path / "out", TuneOptions())
