"""Receipts: what an answer was computed with, so that it can be computed again."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from nightjar import __version__
from nightjar.checkpoints import ModelDirectory
from nightjar.jobs.answer_shapes import Receipt
from nightjar.jobs.equality import derived_seed
from nightjar.jobs.records import ClaimedRequest, NewResult
from nightjar.jobs.states import RequestKind


@dataclass(frozen=True, slots=True)
class Receipts:
    """Writes receipts of one model.

    model: its fingerprint.  tokenizer: the SHA-256 of its tokenizer.json.
    """

    model: str
    tokenizer: str

    @staticmethod
    def of(directory: ModelDirectory) -> "Receipts":
        """Return what writes the receipts of a model's answers. Raises OSError."""
        data = (directory.path / "tokenizer.json").read_bytes()
        return Receipts(directory.fingerprint, hashlib.sha256(data).hexdigest())

    def add(
        self,
        result: NewResult,
        request: ClaimedRequest,
        precision: str,
        digests: Mapping[str, str | None],
    ) -> None:
        """Write the receipt into the body of a success.

        precision: with the plan, where there is one.  digests: the SHA-256 of the prompt vectors
        and of the adapter that the request names.
        """
        if result.body is None:
            return
        receipt: Receipt = {
            "model": self.model,
            "tokenizer": self.tokenizer,
            "precision": precision,
            "version": __version__,
        }
        vectors, adapter = request.prompt_vector, request.adapter
        if vectors is not None and (digest := digests.get(vectors)) is not None:
            receipt["prompt_vector"] = {"name": vectors, "sha256": digest}
        if adapter is not None and (digest := digests.get(adapter)) is not None:
            receipt["adapter"] = {"name": adapter, "sha256": digest}
        if request.kind is RequestKind.GENERATE:
            seed = request.body["seed"]
            receipt["seed"] = derived_seed(request.custom_id) if seed is None else seed
        result.body["receipt"] = receipt
