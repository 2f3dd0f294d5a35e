"""`nightjar tune` as a command: it learns, writes PEFT's files and registers the vectors."""

import json
from pathlib import Path

import pytest

from nightjar.checkpoints import ModelDirectory
from nightjar.jobs.store import Store
from nightjar.pipeline.files.vectors import VectorsError, register_vectors
from tests.processes import nightjar, nightjar_here


def test_vectors_are_tuned_and_registered(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path}/night.db"
    monkeypatch.setenv("NIGHTJAR_DATABASE_URL", url)
    store = Store(url)
    store.migrate()
    rows = [{"query": f"word {n}", "documents": [" a", " b"], "best": n % 2} for n in range(20)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, [*rows, {"query": "x"}])), encoding="utf-8")
    out = tmp_path / "out"
    command = ["tune", str(tiny_model), str(path), "--out", str(out), "--vectors", "3"]
    done = nightjar(*command, "--epochs", "1", "--name", "tuned", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["registered"] == "tuned@1"
    assert (report["train_rows"], report["valid_rows"], report["numbers"]) == (18, 2, 96)
    assert "row 21: documents: expected" in done.stderr
    assert "1 rows cannot be used" in done.stderr
    model = ModelDirectory.open(tiny_model)
    found = store.vectors.get("tuned")
    assert found is not None
    assert (found.length, found.width, found.fingerprint) == (3, 32, model.fingerprint)

    config = json.loads((out / "adapter_config.json").read_text())
    (out / "adapter_config.json").write_text(json.dumps(config | {"peft_type": "IA3"}))
    with pytest.raises(VectorsError, match="'IA3'; use one of PROMPT_TUNING, P_TUNING, LORA"):
        register_vectors(store.vectors, "tuned", out, model)
    (out / "adapter_config.json").write_text(json.dumps(config))
    (out / "adapter_model.safetensors").rename(out / "adapter_model.bin")
    with pytest.raises(VectorsError, match="a pickle, which is never read"):
        register_vectors(store.vectors, "tuned", out, model)
    store.close()
    lstm = nightjar_here(*command, "--encoder", "lstm")
    assert lstm.returncode == 2
    assert "'lstm' is not one of 'none'," in lstm.stderr
    path.write_text('{"input": "a", "target": ""}')
    refused = nightjar(*command, "--overwrite")
    assert refused.returncode == 2
    assert "target: it is empty" in refused.stderr
