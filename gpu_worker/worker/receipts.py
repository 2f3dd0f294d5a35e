"""Receipts: what an answer was computed with, so that it can be computed again."""

import hashlib
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
        self, result: NewResult, request: ClaimedRequest, precision: str, vectors: str | None
    ) -> None:
        """Write the receipt into the body of a success.

        precision: with the plan, where there is one.  vectors: the SHA-256 of the prompt vectors.
        """
        if result.body is None:
            return
        receipt: Receipt = {
            "model": self.model,
            "tokenizer": self.tokenizer,
            "precision": precision,
            "version": __version__,
        }
        if request.prompt_vector is not None and vectors is not None:
            receipt["prompt_vector"] = {"name": request.prompt_vector, "sha256": vectors}
        if request.kind is RequestKind.GENERATE:
            seed = request.body["seed"]
            receipt["seed"] = derived_seed(request.custom_id) if seed is None else seed
        result.body["receipt"] = receipt
