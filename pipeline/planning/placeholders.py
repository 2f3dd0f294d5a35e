"""`<|PROMPT|>` in a text: finds the named prompt vectors and puts their rows into the token ids."""

from collections.abc import Callable

from nightjar.checkpoints import PROMPT_TOKEN
from nightjar.jobs.records import PromptVector
from nightjar.pipeline.planning.context_limit import EncodeError

VectorLookup = Callable[[str], PromptVector | None]

PLACEHOLDER = -1
"""Stands for `<|PROMPT|>` until the vectors' rows are known; no tokenizer gives it."""


def join_at_placeholders(pieces: list[list[int]]) -> list[int]:
    """Join the token ids of the pieces between placeholders."""
    ids, *others = pieces
    for piece in others:
        ids.append(PLACEHOLDER)
        ids.extend(piece)
    return ids


def named_vectors(name: str | None, width: int, find: VectorLookup) -> PromptVector | None:
    """Return the prompt vectors that a request names; None where it names none.

    Args:
        name: The body's `prompt_vector`.
        width: The model's hidden size.
        find: Looks the name up.

    Raises:
        EncodeError: The name is not registered, or its vectors are not for this model.
    """
    if name is None:
        return None
    vectors = find(name)
    if vectors is None:
        raise EncodeError(
            "prompt_vector_not_found",
            f"no prompt vector is registered under the name {name[:80]!r}",
            "body.prompt_vector",
        )
    if vectors.width != width:
        raise EncodeError(
            "invalid_value",
            f"the prompt vector {name[:80]!r} is {vectors.width} wide; this model needs {width}",
            "body.prompt_vector",
        )
    return vectors


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
