"""The demo model of this repository against transformers."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from nightjar.gpu_worker.engine import GenerateRequest, RankRequest, SamplingParams
from tests.models import SENTENCES
from tests.parity.oracle import Pair

DEMO = Path('/tmp/demo/pilot1')

CHATS = [
    "사용자: 안녕? 오늘 기분이 어때?\n클로바:",
    "사용자: 배고파\n클로바:",
    "사용자: 요즘 잠이 안 와서 힘들어\n클로바:",
    "사용자: 주말에 뭐 하지?\n클로바:",
]
REVIEW = "리뷰: 배우들 연기가 좋고 이야기가 탄탄하다\n평가:"
VERDICTS = [" 재미있다", " 재미없다"]


@pytest.fixture(scope="module")
def pair():
    return Pair(DEMO)


def test_greedy_tokens_and_logits(pair):
    prompts = [pair.tokenizer.encode(text) for text in CHATS]
    alone = [pair.check_greedy(prompt, 32) for prompt in prompts]
    params = SamplingParams(32, ignore_eos=True)
    results = pair.run([GenerateRequest(i, p, params) for i, p in enumerate(prompts)])
    assert [results[i].token_ids for i in range(len(prompts))] == alone


def test_rank_scores(pair):
    query = pair.tokenizer.encode(REVIEW)
    documents = pair.tokenizer.encode_batch([*VERDICTS, *CHATS])
    expected = [pair.nll(query, document) for document in documents]
    scores = pair.run([RankRequest(0, query, documents)])[0].mean_nll
    assert scores == pytest.approx(expected, abs=1e-4)


def test_tokenizer_equals_auto_tokenizer(pair):
    reference = AutoTokenizer.from_pretrained(DEMO)
    for text in [*SENTENCES, *CHATS, REVIEW]:
        assert pair.tokenizer.encode(text) == reference(text, add_special_tokens=False).input_ids


def test_a_stop_ends_the_answer(pair):
    stop = "\n사용자:".encode()
    params = SamplingParams(60, stop=(stop,))
    requests = [
        GenerateRequest(i, pair.tokenizer.encode(text), params) for i, text in enumerate(CHATS)
    ]
    results = pair.run(requests)
    assert all(stop not in result.text for result in results.values())
    assert any(result.finish_reason == "stop" for result in results.values())
