"""What a request names: prompt vectors, whose rows replace `<|PROMPT|>`, and a LoRA adapter."""

from collections.abc import Callable, Collection, Mapping

from nightjar.checkpoints import PROMPT_TOKEN
from nightjar.jobs.vector_records import LORA, VECTORS, PromptVector
from nightjar.pipeline.planning.context_limit import EncodeError

VectorLookup = Callable[[Collection[str], str], Mapping[str, PromptVector]]
"""From references and the id of their job to the versions that they mean, without their data."""

_FIELDS = {VECTORS: ("prompt_vector", "prompt vector"), LORA: ("adapter", "LoRA adapter")}
"""The body's field that names each kind, and what messages call it."""

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
    vectors = _named(reference, VECTORS, fingerprint, found)
    if vectors is None:
        return None
    if vectors.width != width:
        raise EncodeError(
            "invalid_value",
            f"the prompt vector {vectors.name!r} is {vectors.width} wide; this model needs {width}",
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
    return _named(reference, LORA, fingerprint, found)


def _named(
    reference: str | None,
    kind: str,
    fingerprint: str | None,
    found: Mapping[str, PromptVector],
) -> PromptVector | None:
    """Return what a field of this kind names; checked as the two functions above say."""
    if reference is None:
        return None
    field, noun = _FIELDS[kind]
    shown, named = repr(reference[:80]), found.get(reference)
    code, wrong = "invalid_value", None
    if named is None:
        code, wrong = f"{field}_not_found", f"no {noun} is registered under the name {shown}"
    elif named.kind != kind:
        other_field, other_noun = _FIELDS[named.kind]
        wrong = f"{shown} is the name of a {other_noun}; give it in {other_field}"
    elif None not in (fingerprint, named.fingerprint) and named.fingerprint != fingerprint:
        wrong = f"the {noun} {shown} is of another model; make one for this model"
    if wrong is not None:
        raise EncodeError(code, wrong, f"body.{field}")
    return named


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
