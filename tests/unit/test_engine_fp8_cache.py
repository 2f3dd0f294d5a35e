"""An engine with keys and values in FP8: no answer depends on company, cuts or the host tier."""

import pytest
import torch

from nightjar.compute_config import ComputeConfig, precision_with_cache, without_cache
from nightjar.gpu_worker.compute.model_engine import open_engine
from nightjar.gpu_worker.engine import (
    BeamSearch,
    Engine,
    EngineConfig,
    GenerateRequest,
    GenerateResult,
    RankRequest,
    SamplingParams,
)
from nightjar.gpu_worker.models import KVTensors, load_model
from nightjar.gpu_worker.shards.process import GroupMember
from nightjar.gpu_worker.shards.startup import StartUp
from tests.engines import drain, generate, ids, load_always, run
from tests.shards import answers, assert_same, every_kind, thread_ranks

PRECISIONS = ["fp32", "bf16", "fp16", "int8"]


@pytest.fixture(scope="module", params=PRECISIONS)
def model(request, directory):
    return load_model(directory, request.param)


def engine_of(model, token_bytes, **limits):
    return Engine(model, token_bytes, EngineConfig(fp8_cache=True, **limits))


def requests():
    """Texts of all kinds and rankings; some of them begin alike, past a whole block."""
    system = ids(40, 99)
    kinds = [
        {},
        {"temperature": 0.9, "top_p": 0.9, "logprobs": 2},
        {"temperature": 1.2, "n": 3},
        {"beams": BeamSearch(3), "n": 2},
        {"repetition_penalty": 1.3},
    ]
    made = []
    for i, params in enumerate(kinds):
        sampling = SamplingParams(6, seed=i, ignore_eos=True, **params)
        made.append(GenerateRequest(i, system[: 40 * (i % 2)] + ids(3 + 11 * i, i), sampling))
    for i, top_n in ((10, None), (11, 2)):
        documents = [ids(1 + 5 * k, 20 + k) for k in range(6)]
        made.append(RankRequest(i, system + ids(i, i), documents, top_n=top_n))
    return made


def test_no_bit_depends_on_company_order_or_limits(model, token_bytes):
    batch = requests()
    together = run(model, token_bytes, batch, fp8_cache=True)
    small = {"max_step_tokens": 40, "max_running": 3}
    assert run(model, token_bytes, batch[::-1], fp8_cache=True, **small) == together
    for request in batch:
        alone = run(model, token_bytes, [request], fp8_cache=True, max_step_tokens=33)
        assert alone[request.request_id] == together[request.request_id]


def test_a_cached_prefix_changes_no_bit(model, token_bytes, rows):
    prompt = ids(70)
    asked = [generate(0, prompt, logprobs=1), generate(1, prompt, logprobs=1)]
    engine = engine_of(model, token_bytes)
    first = drain(engine, asked[0])[0]
    del rows[:]
    again = drain(engine, asked[1])[1]
    assert sum(rows[:1]) < 70  # only what follows the cached blocks
    assert again.outputs == first.outputs


def test_the_hosts_memory_changes_no_bit(model, token_bytes, rows):
    prompt = ids(100)
    block = KVTensors.block_bytes(model.config, 32, model.cache_dtype, fp8=True)
    engine = engine_of(model, token_bytes, kv_cache_bytes=6 * block, host_cache_bytes=100 * block)
    load_always(engine)
    first = drain(engine, generate(0, prompt, logprobs=1))[0]
    for seed in (50, 51):
        drain(engine, generate(seed, ids(110, seed)))
    assert engine.tier is not None
    numbers, scales = engine.tier.transfers.memory.packed
    assert numbers.numel() + scales.numel() == 100 * block
    del rows[:]
    again = drain(engine, generate(2, prompt, logprobs=1))[2]
    assert rows[0] < 100  # the rest was loaded
    assert again.outputs == first.outputs


def test_a_cache_in_fp8_holds_about_twice_the_blocks_of_fp16(directory, token_bytes):
    model = load_model(directory, "fp16")
    plain = Engine(model, token_bytes, EngineConfig(kv_cache_bytes=1 << 20))
    narrow = engine_of(model, token_bytes, kv_cache_bytes=1 << 20)
    size = model.config.head_size
    assert narrow.pool.total == pytest.approx(plain.pool.total * 2 * size / (size + 1), abs=1)
    assert narrow.cache.keys.dtype == torch.uint8
    taken = sum(x.numel() for pair in narrow.cache.pairs for x in pair)
    assert taken <= 1 << 20


def test_answers_are_computed_again_with_a_whole_cache(directory, token_bytes):
    """The rescue's keys and values are not in FP8."""
    model = load_model(directory, "bf16")
    with torch.inference_mode():
        model.weights.layers[0].attention_norm.weight.fill_(torch.nan)
    engine = Engine(
        model,
        token_bytes,
        EngineConfig(fp8_cache=True),
        more_precise=lambda: load_model(directory, "fp32"),
    )
    found = drain(engine, generate(0, ids(9)))[0]
    assert isinstance(found, GenerateResult)
    assert found.recomputed_in == "fp32"
    assert engine.rescue.engine.cache.scales is None
    expected = run(load_model(directory, "fp32"), token_bytes, [generate(0, ids(9))])[0]
    assert found.outputs == expected.outputs


def test_blocks_are_copied_and_cleared_with_their_scales(model):
    cache = model.allocate_cache(4, 8, fp8=True)
    for pair in cache.pairs:
        for tensor in pair:
            tensor.copy_(torch.randint(1, 100, tensor.shape, dtype=torch.uint8))
    before = [tensor.clone() for pair in cache.pairs for tensor in pair]
    cache.copy([(1, 3)])
    cache.clear([0])
    for tensor, old in zip((x for pair in cache.pairs for x in pair), before, strict=True):
        assert torch.equal(tensor[:, 3], old[:, 1])
        assert torch.equal(tensor[:, [1, 2]], old[:, [1, 2]])
        assert not tensor[:, 0].any()


@pytest.mark.usefixtures("one_thread")
def test_every_rank_of_a_split_model_keeps_its_heads_in_fp8(directory, token_bytes):
    """Sums over ranks differ in their last bits, and a number may be rounded the other way."""
    whole, asked = load_model(directory, "fp32"), every_kind(512, 60)
    expected = answers(whole, token_bytes, asked, fp8_cache=True)
    with thread_ranks(directory, 2) as rank_zero:
        model = rank_zero.load("fp32")
        engine = engine_of(model, token_bytes)
        assert engine.cache.scales is not None
        assert engine.cache.scales.keys.shape == engine.cache.keys.shape[:-1]
        found = answers(model, token_bytes, asked, fp8_cache=True)
    assert_same(found, expected, 2e-3)


def test_an_engine_as_a_worker_opens_it_names_its_cache(directory, caplog):
    config = ComputeConfig(directory.path, dtype="fp32", kv_cache_dtype="fp8")
    start = StartUp(config, pipe=0)
    engine, precision = open_engine(start, GroupMember.of(start), directory, directory.tokenizer())
    assert precision == "fp32+fp8-kv"
    assert engine.cache.scales is not None
    assert "attention is slower" in caplog.text


@pytest.mark.parametrize("precision", ["fp32", "fp16+plan-1f0c2a7e", "fp8"])
def test_a_precision_is_named_with_its_cache(precision):
    narrow = precision_with_cache(precision, "fp8")
    assert narrow != precision
    assert without_cache(narrow) == (precision, "fp8")
    assert precision_with_cache(precision, "auto") == precision
    assert without_cache(precision) == (precision, "auto")
