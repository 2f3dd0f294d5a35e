"""What the figures should come to, from the bytes and operations of each kernel: no measurement.

    python -m benchmarks.gpu.predict

A kernel's time is what its bytes take at the speed of a copy or its operations at that of a
product, whichever is longer, and its edges: the launch inside a CUDA graph, and what it waits for
memory and for its own last sums while memory rests.  It is what the present kernels could reach if
each were as good as its limit: a figure below it shows what to look for.
"""

from __future__ import annotations

from dataclasses import dataclass

from .scale import FULL, Scale
from .work import (
    Work,
    branch_operations,
    decode_floor_bytes,
    decode_step,
    kv_bytes,
    prefill_bytes,
    prefill_operations,
    prompt_attention_operations,
)

HALF, SINGLE = 2, 4


@dataclass(frozen=True)
class Machine:
    """Speeds that predictions are made with.

    copy: bytes/s, read and written; product, single_product: operations/s in 16 bits and in FP32
    without TF32; attention: of prompts' attention in 16 bits; bus: bytes/s one way.
    launch_s: between two kernels of a CUDA graph; latency_s: of an access to memory that the next
    one needs; product_s: of a product's launch, its first access and its last reduction together.
    """

    name: str
    copy: float
    product: float
    attention: float
    single_product: float
    bus: float
    launch_s: float
    latency_s: float
    product_s: float


H200 = Machine(
    name="one H200",
    copy=4.3e12,
    product=790e12,
    attention=350e12,
    single_product=60e12,
    bus=50e9,
    launch_s=1.3e-6,
    latency_s=0.7e-6,
    product_s=2.6e-6,
)
"""Copy and product were measured on one through torch (`machine` measures them anew in every run);
the bus, FP32 and the launch (by Hazy Research) are published figures.  FlashAttention-2, torch's
own, reaches 35% of the operations of a GPU of this generation (arXiv 2407.08608).  Latency and a
product's edge are estimates, from the order of loads, barriers and sums in the kernels' machine
code: nobody has measured them."""


def kernel_s(work: Work, machine: Machine, product: float | None = None) -> float:
    """Seconds of all launches of one kernel."""
    limit = max(work.bytes / machine.copy, work.operations / (product or machine.product))
    if work.waits is None:
        hidden = machine.launch_s if work.fetched else 0.0
        return limit + work.launches * (machine.product_s - hidden)
    return limit + work.launches * (machine.launch_s + work.waits * machine.latency_s)


def step_s(scale: Scale, machine: Machine, batch: int, itemsize: int = HALF) -> float:
    """Seconds of a decode step at the scale's context."""
    config = scale.config()
    product = machine.product if itemsize == HALF else machine.single_product
    works = decode_step(config, batch, scale.context, itemsize)
    return sum(kernel_s(work, machine, product) for work in works)


def prefill_s(scale: Scale, machine: Machine, lengths: list[int], itemsize: int = HALF) -> float:
    """Seconds of computing prompts: products, attention, and the bytes of what stands between."""
    config, whole = scale.config(), itemsize == HALF
    product = machine.product if whole else machine.single_product
    attention = machine.attention if whole else machine.single_product
    attended = prompt_attention_operations(config, lengths)
    products = (prefill_operations(config, lengths) - attended) / product
    between = prefill_bytes(config, sum(lengths), itemsize) / machine.copy
    return products + attended / attention + between


def job_s(scale: Scale, machine: Machine, itemsize: int) -> float:
    """Seconds of the job: prompts, then steps at the scale's context (the job's own, within a few
    tokens)."""
    count, length, tokens = scale.job
    steps = (tokens - 1) * step_s(scale, machine, count, itemsize)
    return prefill_s(scale, machine, [length] * count, itemsize) + steps


def ranking_ratio(scale: Scale) -> float:
    """Operations of every document behind a query of its own, over those of one shared query."""
    config, lengths = scale.config(), [scale.document_length] * scale.documents
    apart = sum(branch_operations(config, scale.query_length, [length]) for length in lengths)
    return apart / branch_operations(config, scale.query_length, lengths)


def mixed_times(scale: Scale, machine: Machine) -> tuple[float, float, float]:
    """Seconds of the mixed batch, of its members one by one, and of the even batch.

    Steps at the scale's context in all three, which the lengths' mean is near.
    """
    lengths, steps = list(scale.mixed), scale.mixed_tokens - 1
    even = [round(sum(lengths) / len(lengths))] * len(lengths)
    one, many = (step_s(scale, machine, batch) for batch in (1, len(lengths)))
    mixed = prefill_s(scale, machine, lengths) + steps * many
    # Alone, a short prompt costs a pass over the weights at least.
    weights = decode_floor_bytes(scale.config(), 0, 0, HALF) / machine.copy
    alone = [max(weights, prefill_s(scale, machine, [length])) + steps * one for length in lengths]
    return mixed, sum(alone), prefill_s(scale, machine, even) + steps * many


def cached_turn(scale: Scale, machine: Machine) -> tuple[float, float]:
    """A turn whose beginning lies in pinned memory, and one that is looked for there in vain: time
    to first token over that of computing all of it, less 1.

    Loading overlaps with computing the turn's own tokens, and where it is the slower, the engine
    does not load.  A miss saves as many blocks as it draws: they are read once from the device's
    memory, which is all that it can be late by.
    """
    cached, config = scale.cached_tokens[-1], scale.config()
    computed, turn = (
        prefill_s(scale, machine, [tokens])
        for tokens in (cached + scale.turn_tokens, scale.turn_tokens)
    )
    loaded = max(kv_bytes(config, cached, HALF) / machine.bus, turn)
    saved = kv_bytes(config, cached + scale.turn_tokens, HALF) / machine.copy
    return min(loaded, computed) / computed - 1, saved / computed


def predictions(scale: Scale = FULL, machine: Machine = H200) -> dict[str, float]:
    """By the name of the point; those that no arithmetic gives (transformers' time, the host's
    part) are left out."""
    config, found = scale.config(), {}
    for batch in scale.batches:
        floor = decode_floor_bytes(config, batch, scale.context, HALF) / machine.copy
        found[f"decode_share_{batch}"] = floor / step_s(scale, machine, batch)
    one, eight = (step_s(scale, machine, batch) for batch in (1, 8))
    found["step_1_to_8"] = eight / one
    attention = next(
        work
        for work in decode_step(config, 64, scale.context, HALF)
        if work.name == "decode_attention"
    )
    read = kv_bytes(config, 64 * scale.context, HALF)
    found["attention_share_1"] = read / machine.copy / kernel_s(attention, machine)
    lengths = [scale.prefill_length] * scale.prefill_prompts
    operations = prefill_operations(config, lengths)
    found["prefill_tflop_s"] = operations / prefill_s(scale, machine, lengths) / 1e12
    found["ranking_sharing"] = ranking_ratio(scale)
    mixed, singly, even = mixed_times(scale, machine)
    found["mixed_over_singles"], found["mixed_over_even"] = singly / mixed, mixed / even
    found["half_over_single"] = job_s(scale, machine, SINGLE) / job_s(scale, machine, HALF)
    found["kv_hit"], found["kv_miss"] = cached_turn(scale, machine)
    found["kv_pack_gb_s"] = found["kv_unpack_gb_s"] = machine.bus / 1e9
    return found


def step_table(scale: Scale = FULL, machine: Machine = H200, batch: int = 64) -> str:
    """Every kernel of a decode step: launches, bytes, operations, microseconds; in Markdown."""
    lines = ["| kernel | launches | MB | GFLOP | us |", "|---|---|---|---|---|"]
    for work in decode_step(scale.config(), batch, scale.context, HALF):
        us = 1e6 * kernel_s(work, machine)
        numbers = f"{work.bytes / 1e6:.1f} | {work.operations / 1e9:.1f} | {us:.0f}"
        lines.append(f"| {work.name} | {work.launches} | {numbers} |")
    lines.append(f"| all | | | | {1e6 * step_s(scale, machine, batch):.0f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    from .targets import TARGETS  # noqa: PLC0415 (loads torch)

    for point, value in predictions().items():
        print(f"{TARGETS[point].title}: {TARGETS[point].write(value)}")
    print(f"\nA decode step of 64 at context {FULL.context}:\n\n{step_table()}")


if __name__ == "__main__":
    main()
