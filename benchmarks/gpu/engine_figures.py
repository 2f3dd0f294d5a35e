"""Figures of the whole engine, through what everybody calls: requests in, results out."""

from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any

import torch

from benchmarks.answers import answers
from nightjar.gpu_worker.engine import Engine, RankRequest

from .kernel_figures import copy_bandwidth, memory_bandwidth, read_bandwidth
from .lab import BLOCK_SIZE, Lab, MeasuringError, Points, Timing, found, generate

WARM = 2
"""Rounds that do not count: kernels are compiled, caches fill."""


def warm(engine: Engine, lab: Lab, prompts: Sequence[Sequence[int]]) -> None:
    """Put the prompts into the prefix cache, and record block tables of both widths."""
    for tokens in (lab.scale.long, lab.scale.short) * 2:
        generate(engine, prompts, tokens)


def a_step(lab: Lab, measure: Callable[[int], Sequence[float]]) -> list[Timing]:
    """What each of the values of `measure` grows by with a decode step.

    measure: given the tokens of each text, seconds.  Texts of `long` tokens take longer than those
    of `short`: that difference over the steps between them is a step.
    Raises:
        MeasuringError: A difference is not above 0.
    """
    scale, rows = lab.scale, []
    for _ in range(scale.rounds):
        pairs = zip(measure(scale.long), measure(scale.short), strict=True)
        rows.append([(long - short) / (scale.long - scale.short) for long, short in pairs])
    timings = [Timing(column) for column in zip(*rows, strict=True)]
    if min(timing.median for timing in timings) <= 0:
        raise MeasuringError("the steps were lost in noise: is the machine busy?")
    return timings


def timed_step(engine: Engine, lab: Lab, prompts: Sequence[Sequence[int]]) -> Timing:
    """Seconds of one decode step, the host's part included."""
    warm(engine, lab, prompts)
    return a_step(lab, lambda tokens: [lab.wall_s(lambda: generate(engine, prompts, tokens))])[0]


def decoding(lab: Lab, batch: int, **settings: Any) -> tuple[Engine, list[list[int]]]:
    """An engine for a decode step of `batch` sequences at the scale's context, and its prompts."""
    length = lab.scale.decode_prompt
    engine = lab.engine(lab.half, batch, length + lab.scale.long, **settings)
    return engine, lab.prompts([length] * batch)


def step_s(lab: Lab, batch: int) -> Timing:
    """Seconds of a decode step of `batch` sequences."""

    def measure() -> Timing:
        engine, prompts = decoding(lab, batch)
        return timed_step(engine, lab, prompts)

    return lab.kept(("step", batch), measure)


def decode_share(batch: int) -> Callable[[Lab], Points]:
    """The decode step as a share of the HBM floor.

    The floor is weights, keys and values read once, at the faster speed of reading or copying in
    this run.
    """

    def measure(lab: Lab) -> Points:
        timing = step_s(lab, lab.batch(batch))
        floor = lab.scale.floor_bytes(lab.batch(batch), lab.half.itemsize) / memory_bandwidth(lab)
        speeds = {"copy_b_s": copy_bandwidth(lab), "read_b_s": read_bandwidth(lab)}
        about = {"step": timing, **speeds, "floor_s": floor, "context": lab.scale.context}
        return found(about, **{f"decode_share_{batch}": floor / timing.median})

    return measure


def step_growth(lab: Lab) -> Points:
    """A step of 8 sequences over a step of 1."""
    one, eight = (step_s(lab, lab.batch(batch)) for batch in (1, 8))
    return found({"1": one, "8": eight}, step_1_to_8=eight.median / one.median)


def fp8_cache(lab: Lab) -> Points:
    """A step of 256 sequences over the same with keys and values in FP8."""
    batch = lab.batch(256)
    half = step_s(lab, batch)
    engine, prompts = decoding(lab, batch, fp8_cache=True)
    fp8 = timed_step(engine, lab, prompts)
    about = {"half": half, "fp8": fp8, "context": lab.scale.context, "batch": batch}
    return found(about, fp8_cache_gain=half.median / fp8.median)


def prefill(lab: Lab) -> Points:
    """TFLOP/s of computing `prefill_prompts` prompts in one step, sampling included; only the
    operations that the engine computes count."""
    lengths = [lab.scale.prefill_length] * lab.scale.prefill_prompts
    prompts, rows = lab.prompts(lengths), sum(lengths)
    engine = lab.engine(lab.half, len(lengths), max(lengths) + 1, max_step_tokens=rows)
    timing = lab.rounds(lambda: afresh(engine, prompts, 1), WARM)
    operations = lab.scale.prefill_operations(lengths)
    about = {"step": timing, "rows": rows, "operations": operations}
    return found(about, prefill_tflop_s=operations / timing.median / 1e12)


def afresh(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> None:
    """Texts after prompts of which nothing is cached."""
    engine.reset_prefix_cache()
    generate(engine, prompts, tokens)


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
    engine = lab.engine(lab.half, len(pairs), scale.query_length + scale.document_length)

    def run(asked: Sequence[tuple[list[int], list[list[int]]]]) -> None:
        engine.reset_prefix_cache()
        answers(engine, [RankRequest(i, query, texts) for i, (query, texts) in enumerate(asked)])

    shared = lab.rounds(lambda: run([(query, documents) for query in queries]), WARM)
    unshared = lab.rounds(lambda: run(apart))
    about = {"shared": shared, "unshared": unshared}
    return found(about, ranking_sharing=unshared.median / shared.median)


def mixed_lengths(lab: Lab) -> Points:
    """A batch of 8 prompts of different lengths, held against two others.

    The first is its members one by one.  The second is a batch of even lengths with as many tokens.
    """
    lengths, tokens = list(lab.scale.mixed), lab.scale.mixed_tokens
    mixed = lab.prompts(lengths)
    even = lab.prompts([round(mean(lengths))] * len(lengths), seed=1)
    engine = lab.engine(lab.half, len(lengths), max(lengths) + tokens)
    together = lab.rounds(lambda: afresh(engine, mixed, tokens), WARM)
    evenly = lab.rounds(lambda: afresh(engine, even, tokens))

    def one_by_one() -> None:
        for prompt in mixed:
            afresh(engine, [prompt], tokens)

    singly = lab.rounds(one_by_one)
    return found(
        {"mixed": together, "even": evenly, "one_by_one": singly, "lengths": lengths},
        mixed_over_singles=singly.median / together.median,
        mixed_over_even=together.median / evenly.median,
    )


def job_s(lab: Lab, dtype: torch.dtype) -> Timing:
    """Seconds of the job that transformers gets too: prompts in, texts out, nothing cached."""

    def measure() -> Timing:
        count, length, tokens = lab.scale.job
        prompts = lab.prompts([length] * count)
        engine = lab.engine(dtype, count, length + tokens)
        return lab.rounds(lambda: afresh(engine, prompts, tokens), WARM)

    return lab.kept(("job", dtype), measure)


def half_over_single(lab: Lab) -> Points:
    """The job in FP32 over the job in FP16; FP32's products stay in FP32 (no TF32).

    Flash attention takes 16 bits: FP32's prompts attend one sequence after the other, in products
    that are launched one by one (kernels/cuda/varlen.py).
    """
    half, single = job_s(lab, lab.half), job_s(lab, torch.float32)
    lab.drop_model()
    note = "up to a tenth of this may be prompts in FP32, which attend one by one"
    about = {"half": half, "single": single, "job": lab.scale.job, "note": note}
    return found(about, half_over_single=single.median / half.median)


def kv_cache(lab: Lab) -> Points:
    """Time to first token with the KV cache in pinned memory, over an engine without it.

    A hit is a later turn whose beginning lies there; a miss is a prompt that is not found there.
    Both engines have full caches, with room for one such prompt, so that every prompt makes others
    leave.  Where computing is faster than loading, nothing is loaded and a hit is worth nothing.
    """
    cached, length = lab.scale.cached_tokens, lab.scale.cached_tokens + lab.scale.turn_tokens
    crowd = later_turn_crowd(lab)
    host_bytes = lab.scale.kv_bytes((2 * crowd + 4) * length, lab.half.itemsize)  # over a round's
    engines = {
        name: lab.engine(lab.half, 1, length + 1, host_cache_bytes=size)
        for name, size in (("tier", host_bytes), ("none", 0))
    }
    tier = engines["tier"].tier
    assert tier is not None
    (known,) = lab.prompts([cached])
    fresh = iter(lab.prompts([length] * (lab.scale.rounds + WARM) * 4 * (crowd + 1), seed=1))
    took: dict[str, list[float]] = {}
    for engine in engines.values():
        generate(engine, [known], 1)
    for _ in range(WARM + lab.scale.rounds):
        for name, engine in engines.items():
            for kind in ("hit", "miss"):
                generate(engine, [next(fresh) for _ in range(crowd)], 1)
                prompt = next(fresh)
                if kind == "hit":
                    prompt[:cached] = known
                seconds = lab.wall_s(
                    lambda e=engine, p=prompt: generate(e, [p], 1),  # type: ignore[misc]
                    whole=False,
                )
                took.setdefault(f"{kind}, {name}", []).append(seconds)
    timings = {name: Timing(seconds[WARM:]) for name, seconds in took.items()}
    about: dict[str, Any] = {"tokens": length, "cached": cached, "host_bytes": host_bytes}
    about |= {"computing_a_token_s": tier.costs.token_s, "loading_a_byte_s": tier.costs.byte_s}
    return found(
        timings | about,
        **{
            f"kv_{kind}": timings[f"{kind}, tier"].median / timings[f"{kind}, none"].median - 1
            for kind in ("hit", "miss")
        },
    )


def later_turn_crowd(lab: Lab) -> int:
    """How many prompts fill the cache of `kv_cache`."""
    length = lab.scale.cached_tokens + lab.scale.turn_tokens
    return lab.blocks(1, length + 1) // (lab.scale.cached_tokens // BLOCK_SIZE) + 1
