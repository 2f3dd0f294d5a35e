"""LoRA adapters, many in one batch, against transformers with the factors merged in float64."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from nightjar.checkpoints import ModelDirectory
from nightjar.checkpoints.adapters import read_adapter
from nightjar.gpu_worker.engine import GenerateRequest, RankRequest, SamplingParams
from nightjar.gpu_worker.engine.executor import Executor
from nightjar.gpu_worker.models import load_model
from tests.adapters import linear_sizes, merge, save_adapter
from tests.engines import ids, run
from tests.families import CASES, save_family
from tests.models import Gpt2Shape, save_gpt2

MODULES = {
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "gpt_neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
}
LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
KINDS = ["gpt2", "polyglot", "neox, serial", "llama", "qwen3", "hyperclova x"]


class Adapted:
    """A model, four adapters of it, and transformers' model with each of them merged."""

    def __init__(self, kind, folder):
        if kind == "gpt2":
            path = save_gpt2(folder / "model", Gpt2Shape(n_embd=48, vocab_size=521), seed=5)
        else:
            path = save_family(folder / "model", CASES[kind], seed=5)
        self.directory = ModelDirectory.open(path)
        self.config = self.directory.config
        self.references = {None: self.reference(path)}
        every = MODULES.get(self.config.family, LLAMA)
        sizes = linear_sizes(self.references[None], every)
        few = {name: size for name, size in sizes.items() if name.endswith((every[0], "v_proj"))}
        last = {n: s for n, s in sizes.items() if f".{self.config.n_layers - 1}." in n}
        self.adapters = {
            "all": save_adapter(folder / "all", sizes, rank=4, seed=1, strength=0.5),
            "few": save_adapter(
                folder / "few", few, rank=16, seed=2, use_rslora=True, strength=0.2
            ),
            "last": save_adapter(folder / "last", last, rank=3, seed=3),
            "other": save_adapter(folder / "other", sizes, rank=2, seed=4, dtype=torch.bfloat16),
        }
        for name, adapter in self.adapters.items():
            self.references[name] = self.reference(path)
            merge(self.references[name], adapter)

    @staticmethod
    def reference(path):
        return AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float64, attn_implementation="eager"
        ).eval()

    def factors(self):
        return {
            name: {
                key: torch.from_numpy(one) for key, one in read_adapter(path, self.config).items()
            }
            for name, path in self.adapters.items()
        }

    @torch.no_grad()
    def log_probs(self, name, tokens):
        """The log-probabilities of the next token at every position: float64[n, V]."""
        return self.references[name](torch.tensor([tokens])).logits[0].log_softmax(-1)

    def run(self, requests, dtype="fp32", **config):
        model = load_model(self.directory, dtype)
        return run(
            model, self.directory.tokenizer().token_bytes, requests, self.factors(), **config
        )


@pytest.fixture(autouse=True)
def no_step_fails(monkeypatch):
    """A step that raises would be computed again request by request: the answers would be right."""

    def raised(self, plan, check_device):
        raise AssertionError("a step has failed")

    monkeypatch.setattr(Executor, "run_one_by_one", raised)


@pytest.fixture(scope="module", params=KINDS)
def adapted(request, tmp_path_factory):
    return Adapted(request.param, tmp_path_factory.mktemp("adapted"))


def requests():
    """Each adapter and none, for texts and for rankings; all begin with the same tokens."""
    shared, made = ids(20, 1), []
    params = SamplingParams(6, ignore_eos=True, logprobs=0)
    documents = [ids(1 + 4 * i, 50 + i) for i in range(4)]
    for number, name in enumerate((None, "all", "few", None, "last", "other", "all")):
        prompt = shared + ids(3 * number, number)
        made.append(GenerateRequest(number, prompt, params, adapter=name))
        made.append(RankRequest(10 + number, prompt[: 18 + number], documents, adapter=name))
    return made


def test_answers_are_those_of_merged_weights(adapted):
    asked = requests()
    results = adapted.run(asked)
    texts = set()
    for request in asked:
        result = results[request.request_id]
        if isinstance(request, GenerateRequest):
            (output,) = result.outputs
            texts.add((request.adapter, *output.token_ids))
            sequence = [*request.token_ids, *output.token_ids]
            expected = adapted.log_probs(request.adapter, sequence)[len(request.token_ids) - 1 : -1]
            assert output.token_ids == expected.argmax(-1).tolist()
            found = [step.chosen for step in output.logprobs]
            assert found == pytest.approx(expected.amax(-1).tolist(), abs=2e-4)
            continue
        for document, nll in zip(request.documents, result.mean_nll, strict=True):
            rows = adapted.log_probs(request.adapter, [*request.query_ids, *document])
            rows = rows[len(request.query_ids) - 1 : -1]
            expected_nll = -float(rows[range(len(document)), document].mean())
            assert nll == pytest.approx(expected_nll, abs=2e-4)
    # The adapters change the texts, or equal tokens would show nothing.
    assert len({tokens[1:] for tokens in texts}) > len(adapted.adapters)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["fp32", "int8", "fp16", "bf16"])
def test_no_bit_depends_on_company(adapted, dtype):
    """Not of an adapted answer, and not of one without an adapter, in every precision."""
    asked = requests()
    together = adapted.run(asked, dtype)
    assert adapted.run(asked[::-1], dtype, max_step_tokens=40, max_running=3) == together
    for request in asked[:8]:
        assert adapted.run([request], dtype)[request.request_id] == together[request.request_id]
    plain = [request for request in asked if request.adapter is None]
    apart = adapted.run(plain, dtype)
    assert all(apart[request.request_id] == together[request.request_id] for request in plain)
