"""The same job in transformers, on the same device, in the same format, in the same run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

from .engine_figures import job_s
from .lab import Lab, MeasuringError, Timing

Points = dict[str, Any]


def _model(lab: Lab) -> Any:  # noqa: ANN401
    """A GPT of the same shape, with random weights made on the device."""
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
    with torch.device(lab.device):
        model: Any = GPT2LMHeadModel(config)
    model = model.to(lab.half).eval()
    model.generation_config.pad_token_id = 0
    return model


def _compare(lab: Lab, name: str, run: Callable[[], int], settings: str) -> Points:
    """Our time for the job against theirs.

    run: does the job once; returns the tokens that came out.
    """
    count, length, tokens = lab.scale.job
    made = run()
    if made != count * tokens:
        raise MeasuringError(f"transformers made {made} tokens of {count * tokens}")
    theirs = lab.rounds(run, warm=1)
    ours: Timing = job_s(lab, lab.half)
    return {
        "points": {f"over_{name}": theirs.median / ours.median},
        "details": {
            "transformers": theirs.figures(),
            "nightjar": ours.figures(),
            "job": {"texts": count, "prompt": length, "tokens": tokens},
            "version": transformers.__version__,
            "settings": settings,
        },
    }


def over_static_cache(lab: Lab) -> Points:
    """transformers.generate with its static cache, which compiles the decode step on a GPU."""
    ours_first(lab)
    model = _model(lab)
    count, length, tokens = lab.scale.job
    ids = torch.tensor(lab.prompts([length] * count), device=lab.device)

    def run() -> int:
        with torch.inference_mode():
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                cache_implementation="static",
            )
        return int(made.shape[0] * (made.shape[1] - length))

    return _compare(lab, "static_cache", run, "static cache, compiled on a GPU, sdpa attention")


def over_continuous_batching(lab: Lab) -> Points:
    """transformers' own continuous batching, with its settings as they are.  Its manager, whose
    start takes memory and records graphs, runs on from round to round."""
    ours_first(lab)
    model = _model(lab)
    count, length, tokens = lab.scale.job
    # It keeps prefixes, so that each round gets other prompts.
    rounds = iter([lab.prompts([length] * count, seed) for seed in range(lab.scale.rounds + 2)])
    # No token has the id -1, so that every text gets all of its tokens.
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    limits = transformers.ContinuousBatchingConfig()
    if lab.device == "cpu":  # by default its cache takes most of the memory
        limits = transformers.ContinuousBatchingConfig(num_blocks=4 * count, max_batch_tokens=256)
    manager = model.init_continuous_batching(config, limits)
    manager.warmup()
    manager.start()

    def run() -> int:
        # Not in our inference mode: a thread of its own writes to the tensors made here.
        manager.add_requests(next(rounds), max_new_tokens=tokens)
        made, ended = 0, 0
        while ended < count:
            found = manager.get_result(timeout=1)
            if found is not None and found.is_finished():
                made, ended = made + len(found.generated_tokens), ended + 1
            elif found is None and not manager.is_running():
                raise MeasuringError("transformers' continuous batching has ended")
        return made

    try:
        return _compare(lab, "continuous_batching", run, "one manager, its defaults")
    finally:
        manager.stop(block=True, timeout=5)


def ours_first(lab: Lab) -> None:
    """Time our side and free its weights and cache before theirs take the memory."""
    job_s(lab, lab.half)
    lab.drop_model()
