"""Reuse answers of earlier jobs: find them while planning, keep them after they have landed.

The key of an answer is the model's content and name, Nightjar's version, the precision, and the
request as the engine sees it. A request may name its content: its texts do not count then.
"""

import hashlib
import json
import logging
import threading
from collections.abc import Iterable, Sequence
from functools import lru_cache

import nightjar
from nightjar.checkpoints import ModelDirectory
from nightjar.compute_config import precision_with_cache
from nightjar.jobs.equality import derived_seed, draws
from nightjar.jobs.errors import StoreError
from nightjar.jobs.records import (
    CachedAnswer,
    CachedScore,
    ClaimedRequest,
    EncodedRequest,
    JsonObject,
    NewResult,
    QueuedRequest,
)
from nightjar.jobs.states import Reuse
from nightjar.jobs.store import Store
from nightjar.jobs.store.segments import pack_segments
from nightjar.pipeline.settings import Settings
from nightjar.requests import SAME_IN_BODY, SamplingParams

logger = logging.getLogger(__name__)

_DAY_S = 86_400.0
_KEPT_BETWEEN_TRIMS = 128  # micro-batches; so often the cache is cut to its bounds
_PRECISIONS_OF_AUTO = ("fp32", "bf16")


class ResultCache:
    """Finds and keeps answers for the planner and the GPU workers.

    If the cache's database is away, that is logged and everything is computed.

    Args:
        settings: The cache's database and bounds, and what is served.
        store: Holds the prompt vectors, and the answers unless the settings name another
            database.
        model: The model; its files are read once, for their fingerprint.
        name: The model's name in requests and answers.
    """

    def __init__(self, settings: Settings, store: Store, model: ModelDirectory, name: str) -> None:
        self._vectors = store.vectors
        url = settings.result_cache_url
        self._answers = (
            store if url is None else Store(url.get_secret_value(), connections=2)
        ).cache
        self._most_rows = settings.result_cache_rows
        self._most_scores = settings.result_cache_scores
        self._oldest_s = settings.result_cache_days * _DAY_S
        self._scope = f"{nightjar.__version__}\n{model.fingerprint}\n{name}"
        self._accepted = _accepted_precisions(settings)
        self._vectors_sha256 = lru_cache(1024)(self._read_vectors_sha256)
        self._kept = 0
        self._lock = threading.Lock()

    def find(self, asked: Iterable[tuple[QueuedRequest, EncodedRequest]]) -> list[NewResult]:
        """Return the known answers to a plan's requests."""
        ids: dict[str, list[int]] = {}
        try:
            for request, encoded in asked:
                digest = self._digest(request, encoded)
                for precision in self._accepted:
                    ids.setdefault(self._key(digest, precision), []).append(request.id)
            found = self._answers.find_answers(list(ids), self._oldest_s)
        except StoreError as error:
            logger.warning("nothing is reused: %s", error, extra={"action": "cache_unread"})
            return []
        # Where "auto" may choose either precision, an answer in either is used; one a request.
        answers = {id_: item for key, item in found.items() for id_ in ids[key]}
        return [_result(id_, item) for id_, item in answers.items()]

    def keep(
        self, requests: Sequence[ClaimedRequest], results: Sequence[NewResult], precision: str
    ) -> None:
        """Keep answers that were computed in this precision and have landed."""
        asked = {request.id: request for request in requests}
        try:
            self._answers.keep_answers(
                [
                    self._answer(asked[item.request_id], item, item.body, precision)
                    for item in results
                    if item.body is not None and item.reused is None
                ]
            )
            if self._is_time_to_trim():
                self._answers.drop_old(self._most_rows, self._most_scores, self._oldest_s)
        except StoreError as error:
            logger.warning("answers are not kept: %s", error, extra={"action": "cache_unwritten"})

    def score_keys(self, ranking: ClaimedRequest, precision: str) -> list[str]:
        """Return the key of each document's score."""
        query, *documents = ranking.segments
        asked = pair_digests(query, documents, self._named_by(ranking))
        return [self._key(digest, precision) for digest in asked]

    def find_scores(self, keys: Sequence[str]) -> dict[str, CachedScore]:
        """Return the known scores, by their keys."""
        try:
            return self._answers.find_scores(keys, self._oldest_s)
        except StoreError as error:
            logger.warning("no score is reused: %s", error, extra={"action": "cache_unread"})
            return {}

    def keep_scores(self, scores: Sequence[CachedScore]) -> None:
        """Keep computed scores."""
        try:
            self._answers.keep_scores(scores)
        except StoreError as error:
            logger.warning("scores are not kept: %s", error, extra={"action": "cache_unwritten"})

    def _answer(
        self, request: ClaimedRequest, item: NewResult, body: JsonObject, precision: str
    ) -> CachedAnswer:
        digest = self._digest(request, request)
        return CachedAnswer(
            key=self._key(digest, precision),
            # A request with its own answer in the cache is reused as a whole.
            body={name: value for name, value in body.items() if name != "reused_documents"},
            prompt_tokens=item.prompt_tokens,
            completion_tokens=item.completion_tokens,
            requested_tokens=item.requested_tokens,
            saved_tokens=item.saved_tokens,
            finish_reason=item.finish_reason,
        )

    def _digest(
        self,
        request: QueuedRequest | ClaimedRequest,
        planned: EncodedRequest | ClaimedRequest,
    ) -> bytes:
        named = self._named_by(planned)
        return answer_digest(request.body, request.custom_id, planned.segments, named)

    def _named_by(self, planned: EncodedRequest | ClaimedRequest) -> str | None:
        """Return the digests of the prompt vectors and the adapter; None where there are none."""
        vectors, adapter = planned.prompt_vector, planned.adapter
        named = None if vectors is None else self._vectors_sha256(vectors)
        if adapter is None:
            return named
        return f"{named or ''}+{self._vectors_sha256(adapter)}"

    def _key(self, digest: bytes, precision: str) -> str:
        scope = f"{self._scope}\n{precision}\n".encode()
        return hashlib.sha256(scope + digest).hexdigest()

    def _read_vectors_sha256(self, prompt_vector: str) -> str:
        """Return the digest of the vectors, or of the adapter, called "name@version"."""
        found = self._vectors.resolve([prompt_vector]).get(prompt_vector)
        return prompt_vector if found is None else found.sha256

    def _is_time_to_trim(self) -> bool:
        with self._lock:
            self._kept += 1
            return self._kept % _KEPT_BETWEEN_TRIMS == 1


def open_cache(
    settings: Settings, store: Store, model: ModelDirectory, name: str
) -> ResultCache | None:
    """Open the cache for a model, if the settings ask for one."""
    return ResultCache(settings, store, model, name) if settings.reuse_results else None


def _accepted_precisions(settings: Settings) -> Sequence[str]:
    """Return the precisions in which a usable answer may have been computed."""
    if settings.engine == "fake":
        return ("fake",)
    dtypes = _PRECISIONS_OF_AUTO if settings.dtype == "auto" else (settings.dtype,)
    return [precision_with_cache(dtype, settings.kv_cache_dtype) for dtype in dtypes]


def _result(request_id: int, item: CachedAnswer) -> NewResult:
    return NewResult(
        request_id=request_id,
        status_code=200,
        body=item.body,
        prompt_tokens=item.prompt_tokens,
        completion_tokens=item.completion_tokens,
        requested_tokens=item.requested_tokens,
        saved_tokens=item.saved_tokens,
        finish_reason=item.finish_reason,
        reused=Reuse.CACHE,
    )


# Fields that the token ids hold already.
_ASKED_IN_TOKENS = frozenset(
    {"chat_template_kwargs", "documents", "messages", "model", "prompt", "prompt_vector", "query"}
    | {"adapter"}  # its digest is
)
# The sampling fields of the first digests: each is part of the digest, whatever its value. A later
# field is part of it only where it is not off, so that earlier answers are still found.
_FIRST_FIELDS = frozenset(
    {"max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
    | {"presence_penalty", "frequency_penalty", "min_tokens", "ignore_eos", "n", "logprobs"}
)
_OFF: JsonObject = {
    "content_key": None,
    **{name: getattr(SamplingParams(1), name) for name in set(SAME_IN_BODY) - _FIRST_FIELDS},
}

_encode = json.JSONEncoder(sort_keys=True).encode


def answer_digest(
    body: JsonObject,
    custom_id: str,
    segments: Sequence[Sequence[int]],
    vectors_sha256: str | None,
) -> bytes:
    """Return a digest of 32 bytes, equal for requests that one model answers alike.

    segments: the planned token ids. Of a request with a content key only their number counts, as
    its answer has a score for each document. vectors_sha256: the digests of the bytes of the
    prompt vectors and of the adapter, whatever their names and versions.
    """
    asked = {
        name: value
        for name, value in body.items()
        if name not in _ASKED_IN_TOKENS and (name not in _OFF or value != _OFF[name])
    }
    asked["seed"] = None
    if draws(body):
        seed = body.get("seed")
        asked["seed"] = derived_seed(custom_id) if seed is None else seed
    asked["shape"] = "chat" if "messages" in body else "text"  # of the answer
    if body.get("return_documents"):
        asked["documents"] = body["documents"]  # they are part of the answer
    parts = [_encode(asked).encode(), (vectors_sha256 or "").encode()]
    has_key = body.get("content_key") is not None  # it is in `asked`
    parts.append(b"segments %d" % len(segments) if has_key else pack_segments(segments))
    return _digest_of(parts)


def pair_digests(
    query: Sequence[int], documents: Iterable[Sequence[int]], vectors_sha256: str | None
) -> list[bytes]:
    """Return a digest of 32 bytes for each document after this query, in any request."""
    asked = _digest_of([(vectors_sha256 or "").encode(), pack_segments([query])])
    return [_digest_of([b"pair", asked, pack_segments([document])]) for document in documents]


def _digest_of(parts: Iterable[bytes]) -> bytes:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "big") + part)
    return whole.digest()
