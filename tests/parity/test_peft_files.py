"""Files that PEFT itself wrote score as PEFT computed; `tests/golden/peft/make.py` made both."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load

from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.engine import Engine, EngineConfig, RankRequest
from nightjar.gpu_worker.models import load_model
from nightjar.jobs.store import Store
from nightjar.pipeline.files.vectors import VectorsError, register_vectors
from tests.engines import drain

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "tests" / "golden" / "peft"
EXPECTED = json.loads((FILES / "expected.json").read_text(encoding="utf-8"))
VECTORS = ["prompt-tuning", "p-tuning-mlp", "p-tuning-lstm"]


@pytest.fixture(scope="module")
def demo_model() -> ModelDirectory:
    return ModelDirectory.open(ROOT / "examples" / "demo_model")


@pytest.fixture(scope="module")
def engine(demo_model: ModelDirectory) -> Engine:
    return Engine(
        load_model(demo_model, "fp32"), demo_model.tokenizer().token_bytes, EngineConfig()
    )


def registered(name: str, model: ModelDirectory, folder: Path) -> bytes:
    """What a worker gets from the database after `nightjar vectors add`."""
    store = Store(f"sqlite:///{folder}/night.db")
    store.migrate()
    key = register_vectors(store.vectors, name, FILES / name, model).key
    data = store.vectors.data([key])[key].data
    store.close()
    return data


@pytest.mark.parametrize("name", ["without", *VECTORS, "lora"])
def test_scores_are_those_of_peft(
    name: str, demo_model: ModelDirectory, engine: Engine, tmp_path: Path
) -> None:
    tokenizer = demo_model.tokenizer()
    query, *documents = tokenizer.encode_batch([EXPECTED["query"], *EXPECTED["documents"]], 512)
    before: list[int] = []
    used: dict[str, str] = {}
    if name in VECTORS:
        (vectors,) = load(registered(name, demo_model, tmp_path)).values()
        engine.register_prompt_vectors(name, vectors)
        before = [demo_model.config.vocab_size + row for row in range(vectors.shape[0])]
        used = {"prompt_vectors": name}
    elif name == "lora":
        engine.register_adapter(name, load(registered(name, demo_model, tmp_path)))
        used = {"adapter": name}
    found = drain(engine, RankRequest(0, [*before, *query], documents, **used))[0]
    assert found.mean_nll == pytest.approx(EXPECTED["mean_nll"][name], rel=2e-5, abs=2e-5)  # type: ignore[union-attr]


def test_they_differ_from_each_other() -> None:
    assert len({tuple(one) for one in EXPECTED["mean_nll"].values()}) == 5


def test_another_kind_of_prompt_is_refused_by_name(
    demo_model: ModelDirectory, tmp_path: Path
) -> None:
    """Prefix tuning puts keys and values into every layer."""
    about = json.loads((FILES / "p-tuning-lstm" / "adapter_config.json").read_text())
    about["peft_type"] = "PREFIX_TUNING"
    (tmp_path / "adapter_config.json").write_text(json.dumps(about))
    store = Store(f"sqlite:///{tmp_path}/night.db")
    store.migrate()
    with pytest.raises(VectorsError, match="'PREFIX_TUNING'; use one of PROMPT_TUNING, P_TUNING"):
        register_vectors(store.vectors, "prefix", tmp_path, demo_model)
    store.close()
