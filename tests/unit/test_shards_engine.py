"""An engine over ranks in threads: second precisions, requests that leave, ranks that fail."""

import threading
from collections import Counter
from functools import partial
from multiprocessing import Pipe

import pytest
import torch

from nightjar.checkpoints import ShardError
from nightjar.compute_config import ComputeConfig
from nightjar.gpu_worker.compute.model_engine import build_engine
from nightjar.gpu_worker.engine import Engine, EngineConfig, GenerateResult, RequestFailed
from nightjar.gpu_worker.models import KVTensors, load_model
from nightjar.gpu_worker.models.shard import ShardDecoder
from nightjar.gpu_worker.shards import follower as follower_module
from nightjar.gpu_worker.shards.activity import Activity, Doing
from nightjar.gpu_worker.shards.commands import Done, encode
from nightjar.gpu_worker.shards.follower import Follower
from nightjar.gpu_worker.shards.process import GroupLostError, OutOfStepError
from nightjar.gpu_worker.shards.rank_zero import RankZero
from tests.engines import VOCAB, assert_nothing_held, drain, generate, ids, one
from tests.shards import Meeting, ThreadCollective, first_logits, thread_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

HUGE = torch.full((1, 32), 3e38) * torch.tensor([1.0, -1.0] * 16)
"""A prompt vector whose norm overflows in FP32 and not in FP64."""


def spoiled():
    return generate(9, [VOCAB, *ids(40)], vectors="huge")


def engine_of(rank_zero, token_bytes):
    engine = Engine(
        rank_zero.load("fp32"), token_bytes, EngineConfig(), lambda: rank_zero.load("fp64")
    )
    engine.register_prompt_vectors("huge", HUGE)
    return engine


def test_scores_that_are_not_finite_are_computed_again_on_every_rank(directory, model, token_bytes):
    """What the first computation wrote is cleared on every rank: its blocks serve others."""
    with thread_ranks(directory, 2) as rank_zero:
        engine = engine_of(rank_zero, token_bytes)
        result = drain(engine, spoiled(), generate(1, ids(9)))
        after = drain(engine, generate(2, ids(60), n=2, temperature=1.0))[2]
        assert_nothing_held(engine)
    assert isinstance(result[9], GenerateResult)
    assert result[9].recomputed_in == "fp64"
    assert result[1].token_ids == one(model, token_bytes, generate(1, ids(9))).token_ids
    assert after == one(model, token_bytes, generate(2, ids(60), n=2, temperature=1.0))


@torch.inference_mode()
@pytest.mark.parametrize("change", ["clear", "copy"])
def test_what_happens_to_blocks_of_a_cache_happens_on_every_rank(directory, monkeypatch, change):
    """Another rank's part of a block may hold what rank 0's does not: NaN, for one."""
    followers = []

    class Kept(Follower):
        def __init__(self, *given):
            super().__init__(*given)
            followers.append(self)

        @property
        def caches(self):
            return self._caches

    monkeypatch.setattr("tests.shards.Follower", Kept)
    with thread_ranks(directory, 2) as rank_zero:
        model = rank_zero.load("fp32")
        cache = model.allocate_cache(3, 16)
        model.logits(torch.zeros(1, 32))  # past this the follower has its cache
        (theirs,) = followers[0].caches.values()
        theirs.keys[:, 1], theirs.values[:, 1] = torch.nan, torch.nan
        theirs.keys[:, 2], theirs.values[:, 2] = 2.0, 3.0
        if change == "clear":
            cache.clear([1])
        else:
            cache.copy([(2, 1)])
        model.logits(torch.zeros(1, 32))
    expected = (0.0, 0.0) if change == "clear" else (2.0, 3.0)
    for tensor, first, kept in zip((theirs.keys, theirs.values), expected, (2.0, 3.0), strict=True):
        assert tensor[:, 1].unique().tolist() == [first]
        assert tensor[:, 2].unique().tolist() == [kept]


def test_a_rank_that_cannot_load_a_higher_precision_costs_that_request_alone(
    directory, token_bytes, monkeypatch
):
    def only_fp32(directory, dtype, *others):
        if dtype != "fp32":
            raise MemoryError("no room")
        return load_model(directory, dtype, *others)

    monkeypatch.setattr(follower_module, "load_model", only_fp32)
    with thread_ranks(directory, 2) as rank_zero:
        engine = engine_of(rank_zero, token_bytes)
        results = drain(engine, spoiled(), generate(1, ids(9)))
        with pytest.raises(ShardError, match=r"rank 1 cannot load its part: MemoryError: no room"):
            rank_zero.load("fp64")
        assert isinstance(drain(engine, generate(2, ids(9)))[2], GenerateResult)
    assert isinstance(results[9], RequestFailed)
    assert "rank 1 cannot load" in results[9].message
    assert isinstance(results[1], GenerateResult)


def test_a_rank_that_cannot_make_its_cache_says_why(directory, token_bytes, monkeypatch):
    """Rank 0 as well; and then the ranks are still in step."""
    plain = KVTensors.allocate
    broken = threading.Event()

    def no_room(*given, **options):
        if threading.current_thread().name.startswith("Thread") and not broken.is_set():
            raise MemoryError("no room here")
        if broken.is_set() and threading.current_thread() is threading.main_thread():
            raise RuntimeError("out of memory")
        return plain(*given, **options)

    monkeypatch.setattr(KVTensors, "allocate", no_room)
    with thread_ranks(directory, 2) as rank_zero:
        model = rank_zero.load("fp32")
        with pytest.raises(ShardError, match=r"rank 1 cannot make its cache: .*no room here"):
            Engine(model, token_bytes, EngineConfig())
        broken.set()
        with pytest.raises(ShardError, match="rank 0 cannot make its cache: out of memory"):
            Engine(model, token_bytes, EngineConfig())
        monkeypatch.undo()
        engine = Engine(model, token_bytes, EngineConfig())
        assert isinstance(drain(engine, generate(2, ids(9)))[2], GenerateResult)


def test_what_the_other_gpus_have_left_comes_with_the_model(directory):
    pipes = [Pipe() for _ in range(3)]
    for (_, theirs), free in zip(pipes, (500, None, 700), strict=True):
        theirs.send_bytes(encode(Done()))
        theirs.send_bytes(encode(Done(free_bytes=free)))
    meeting = partial(ThreadCollective, Meeting(4), 0)
    rank_zero = RankZero(directory, [ours for ours, _ in pipes], "cpu", meeting, Activity())
    assert rank_zero.load("fp32").free_elsewhere == (500, 700)


def test_a_model_split_among_gpus_has_no_higher_precision(directory):
    """Rank 0 would load the whole of it into the host's memory, in FP32."""
    config = ComputeConfig(directory.path, kv_cache_bytes=1 << 20)
    with thread_ranks(directory, 2) as rank_zero:
        given = (config, directory, directory.tokenizer(), rank_zero.load)
        engine = build_engine(*given, dtype="bf16", device="cuda:0")
        assert engine.rescue is None
        assert build_engine(*given, dtype="bf16").rescue is not None


def test_ranks_that_connect_are_loading(directory, monkeypatch):
    """To connect may take longer than a step, and no rank is late meanwhile."""
    seen = {}

    class Watched(Follower):
        def __init__(self, model, member, device, pipe, join):
            def joining():
                seen[member.rank] = member.activity.sign.doing
                return join()

            super().__init__(model, member, device, pipe, joining)

    monkeypatch.setattr("tests.shards.Follower", Watched)
    with thread_ranks(directory, 2) as rank_zero:
        rank_zero.load("fp32")
    assert seen == {1: Doing.LOADING}


def test_every_rank_has_the_scores_of_all_tokens(directory, monkeypatch):
    """So that each can choose the next tokens by itself."""
    found = []
    plain = ShardDecoder.logits

    def kept(model, hidden):
        found.append(plain(model, hidden))
        return found[-1]

    monkeypatch.setattr(ShardDecoder, "logits", kept)
    with thread_ranks(directory, 2) as rank_zero, torch.inference_mode():
        hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(2))
        rank_zero.load("fp32").logits(hidden)
    assert [scores.shape for scores in found] == [(3, VOCAB)] * 2
    assert torch.equal(*found)


def test_an_embedding_needs_no_exchange(directory, token_bytes, monkeypatch):
    """A step of a prompt: two sums a layer, and one gather of its scores."""
    counts = Counter()
    for name in ("sum", "gather", "broadcast"):
        plain = getattr(ThreadCollective, name)

        def counted(collective, x, name=name, plain=plain):
            counts[name] += collective.rank == 0
            return plain(collective, x)

        monkeypatch.setattr(ThreadCollective, name, counted)
    with thread_ranks(directory, 2) as rank_zero:
        engine = Engine(rank_zero.load("fp32"), token_bytes, EngineConfig())
        counts.clear()
        drain(engine, generate(1, ids(9), 1))
    layers = directory.config.n_layers
    assert counts == {"sum": 2 * layers, "gather": 1, "broadcast": 1}


def test_a_cancelled_request_leaves_every_rank(directory, token_bytes):
    with thread_ranks(directory, 2) as rank_zero:
        engine = engine_of(rank_zero, token_bytes)
        engine.submit(generate(1, ids(9), 50))
        assert engine.step() == []
        engine.cancel(1)
        (result,) = engine.step()
        assert isinstance(result, RequestFailed)
        assert isinstance(drain(engine, generate(2, ids(9)))[2], GenerateResult)
        assert_nothing_held(engine)


def test_rank_0_that_fails_in_a_step_ends_the_process_and_not_one_request(
    directory, token_bytes, monkeypatch
):
    """The engine runs a step that raises again, request by request; out of step it must not."""
    with thread_ranks(directory, 1) as rank_zero:
        engine = engine_of(rank_zero, token_bytes)
        engine.submit(generate(1, ids(9)))

        def fails(*_):
            raise ValueError("no such row")

        monkeypatch.setattr("nightjar.kernels.embed", fails)
        with pytest.raises(OutOfStepError, match="Forward"):
            engine.step()


def test_a_rank_that_does_not_listen_any_more_is_a_lost_group(directory, token_bytes, monkeypatch):
    pipes = []

    def kept():
        pipes.append(Pipe())
        return pipes[-1]

    monkeypatch.setattr("tests.shards.Pipe", kept)
    with thread_ranks(directory, 2) as rank_zero:
        engine = engine_of(rank_zero, token_bytes)
        for ours, _ in pipes:
            ours.close()
        engine.submit(generate(1, ids(9)))
        with pytest.raises(GroupLostError, match="does not listen"):
            engine.step()


def test_followers_start_from_the_same_scores_for_both_models(directory, token_bytes):
    """The second model's numbers come from the second model, not from the first."""
    prompts = [ids(7, 1), ids(19, 2)]
    with thread_ranks(directory, 2) as rank_zero:
        rough, fine = rank_zero.load("bf16"), rank_zero.load("fp64")
        found = [first_logits(m, token_bytes, prompts) for m in (rough, fine)]
    exact = first_logits(load_model(directory, "fp64"), token_bytes, prompts)
    torch.testing.assert_close(found[1], exact, rtol=0, atol=1e-6)
    assert float((found[0] - exact).abs().max()) > 1e-4
