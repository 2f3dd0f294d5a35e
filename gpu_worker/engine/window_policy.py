"""Which running sequences a window computes, and for how many steps."""

from __future__ import annotations

from collections.abc import Sequence

from nightjar.gpu_worker.engine.logits_processors import LogitsProcessors
from nightjar.gpu_worker.engine.plan import StepPlan
from nightjar.gpu_worker.engine.sequence import GenerateSequence

IDLE_SHARE = 8
"""While requests wait, at most one step of a slot in so many may compute nothing."""

FEWEST_STEPS = 2
"""A shorter window saves nothing: its sequences might as well join a single step."""

STEPS_BESIDE_URGENT = 2
"""Most steps of a window while an urgent request waits for it."""

Division = tuple[list[GenerateSequence], list[GenerateSequence]]
"""The sequences of a window, and those that need the host after each token."""


def divide(plan: StepPlan, most: int) -> Division | None:
    """Divide a plan's running sequences; None where the whole plan must be a single step.

    A plan with prompts or rankings is not divided.  most: steps of a window without company.
    """
    if plan.prompts or plan.ranks:
        return None
    windowed = [sequence for sequence in plan.decodes if not needs_host(sequence)]
    single = [sequence for sequence in plan.decodes if needs_host(sequence)]
    pays = windowed and most_steps(len(windowed), single, most) >= FEWEST_STEPS
    return (windowed, single) if pays else None


def most_steps(windowed: int, single: Sequence[GenerateSequence], most: int) -> int:
    """Return the most steps of a window of so many sequences.

    single: sequences that get one token beside each window.  The window and the single step each
    read all weights.  So the window's steps grow with the share of the batch that it computes, and
    the others never wait for more than `most` steps.  An urgent one waits for fewer.
    """
    if not single:
        return most
    if any(sequence.job.request.urgent for sequence in single):
        most = min(most, STEPS_BESIDE_URGENT)
    return min(most, windowed // len(single))


def needs_host(sequence: GenerateSequence) -> bool:
    """Whether the device cannot continue a sequence by itself.

    The host is needed for log-probabilities, beams, adapters and what `LogitsProcessors.need_host`
    names. It is also needed until `min_tokens` are generated, because end tokens are blocked.
    """
    params = sequence.sampling
    return (
        params.logprobs is not None
        or params.beams is not None
        or LogitsProcessors.need_host(params)
        or len(sequence.generated) < params.min_tokens
        or sequence.job.request.adapter is not None
    )


def window_length(left: Sequence[int], most: int, *, crowded: bool) -> int:
    """Return the steps of a window, up to `most`; 0 where no sequence has a step left.

    left: the most steps that each sequence still has.  crowded: requests wait for slots.  A slot
    without a sequence costs its share of a step.  A step that the host launches kernel by kernel,
    to add one request, costs several steps.  So a window ends when one step of a slot in
    IDLE_SHARE would compute nothing.
    """
    steps = min(most, max(left))
    while crowded and IDLE_SHARE * sum(max(0, steps - own) for own in left) > steps * len(left):
        steps -= 1
    return steps
