"""The engine against transformers, in the storage formats of a GPU: see tests/gpu/subject.py."""

import pytest
import torch

from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.engine import GenerateRequest, RankRequest, SamplingParams
from tests.gpu.models import MODELS, save
from tests.gpu.subject import DTYPES, Subject, assert_greedy, assert_log_probabilities
from tests.models import SENTENCES

PLACES = [
    pytest.param(("cpu", "bf16"), id="cpu-bf16"),
    *(
        pytest.param(("cuda", precision), id=f"cuda-{precision}", marks=pytest.mark.gpu)
        for precision in DTYPES
    ),
]


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
    assert_log_probabilities(subject, prompts(subject), 10)


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
    """Prompts cut at 32 rows, five places."""
    assert_greedy(subject, prompts(subject), 6, max_step_tokens=32, max_running=5)
