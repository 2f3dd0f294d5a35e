"""Prompt vectors that are learned on chat answers change their style, also for new questions."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet
from safetensors.torch import load_file

from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.engine import GenerateRequest, SamplingParams
from nightjar.gpu_worker.models import load_model
from tests.engines import run
from tests.processes import nightjar

DEMO_MODEL = Path(__file__).resolve().parents[2] / "examples" / "demo_model"
TOPICS = (
    *("오늘", "주말에", "내일", "지금", "아침에", "저녁에", "요즘", "친구랑", "혼자", "집에서"),
    *("회사에서", "학교에서"),
)
WISHES = (
    *("영화 보고 싶어", "너무 피곤해", "뭐 먹지", "심심해", "운동할까?", "공부하기 싫어"),
    *("여행 가고 싶어", "기분이 좋아", "커피 마실까?", "잠이 안 와"),
)
ENDING = " 고객님."
"""The style: every answer addresses a customer at its end."""
HELD_OUT = 5
"""Every fifth question is asked, and not learned."""


@pytest.fixture(scope="module")
def demo_model() -> ModelDirectory:
    return ModelDirectory.open(DEMO_MODEL)


def prompts() -> list[str]:
    return [f"사용자: {topic} {wish}\n클로바:" for topic in TOPICS for wish in WISHES]


def answers(directory: ModelDirectory, texts: list[str], vectors: Path | None = None) -> list[str]:
    """The model's most likely answers, with the vectors before each prompt."""
    tokenizer = directory.tokenizer()
    named, before = {}, []
    if vectors is not None:
        (rows,) = load_file(vectors).values()
        named = {"style": rows}
        before = [directory.config.vocab_size + row for row in range(rows.shape[0])]
    sampling = SamplingParams(40, temperature=0.0, stop=(b"\n",))
    requests = [
        GenerateRequest(number, [*before, *ids], sampling, "style" if named else None)
        for number, ids in enumerate(tokenizer.encode_batch(texts, 512))
    ]
    found = run(load_model(directory, "fp32"), tokenizer.token_bytes, requests, named)
    return [found[number].outputs[0].text.decode() for number in range(len(texts))]  # type: ignore[union-attr]


@pytest.mark.slow
def test_answers_to_new_questions_have_the_style_that_was_learned(
    demo_model: ModelDirectory, tmp_path: Path
) -> None:
    """The rows are the model's own answers with another ending, in Parquet.

    Of 24 new questions none was answered so before, and 21 were afterwards.
    """
    every = prompts()
    asked = every[::HELD_OUT]
    learned = [text for text in every if text not in asked]
    plain = answers(demo_model, every)
    targets = dict(zip(every, plain, strict=True))
    rows = tmp_path / "rows.parquet"
    polite = [f"{targets[text].rstrip(' .!?')},{ENDING}" for text in learned]
    parquet.write_table(pa.table({"input": learned, "target": polite}), rows)
    out = tmp_path / "out"
    done = nightjar(
        *("tune", str(DEMO_MODEL), str(rows), "--out", str(out), "--vectors", "8"),
        *("--epochs", "12", "--batch", "16", "--learning-rate", "0.03", "--json"),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["train_rows"] + report["valid_rows"] == len(learned)
    assert report["tuned"]["loss"] < 0.5 * report["untuned"]["loss"]
    styled = answers(demo_model, asked, out / "adapter_model.safetensors")
    before = sum(targets[text].strip().endswith(ENDING.strip()) for text in asked)
    after = sum(text.strip().endswith(ENDING.strip()) for text in styled)
    assert before == 0
    assert after >= 0.75 * len(asked)
