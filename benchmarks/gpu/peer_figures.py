"""The same job in transformers, on the same device, in the same format, in the same run."""

import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

from .engine_figures import WARM, job_s
from .lab import Lab, MeasuringError, Points, Timing, found

PATIENCE_S = 20.0
"""Of timing one way of theirs: rounds that would begin later are left out, but for two."""


def random_gpt2(lab: Lab) -> Any:  # noqa: ANN401
    """A GPT of the same shape, with random weights made on the device.

    Our side is timed first: its weights and its cache must not take the memory from theirs.
    """
    job_s(lab, lab.half)
    lab.drop_model()
    scale = lab.scale
    _, length, tokens = scale.job
    config = GPT2Config(
        vocab_size=scale.vocab_size,
        n_positions=length + tokens,
        n_embd=scale.hidden,
        n_layer=scale.layers,
        n_head=scale.heads,
        bos_token_id=0,
        eos_token_id=0,
    )
    # As torch comes: we have turned it off for our products.
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True
    with torch.device(lab.device):
        model: Any = GPT2LMHeadModel(config)
    model = model.to(lab.half).eval()
    model.generation_config.pad_token_id = 0
    return model


def _timed(lab: Lab, run: Callable[[], int]) -> Timing:
    """Seconds of the job, after it was done twice: what is compiled and recorded is there.

    run: does the job once; returns the tokens that came out.
    Raises:
        MeasuringError: Tokens were missing.
    """
    count, _, tokens = lab.scale.job
    for _ in range(WARM):
        if (made := run()) != count * tokens:
            raise MeasuringError(f"transformers made {made} tokens of {count * tokens}")
    took: list[float] = []
    ends = time.monotonic() + PATIENCE_S
    while len(took) < lab.scale.rounds and (len(took) < 2 or time.monotonic() < ends):
        took.append(lab.wall_s(run))
    return Timing(took)


def _compared(lab: Lab, name: str, theirs: Timing, settings: dict[str, Any]) -> Points:
    """Our time for the job against theirs."""
    ours, job = job_s(lab, lab.half), lab.scale.job
    about = {"version": transformers.__version__, "settings": settings, "job": job}
    timings = {"transformers": theirs, "nightjar": ours}
    return found(timings | about, **{f"over_{name}": theirs.median / ours.median})


def over_static_cache(lab: Lab) -> Points:
    """transformers.generate with its static cache, which compiles the decode step on a GPU."""
    model = random_gpt2(lab)
    # No token ends a text: a least length would cost them a logits processor at every step.
    model.generation_config.eos_token_id = None
    count, length, tokens = lab.scale.job
    ids = torch.tensor(lab.prompts([length] * count), device=lab.device)

    def run() -> int:
        with torch.inference_mode():
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=tokens,
                cache_implementation="static",
            )
        return int(made.shape[0] * (made.shape[1] - length))

    settings = {
        "attention": model.config._attn_implementation,
        "cache": "static, its decode step compiled on a GPU",
    }
    return _compared(lab, "static_cache", _timed(lab, run), settings)


def over_continuous_batching(lab: Lab, *, graphs: bool | None) -> Points:
    """transformers' own continuous batching.

    graphs: None lets it choose its settings, which without flash-attn is without CUDA graphs.

    A manager, whose start takes memory, runs on from round to round.  A graph is recorded when a
    step of its size first comes by: two rounds that do not count see nearly all of them.
    """
    model = random_gpt2(lab)
    count, length, tokens = lab.scale.job
    # It keeps prefixes, so that each round gets other prompts.
    rounds = iter([lab.prompts([length] * count, seed) for seed in range(lab.scale.rounds + WARM)])
    # No token has the id -1, so that every text gets all of its tokens.
    config = GenerationConfig(
        max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    limits = transformers.ContinuousBatchingConfig(use_cuda_graph=graphs)
    if lab.device == "cpu":  # by default its cache takes most of the memory
        limits.num_blocks, limits.max_batch_tokens = 4 * count, 256
    manager = model.init_continuous_batching(config, limits)
    chosen = manager.continuous_batching_config
    compiled = (chosen.varlen_compile_config, chosen.decode_compile_config)
    settings = {
        "attention": model.config._attn_implementation,
        "use_cuda_graph": chosen.use_cuda_graph,
        "use_async_batching": chosen.use_async_batching,
        "compiled": [str(one) for one in compiled],
    }
    # No `manager.warmup()`: it records a graph over positions that this model does not have.
    manager.start()

    def run() -> int:
        # Not in our inference mode: a thread of its own writes to the tensors made here.
        manager.add_requests(next(rounds), max_new_tokens=tokens)
        made, ended = 0, 0
        while ended < count:
            one = manager.get_result(timeout=1)
            if one is not None and one.is_finished():
                made, ended = made + len(one.generated_tokens), ended + 1
            elif one is None and not manager.is_running():
                raise MeasuringError("transformers' continuous batching has ended")
        return made

    try:
        theirs = _timed(lab, run)
    finally:
        manager.stop(block=True, timeout=5)
    name = "batching_with_graphs" if graphs else "continuous_batching"
    result = _compared(lab, name, theirs, settings)
    if "flash" not in settings["attention"]:
        result["details"]["note"] = "without flash-attn"
    return result
