"""The fake engine keeps the real one's contract, and its answers depend on the request alone."""

import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nightjar.gpu_worker.compute.fake_engine import FakeEngine
from nightjar.gpu_worker.engine import (
    GenerateRequest,
    GenerateResult,
    RankRequest,
    RankResult,
    Request,
    RequestFailed,
    Result,
    SamplingParams,
)

# Token ids are the bytes themselves; the one past them is special.
VOCABULARY = [bytes([byte]) for byte in range(256)] + [b""]

prompts = st.lists(st.integers(0, 255), min_size=1, max_size=20)
samplings = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 40),
    seed=st.integers(-(2**63), 2**63 - 1),
    n=st.integers(1, 3),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.just(2),
)
generations = st.builds(GenerateRequest, st.just(0), prompts, samplings)
rankings = st.builds(RankRequest, st.just(0), prompts, st.lists(prompts, min_size=1, max_size=4))


def text_request(text: str, request_id: int = 1, max_tokens: int = 8) -> GenerateRequest:
    return GenerateRequest(request_id, list(text.encode()), SamplingParams(max_tokens))


def answers(engine: FakeEngine, requests: list[Request]) -> dict[int, Result]:
    for request in requests:
        engine.submit(request)
    found: dict[int, Result] = {}
    while engine.has_work:
        for result in engine.step():
            assert result.request_id not in found
            found[result.request_id] = result
    return found


def alone(request: Request) -> Result:
    return answers(FakeEngine(VOCABULARY), [request])[request.request_id]


@given(st.lists(generations | rankings, min_size=1, max_size=8), st.integers(1, 4))
def test_an_answer_depends_on_its_request_alone(requests: list[Request], at_once: int) -> None:
    """Not on its company, its id, its place in the order or what was computed before."""
    numbered = [replace(request, request_id=i) for i, request in enumerate(requests)]
    together = answers(FakeEngine(VOCABULARY, step_requests=at_once), numbered)
    assert sorted(together) == list(range(len(requests)))
    for i, request in enumerate(requests):
        assert replace(together[i], request_id=0) == alone(request)


@given(generations)
def test_a_text_keeps_to_what_was_asked(request: GenerateRequest) -> None:
    result = alone(request)
    assert isinstance(result, GenerateResult)
    assert len(result.outputs) == request.sampling.n
    assert result.prompt_tokens == len(request.token_ids)
    for output in result.outputs:
        length, asked = len(output.token_ids), request.sampling
        assert 1 <= length <= asked.max_tokens
        assert length == asked.max_tokens or not asked.ignore_eos
        assert output.finish_reason == ("length" if length == asked.max_tokens else "eos")
        assert output.text == b"".join(VOCABULARY[token] for token in output.token_ids)
        assert output.text.decode().isprintable()
        reported = None if output.logprobs is None else len(output.logprobs)
        assert reported == (None if asked.logprobs is None else length)


def test_min_tokens_are_kept() -> None:
    lengths = set()
    for seed in range(50):
        result = alone(GenerateRequest(1, [5], SamplingParams(9, seed=seed, min_tokens=7)))
        assert isinstance(result, GenerateResult)
        lengths.add(len(result.token_ids))
    assert lengths == {7, 8, 9}


@pytest.mark.parametrize(
    "other",
    [
        GenerateRequest(1, [5, 7], SamplingParams(30)),
        GenerateRequest(1, [5, 6], SamplingParams(30, seed=1)),
    ],
)
def test_prompt_and_seed_change_the_text(other: GenerateRequest) -> None:
    first, second = alone(GenerateRequest(1, [5, 6], SamplingParams(30))), alone(other)
    assert isinstance(first, GenerateResult)
    assert isinstance(second, GenerateResult)
    assert first.text != second.text


def test_a_ranking_has_a_score_for_each_document() -> None:
    result = alone(RankRequest(1, [1, 2], [[3], [4, 5], [3], [6, 300]]))
    assert isinstance(result, RankResult)
    assert result.token_counts == [1, 2, 1, 1]  # 300 is a row of prompt vectors: read, not scored
    assert result.mean_nll[0] == result.mean_nll[2] != result.mean_nll[1]
    assert all(nll is not None and nll >= 0 for nll in result.mean_nll)


def test_prompt_vectors_must_be_registered() -> None:
    engine = FakeEngine(VOCABULARY)
    asked = replace(text_request("a"), prompt_vectors="style@1")
    refused = answers(engine, [asked])[1]
    assert isinstance(refused, RequestFailed)
    assert refused.code == "unknown_prompt_vectors"
    engine.register_prompt_vectors("style@1", torch.zeros(2, 4))
    answered = answers(engine, [asked])[1]
    assert isinstance(answered, GenerateResult)
    assert answered.outputs != alone(replace(asked, prompt_vectors=None))


def test_a_cancelled_request_ends_at_the_next_step() -> None:
    engine = FakeEngine(VOCABULARY, step_requests=1)
    for request_id in (1, 2):
        engine.submit(text_request("a", request_id))
    engine.cancel(2)
    engine.cancel(99)
    ended = {result.request_id: type(result) for result in engine.step()}
    assert ended == {1: GenerateResult, 2: RequestFailed}
    assert not engine.has_work


def test_a_step_takes_its_time() -> None:
    engine = FakeEngine(VOCABULARY, step_s=0.05, step_requests=2)
    for request_id in range(3):
        engine.submit(text_request("a", request_id))
    started = time.monotonic()
    assert len(engine.step()) == 2
    assert time.monotonic() - started >= 0.05
    assert len(engine.step()) == 1


def test_a_vocabulary_without_text_is_refused() -> None:
    with pytest.raises(ValueError, match="no token"):
        FakeEngine([b"", b"\xff", b"\n"])


def test_what_cannot_be_computed_fails_alone() -> None:
    found = answers(
        FakeEngine(VOCABULARY),
        [GenerateRequest(1, [-(2**40)], SamplingParams(4)), text_request("a", 2)],
    )
    assert isinstance(found[1], RequestFailed)
    assert found[1].code == "invalid_request"
    assert isinstance(found[2], GenerateResult)


def test_poison_that_raises_fails_its_request_alone() -> None:
    poison = text_request("please <poison:raise> now", 1)
    found = answers(FakeEngine(VOCABULARY), [poison, text_request("a", 2)])
    assert isinstance(found[1], RequestFailed)
    assert found[1].code == "internal_error"
    assert found[2] == alone(text_request("a", 2))


def test_poison_in_a_document_counts() -> None:
    poison = RankRequest(1, [1], [[2], list(b"<poison:raise>")])
    assert isinstance(alone(poison), RequestFailed)


def swallow(marker: str, patience_s: float) -> int:
    """The exit status of a process that computes a request with this marker."""
    program = (
        "from nightjar.gpu_worker.engine import GenerateRequest, SamplingParams\n"
        "from nightjar.gpu_worker.compute.fake_engine import FakeEngine\n"
        "engine = FakeEngine([bytes([byte]) for byte in range(256)])\n"
        f"engine.submit(GenerateRequest(1, list(b'<poison:{marker}>'), SamplingParams(4)))\n"
        "print('begun', flush=True)\n"
        "engine.step()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == b"begun\n"
        try:
            return process.wait(patience_s)
        finally:
            process.kill()


def test_poison_that_crashes_ends_the_process() -> None:
    assert swallow("crash", 30) == -11


def test_poison_that_takes_memory_is_killed() -> None:
    assert swallow("memory", 60) == -9


def test_poison_that_hangs_ends_no_step() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        swallow("hang", 1.0)


def test_urgent_requests_end_before_older_ones() -> None:
    engine = FakeEngine(VOCABULARY, step_requests=2)
    for number in range(4):
        engine.submit(text_request("a", number))
    for number in (4, 5, 6):
        engine.submit(replace(text_request("a", number), urgent=True))
    ended = []
    while engine.has_work:
        ended.append([result.request_id for result in engine.step()])
    assert ended == [[4, 5], [6, 0], [1, 2], [3]]
