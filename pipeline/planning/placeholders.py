"""What a request names: prompt vectors, whose rows replace `<|PROMPT|>`, and a LoRA adapter."""

from collections.abc import Callable, Collection, Mapping

from nightjar.checkpoints import PROMPT_TOKEN
from nightjar.jobs.vector_records import LORA, VECTORS, PromptVector
from nightjar.pipeline.planning.context_limit import EncodeError

VectorLookup = Callable[[Collection[str], str], Mapping[str, PromptVector]]
"""From references and the id of their job to the versions that they mean, without their data."""

PLACEHOLDER = -1
"""Stands for `<|PROMPT|>` until the vectors' rows are known; no tokenizer gives it."""


def join_at_placeholders(pieces: list[list[int]]) -> list[int]:
    """Join the token ids of the pieces between placeholders."""
    ids, *others = pieces
    for piece in others:
        ids.append(PLACEHOLDER)
        ids.extend(piece)
    return ids


def named_vectors(
    reference: str | None,
    width: int,
    fingerprint: str | None,
    found: Mapping[str, PromptVector],
) -> PromptVector | None:
    """Return the prompt vectors that a request names; None where it names none.

    Args:
        reference: The body's `prompt_vector`: NAME, NAME@VERSION or NAME@ALIAS.
        width: The model's hidden size.
        fingerprint: Of the model; None if it is not compared.
        found: The versions that references mean.

    Raises:
        EncodeError: The name is not registered, or its vectors are not for this model.
    """
    if reference is None:
        return None
    vectors = found.get(reference)
    if vectors is None:
        raise EncodeError(
            "prompt_vector_not_found",
            f"no prompt vector is registered under the name {reference[:80]!r}",
            "body.prompt_vector",
        )
    if vectors.kind != VECTORS:
        raise EncodeError(
            "invalid_value",
            f"{reference[:80]!r} is a LoRA adapter; name it in adapter",
            "body.prompt_vector",
        )
    if None not in (fingerprint, vectors.fingerprint) and vectors.fingerprint != fingerprint:
        raise EncodeError(
            "invalid_value",
            f"the prompt vector {reference[:80]!r} was trained for another model; train it again "
            "for this one",
            "body.prompt_vector",
        )
    if vectors.width != width:
        raise EncodeError(
            "invalid_value",
            f"the prompt vector {reference[:80]!r} is {vectors.width} wide; this model needs "
            f"{width}",
            "body.prompt_vector",
        )
    return vectors


def named_adapter(
    reference: str | None, fingerprint: str | None, found: Mapping[str, PromptVector]
) -> PromptVector | None:
    """Return the LoRA adapter that a request names; None where it names none.

    Args:
        reference: The body's `adapter`: NAME, NAME@VERSION or NAME@ALIAS.
        fingerprint: Of the model; None if it is not compared.
        found: The versions that references mean.

    Raises:
        EncodeError: The name is not registered, or its adapter is not for this model.
    """
    if reference is None:
        return None
    adapter = found.get(reference)
    if adapter is None:
        raise EncodeError(
            "adapter_not_found",
            f"no LoRA adapter is registered under the name {reference[:80]!r}",
            "body.adapter",
        )
    wrong = None
    if adapter.kind != LORA:
        wrong = f"{reference[:80]!r} are prompt vectors; name them in prompt_vector"
    elif None not in (fingerprint, adapter.fingerprint) and adapter.fingerprint != fingerprint:
        wrong = (
            f"the adapter {reference[:80]!r} was registered for another model; register it for "
            "this one"
        )
    if wrong is not None:
        raise EncodeError("invalid_value", wrong, "body.adapter")
    return adapter


def place_vectors(
    segments: list[list[int]], placeholders: int, vectors: PromptVector | None, first: int
) -> list[list[int]]:
    """Replace placeholders by ids from `first` on, one for each row of the vectors.

    The k-th placeholder reads row k. A single placeholder stands for all rows.

    Raises:
        EncodeError: There are not as many placeholders as rows, or no vectors for them.
    """
    if vectors is None:
        if placeholders:
            raise EncodeError(
                "missing_field",
                f"the text holds {PROMPT_TOKEN} but the body names no prompt_vector; "
                "name one, or take the token out",
                "body.prompt_vector",
            )
        return segments
    if placeholders not in (1, vectors.length):
        raise EncodeError(
            "invalid_value",
            f"the text holds {PROMPT_TOKEN} {placeholders} times; the prompt vector "
            f"{vectors.name!r} has {vectors.length} rows: write it once for all of them, "
            f"or {vectors.length} times",
            "body.prompt_vector",
        )
    rows = iter(range(first, first + vectors.length))
    placed = []
    for ids in segments:
        out: list[int] = []
        for token_id in ids:
            if token_id != PLACEHOLDER:
                out.append(token_id)
            elif placeholders == 1:
                out.extend(rows)
            else:
                out.append(next(rows))
        placed.append(out)
    return placed
