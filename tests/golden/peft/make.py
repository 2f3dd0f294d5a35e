"""Makes this folder's adapters of the demo model with PEFT, and the scores that PEFT computes.

`python tests/golden/peft/make.py`, from the repository's root, where peft 0.21.2, transformers
5.23.0 and torch 2.13.0 are installed. Nothing of Nightjar is imported: PEFT is the reference.

`python tests/golden/peft/make.py DIR` prints the scores with the adapter in DIR instead.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from peft import (
    LoraConfig,
    PeftModel,
    PromptEncoderConfig,
    PromptTuningConfig,
    TaskType,
    get_peft_model,
)
from torch.nn import functional as F
from transformers import AutoTokenizer, GPT2LMHeadModel

HERE = Path("tests/golden/peft")
MODEL = "examples/demo_model"
QUERY = "리뷰: 배우들 연기가 정말 좋고 끝까지 눈을 뗄 수 없었다\n평가:"
DOCUMENTS = [" 재미있다", " 재미없다", " 된장찌개야"]


def base() -> Any:
    """The demo model, computed in FP32."""
    return GPT2LMHeadModel.from_pretrained(MODEL, dtype=torch.float32).eval()


@torch.no_grad()
def scores(model: Any) -> list[float]:
    """The mean negative log-likelihood of each document's tokens after the query."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    query = tokenizer.encode(QUERY)
    found = []
    for text in DOCUMENTS:
        document = tokenizer.encode(text)
        logits = model(torch.tensor([query + document])).logits[0]
        before = logits[-len(document) - 1 : -1].double()
        found.append(float(F.cross_entropy(before, torch.tensor(document))))
    return found


def main() -> None:
    """Make all adapters again, or score with one."""
    if len(sys.argv) > 1:
        json.dump(scores(PeftModel.from_pretrained(base(), sys.argv[1]).eval()), sys.stdout)
        return
    shared: dict[str, Any] = {"task_type": TaskType.CAUSAL_LM}
    prompt = shared | {"num_virtual_tokens": 6}
    configs = {
        "prompt-tuning": PromptTuningConfig(**prompt),
        "p-tuning-mlp": PromptEncoderConfig(
            **prompt, encoder_hidden_size=16, encoder_reparameterization_type="MLP"
        ),
        "p-tuning-lstm": PromptEncoderConfig(
            **prompt, encoder_hidden_size=16, encoder_reparameterization_type="LSTM"
        ),
        "lora": LoraConfig(
            **shared,
            r=2,
            lora_alpha=6,
            target_modules=["c_attn", "c_fc"],
            init_lora_weights=False,
            fan_in_fan_out=True,
        ),
    }
    expected = {"without": scores(base())}
    for name, config in configs.items():
        torch.manual_seed(7)
        model = get_peft_model(base(), config).eval()
        shutil.rmtree(HERE / name, ignore_errors=True)
        model.save_pretrained(HERE / name)
        (HERE / name / "README.md").unlink(missing_ok=True)  # a model card without content
        expected[name] = scores(PeftModel.from_pretrained(base(), str(HERE / name)).eval())
    about = {"query": QUERY, "documents": DOCUMENTS, "mean_nll": expected}
    text = json.dumps(about, indent=2, ensure_ascii=False) + "\n"
    (HERE / "expected.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
