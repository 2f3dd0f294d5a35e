"""The engine against transformers, in the storage formats of a GPU.

Oracle: transformers in FP64 over the weights as the format rounds them.  The measure of a right
answer is transformers in the same format on the same device: the engine, whose sums are FP32, may
not be further from the oracle than it is, save for what their roundings differ by.
"""

from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM

from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.engine import GenerateRequest, RankRequest, SamplingParams
from nightjar.gpu_worker.models import load_model
from tests.engines import run
from tests.gpu.models import MODELS, save
from tests.models import SENTENCES

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
EPSILON = {"fp32": 2.0**-23, "fp16": 2.0**-10, "bf16": 2.0**-7}
PLACES = [
    pytest.param(("cpu", "bf16"), id="cpu-bf16"),
    *(
        pytest.param(("cuda", precision), id=f"cuda-{precision}", marks=pytest.mark.gpu)
        for precision in DTYPES
    ),
]


@dataclass
class Subject:
    """One model: in the engine, in transformers beside it, and exact."""

    device: str
    precision: str
    directory: ModelDirectory

    def __post_init__(self):
        path, dtype = self.directory.path, DTYPES[self.precision]
        self.model = load_model(self.directory, self.precision, self.device)
        self.beside, self.exact = (
            AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval() for _ in range(2)
        )
        self.beside.to(self.device)
        self.exact.double()
        self.tokenizer = self.directory.tokenizer()

    def answers(self, requests, **config):
        return run(self.model, self.tokenizer.token_bytes, requests, **config)

    @torch.inference_mode()
    def log_probs(self, which, ids):
        """float64[n, V] of every next token."""
        logits = which(torch.tensor([ids], device=which.device)).logits[0]
        return logits.double().cpu().log_softmax(-1)

    def slack(self, log_probs):
        """What two roundings of the same sum differ by."""
        return 4 * EPSILON[self.precision] * float(log_probs.abs().max())


@pytest.fixture(scope="module", params=MODELS)
def directory(request, tmp_path_factory):
    return ModelDirectory.open(
        save(tmp_path_factory.mktemp("models") / "model", MODELS[request.param])
    )


@pytest.fixture(scope="module", params=PLACES)
def subject(request, directory):
    return Subject(*request.param, directory)


def prompts(subject):
    encoded = subject.tokenizer.encode_batch(SENTENCES)
    return [ids[: 1 + (17 * i) % 60] for i, ids in enumerate(encoded)]


def test_greedy_texts_and_log_probabilities(subject):
    """Every token is the best one of the oracle, or within a rounding of it; together and with its
    log-probabilities as near as those of transformers."""
    params = SamplingParams(10, ignore_eos=True, logprobs=5)
    given = prompts(subject)
    found = subject.answers([GenerateRequest(i, p, params) for i, p in enumerate(given)])
    ours, theirs, slack = [], [], 0.0
    for i, prompt in enumerate(given):
        output = found[i].outputs[0]
        ids = [*prompt, *output.token_ids]
        places = slice(len(prompt) - 1, len(ids) - 1)
        exact = subject.log_probs(subject.exact, ids)[places]
        beside = subject.log_probs(subject.beside, ids)[places]
        slack = max(slack, subject.slack(exact))
        for row, said in enumerate(output.logprobs):
            best = int(output.token_ids[row])
            assert exact[row].max() - exact[row, best] <= 2 * slack
            tokens = torch.tensor([token for token, _ in said.top])
            values = torch.tensor([value for _, value in said.top], dtype=torch.float64)
            ours.append((values - exact[row, tokens]).abs())
            theirs.append((beside[row, tokens] - exact[row, tokens]).abs())
    assert len(ours) == 10 * len(given)
    assert torch.cat(ours).mean() <= 1.5 * torch.cat(theirs).mean() + slack / 16
    assert torch.cat(ours).max() <= 2 * torch.cat(theirs).max() + slack


def test_the_texts_depend_on_their_prompts(subject):
    """Or equal tokens would show nothing."""
    params = SamplingParams(10, ignore_eos=True)
    given = prompts(subject)
    found = subject.answers([GenerateRequest(i, p, params) for i, p in enumerate(given)])
    assert len({tuple(found[i].token_ids) for i in range(len(given))}) > len(given) // 2


def test_scores_of_documents(subject):
    query, *documents = prompts(subject)
    documents = [document[:30] for document in documents if document]
    found = subject.answers([RankRequest(0, query, documents)])[0].mean_nll
    errors = []
    for which in (subject.exact, subject.beside):
        scores = []
        for document in documents:
            log_probs = subject.log_probs(which, [*query, *document])
            rows = torch.arange(len(document)) + len(query) - 1
            scores.append(-float(log_probs[rows, torch.tensor(document)].mean()))
        errors.append(torch.tensor(found, dtype=torch.float64) - torch.tensor(scores).double())
    exact, beside = errors
    theirs = (exact - beside).abs()
    scale = subject.slack(torch.tensor(found))
    assert exact.abs().max() <= 2 * theirs.max() + scale


def test_a_prompt_in_pieces_and_many_texts_at_once(subject):
    """The same tokens, or within a rounding of the best: prompts cut at 32 rows, five places."""
    params = SamplingParams(6, ignore_eos=True)
    given = prompts(subject)
    requests = [GenerateRequest(i, p, params) for i, p in enumerate(given)]
    found = subject.answers(requests, max_step_tokens=32, max_running=5)
    for i, prompt in enumerate(given):
        ids = [*prompt, *found[i].token_ids]
        exact = subject.log_probs(subject.exact, ids)[len(prompt) - 1 : -1]
        behind = (
            exact.max(-1).values - exact.gather(1, torch.tensor(ids[len(prompt) :])[:, None])[:, 0]
        )
        assert behind.max() <= 2 * subject.slack(exact)
