"""Scores of documents from hidden states."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nightjar.gpu_worker.models import Decoder


def fed_tokens(document: Sequence[int]) -> Sequence[int]:
    """The tokens of a document that are computed: nothing follows the last one."""
    return document[:-1]


def score_documents(
    model: Decoder,
    query_hidden: Tensor,
    hidden: Tensor,
    documents: Sequence[Sequence[Sequence[int]]],
) -> list[list[np.ndarray]]:
    """NLL of every scored token: for each query, for each of its documents, float64[n].

    query_hidden: [Q, H], the last hidden state of each query; hidden: [R, H], the rows of all
    documents' fed tokens, packed.  A document's first token is scored from its query's row, each
    other from the row before it.  Prompt vectors in a document are not scored.
    """
    vocab_size = model.config.vocab_size
    sources, targets, sizes = [], [], []
    row = len(documents)
    for query, group in enumerate(documents):
        for document in group:
            scored = np.asarray(document, dtype=np.int64)
            source = np.arange(row - 1, row - 1 + len(document), dtype=np.int64)
            source[0] = query
            row += len(document) - 1
            real = scored < vocab_size
            sources.append(source[real])
            targets.append(scored[real])
            sizes.append(int(real.sum()))
    nll = _pairwise_nll(
        model,
        torch.cat((query_hidden, hidden)),
        np.concatenate(sources),
        np.concatenate(targets),
    )
    pieces = iter(np.split(nll, np.cumsum(sizes)[:-1]))
    return [[next(pieces) for _ in group] for group in documents]


def _pairwise_nll(
    model: Decoder, hidden: Tensor, rows: np.ndarray, targets: np.ndarray
) -> np.ndarray:
    """NLL of targets[i] after hidden[rows[i]], whatever the order of the rows: float64[M]."""
    order = np.argsort(rows, kind="stable")
    found = model.token_nll(hidden, torch.from_numpy(rows[order]), torch.from_numpy(targets[order]))
    nll = np.empty(rows.shape[0], dtype=np.float64)
    nll[order] = found.numpy()
    return nll
