"""Figures of the whole engine, through what everybody calls: requests in, results out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import mean
from typing import Any

import torch

from nightjar.gpu_worker.engine import Engine
from nightjar.gpu_worker.engine.host_tier import HostTier

from .kernel_figures import copy_bandwidth, memory_bandwidth, read_bandwidth
from .lab import BLOCK_SIZE, Lab, MeasuringError, Timing, answer, rankings, texts
from .work import decode_floor_bytes, kv_bytes, prefill_operations

Points = dict[str, Any]

WARM = 2
"""Rounds of `kv_cache` that do not count: kernels are compiled, both caches fill."""

KINDS = ("hit", "miss")


def timed_step(engine: Engine, lab: Lab, prompts: Sequence[Sequence[int]]) -> Timing:
    """Seconds of one decode step, the host's part included.

    Sequences of `long` tokens take longer than those of `short`: that difference over the steps
    between them is a step.  The prompts lie in the prefix cache.
    """
    scale, found = lab.scale, []
    for tokens in (scale.long, scale.short) * 2:  # block tables of both widths are recorded
        answer(engine, texts(prompts, tokens))
    for _ in range(scale.rounds):
        long, short = (
            lab.wall_s(lambda tokens=tokens: answer(engine, texts(prompts, tokens)))  # type: ignore[misc]
            for tokens in (scale.long, scale.short)
        )
        found.append((long - short) / (scale.long - scale.short))
    if Timing(tuple(found)).median <= 0:
        raise MeasuringError("the steps were lost in noise: is the machine busy?")
    return Timing(tuple(found))


def step_s(lab: Lab, batch: int, dtype: torch.dtype) -> Timing:
    """Seconds of a decode step of `batch` sequences at the scale's context."""

    def measure() -> Timing:
        prompts = lab.prompts([lab.scale.decode_prompt] * batch)
        engine = lab.engine(dtype, batch, lab.scale.decode_prompt + lab.scale.long)
        return timed_step(engine, lab, prompts)

    found = lab.kept(("step", batch, dtype), measure)
    lab.collect()
    return found


def decode_share(batch: int) -> Callable[[Lab], Points]:
    """The decode step as a share of the HBM floor.

    The floor is weights, keys and values read once, at the faster speed of reading or copying in
    this run.
    """

    def measure(lab: Lab) -> Points:
        texts_at_once = lab.batch(batch)
        timing = step_s(lab, texts_at_once, lab.half)
        config, context = lab.scale.config(), lab.scale.context
        bytes_ = decode_floor_bytes(config, texts_at_once, context, lab.half.itemsize)
        floor = bytes_ / memory_bandwidth(lab)
        speeds = {"copy_b_s": copy_bandwidth(lab), "read_b_s": read_bandwidth(lab)}
        return {
            "points": {f"decode_share_{batch}": floor / timing.median},
            "details": timing.figures() | speeds | {"floor_s": floor, "context": context},
        }

    return measure


def step_growth(lab: Lab) -> Points:
    """A step of 8 sequences over a step of 1."""
    one, eight = (step_s(lab, lab.batch(batch), lab.half) for batch in (1, 8))
    return {
        "points": {"step_1_to_8": eight.median / one.median},
        "details": {"1": one.figures(), "8": eight.figures()},
    }


def prefill(lab: Lab) -> Points:
    """TFLOP/s of computing `prefill_prompts` prompts in one step, sampling included; only the
    operations that the engine computes count."""
    lengths = [lab.scale.prefill_length] * lab.scale.prefill_prompts
    prompts, rows = lab.prompts(lengths), sum(lengths)
    engine = lab.engine(lab.half, len(lengths), max(lengths) + 1, max_step_tokens=rows)

    def run() -> None:
        engine.reset_prefix_cache()
        answer(engine, texts(prompts, 1))

    timing = lab.rounds(run, warm=2)
    operations = prefill_operations(lab.scale.config(), lengths)
    return {
        "points": {"prefill_tflop_s": operations / timing.median / 1e12},
        "details": timing.figures() | {"rows": rows, "operations": operations},
    }


def ranking(lab: Lab) -> Points:
    """What sharing a query is worth: every document behind a query of its own, over sharing.

    No two of those queries begin alike.
    """
    scale = lab.scale
    queries = lab.prompts([scale.query_length] * scale.rankings)
    documents = lab.prompts([scale.document_length] * scale.documents, seed=1)
    pairs = [(query, document) for query in queries for document in documents]
    apart = [
        ([2 + i % (scale.vocab_size - 2), 2 + i // (scale.vocab_size - 2), *query[2:]], [document])
        for i, (query, document) in enumerate(pairs)
    ]
    tokens = scale.query_length + scale.document_length
    engine = lab.engine(lab.half, len(pairs), tokens)

    def run(requests: list[tuple[list[int], list[list[int]]]]) -> None:
        engine.reset_prefix_cache()
        answer(engine, rankings(requests))

    shared = lab.rounds(lambda: run([(query, documents) for query in queries]), warm=2)
    unshared = lab.rounds(lambda: run(apart))
    return {
        "points": {"ranking_sharing": unshared.median / shared.median},
        "details": {"shared": shared.figures(), "unshared": unshared.figures()},
    }


def mixed_lengths(lab: Lab) -> Points:
    """A batch of 8 prompts of different lengths, held against two others.

    The first is its members one by one.  The second is a batch of even lengths with as many tokens.
    """
    lengths, tokens = list(lab.scale.mixed), lab.scale.mixed_tokens
    mixed = lab.prompts(lengths)
    even = lab.prompts([round(mean(lengths))] * len(lengths), seed=1)
    engine = lab.engine(lab.half, len(lengths), max(lengths) + tokens)

    def run(prompts: list[list[int]]) -> None:
        engine.reset_prefix_cache()
        answer(engine, texts(prompts, tokens))

    def one_by_one() -> None:
        for prompt in mixed:
            run([prompt])

    together = lab.rounds(lambda: run(mixed), warm=2)
    evenly = lab.rounds(lambda: run(even))
    singly = lab.rounds(one_by_one)
    return {
        "points": {
            "mixed_over_singles": singly.median / together.median,
            "mixed_over_even": together.median / evenly.median,
        },
        "details": {
            "mixed": together.figures(),
            "even": evenly.figures(),
            "one_by_one": singly.figures(),
            "lengths": lengths,
        },
    }


def job_s(lab: Lab, dtype: torch.dtype) -> Timing:
    """Seconds of the job that transformers gets too: prompts in, texts out, nothing cached."""

    def measure() -> Timing:
        count, length, tokens = lab.scale.job
        prompts = lab.prompts([length] * count)
        engine = lab.engine(dtype, count, length + tokens)

        def run() -> None:
            engine.reset_prefix_cache()
            answer(engine, texts(prompts, tokens))

        return lab.rounds(run, warm=2)

    found = lab.kept(("job", dtype), measure)
    lab.collect()
    return found


def half_over_single(lab: Lab) -> Points:
    """The job in FP32 over the job in FP16; FP32's products stay in FP32 (no TF32).

    Flash attention takes 16 bits: FP32's prompts attend one sequence after the other, in products
    that are launched one by one (kernels/cuda/varlen.py).
    """
    half = job_s(lab, lab.half)
    single = job_s(lab, torch.float32)
    lab.drop_model()
    return {
        "points": {"half_over_single": single.median / half.median},
        "details": {
            "half": half.figures(),
            "single": single.figures(),
            "job": lab.scale.job,
            "note": "up to a tenth of this may be prompts in FP32, which attend one by one",
        },
    }


def kv_cache(lab: Lab) -> Points:
    """Time to first token with the KV cache in pinned memory, over an engine without it.

    A hit is a later turn whose beginning lies there; a miss is a prompt that is not found there.
    The point is of the longer of two lengths.  At the shorter one loading and computing take about
    as long: where computing is the faster, nothing is loaded and a hit is worth nothing.
    """
    found = []
    for cached in lab.scale.cached_tokens:
        found.append(_later_turn(lab, cached))
        lab.collect()
    level, long = found
    return {
        "points": long["points"],
        "details": long["details"] | {"where both are level": level},
    }


def _later_turn(lab: Lab, cached: int) -> Points:
    """`kv_cache` after `cached` tokens.

    Both engines have full caches, with room for one such prompt, so that every prompt makes others
    leave.
    """
    config, length = lab.scale.config(), cached + lab.scale.turn_tokens
    blocks = lab.blocks(1, length + 1)
    crowd = blocks // (cached // BLOCK_SIZE) + 1  # prompts that fill the cache
    host_bytes = kv_bytes(config, (2 * crowd + 4) * length, lab.half.itemsize)  # more than a round
    engines = {
        name: lab.engine(lab.half, 1, length + 1, host_cache_bytes=size)
        for name, size in (("tier", host_bytes), ("none", 0))
    }
    tier = engines["tier"].tier
    assert tier is not None
    loads = _loads(tier)
    (known,) = lab.prompts([cached])
    fresh = iter(lab.prompts([length] * (lab.scale.rounds + WARM) * 4 * (crowd + 1), seed=1))
    found: dict[str, list[float]] = {f"{kind}, {name}": [] for kind in KINDS for name in engines}
    for engine in engines.values():
        answer(engine, texts([known], 1))
    for _ in range(WARM + lab.scale.rounds):
        for name, engine in engines.items():
            for kind in KINDS:
                answer(engine, texts([next(fresh) for _ in range(crowd)], 1))
                prompt = next(fresh)
                if kind == "hit":
                    prompt[:cached] = known
                asked = texts([prompt], 1)
                seconds = lab.answer_s(lambda e=engine, a=asked: answer(e, a))  # type: ignore[misc]
                found[f"{kind}, {name}"].append(seconds)
    timings = {name: Timing(tuple(seconds[WARM:])) for name, seconds in found.items()}
    learned = {
        "computing_a_token_s": tier.costs.token_s,
        "loading_a_byte_s": tier.costs.byte_s,
        "loading_at_all_s": tier.costs.start_s,
    }
    return {
        "points": {
            f"kv_{kind}": timings[f"{kind}, tier"].median / timings[f"{kind}, none"].median - 1
            for kind in KINDS
        },
        "details": {name: timing.figures() for name, timing in timings.items()}
        | {"tokens": length, "cached": cached, "host_bytes": host_bytes}
        | {"blocks": cached // BLOCK_SIZE, "blocks_of_loads": loads, "learned": learned},
    }


def _loads(tier: HostTier) -> list[int]:
    """The blocks of each load from now on: without one, a hit has been computed."""
    found: list[int] = []
    load = tier.load

    def counted(blocks: Iterable[int], slots: Iterable[int]) -> None:
        coming = list(blocks)
        found.append(len(coming))
        load(coming, slots)

    tier.load = counted  # type: ignore[method-assign]
    return found
