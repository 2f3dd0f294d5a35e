"""What the routes in the shape of OpenAI's and Cohere's APIs answer, as types; see schemas.py."""

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from nightjar.jobs.answer_shapes import CallAnswer, RankedDocument
from nightjar.jobs.file_records import FilePurpose
from nightjar.jobs.states import BatchStatus


class FilePayload(TypedDict):
    """A file without its content; moments are whole seconds since 1970."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: FilePurpose
    status: Literal["processed"]


class FileList(TypedDict):
    """A page of files; ask on with `after=last_id` while `has_more` is true."""

    object: Literal["list"]
    data: list[FilePayload]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(TypedDict):
    """A file that is gone."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchError(TypedDict):
    """Why the file of a batch cannot be used."""

    code: str
    line: int | None
    message: str
    param: str | None


class BatchErrors(TypedDict):
    """The first reasons why the file of a batch cannot be used."""

    object: Literal["list"]
    data: list[BatchError]


class BatchCounts(TypedDict):
    """Rows of a batch by outcome; `cancelled` ones were not computed."""

    total: int
    completed: int
    failed: int
    cancelled: int


class CachedTokens(TypedDict):
    """Part of OpenAI's usage; always 0."""

    cached_tokens: int


class ReasoningTokens(TypedDict):
    """Part of OpenAI's usage; always 0."""

    reasoning_tokens: int


class BatchUsage(TypedDict):
    """Tokens of a batch's finished rows."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class BatchPayload(TypedDict):
    """A batch; moments are whole seconds since 1970.

    Since `purged_at` its rows and result files are gone.
    """

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    usage: BatchUsage | None
    metadata: dict[str, str]
    strict: bool
    priority: int
    job_id: str
    purged_at: int | None


class BatchList(TypedDict):
    """A page of batches, newest first; ask on with `after=last_id` while `has_more` is true."""

    object: Literal["list"]
    data: list[BatchPayload]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ApiVersion(TypedDict):
    """Part of Cohere's `meta`."""

    version: str


class BilledUnits(TypedDict):
    """Part of Cohere's `meta`; always 1."""

    search_units: int


class InputTokens(TypedDict):
    """Part of Cohere's `meta`: tokens of the query and of all documents."""

    input_tokens: int


class RankingMeta(TypedDict):
    """What Cohere's API says of a ranking beside its results."""

    api_version: ApiVersion
    billed_units: BilledUnits
    tokens: InputTokens


class Ranking(CallAnswer):
    """An answer of Cohere's or Jina's rerank, best document first."""

    object: Literal["rerank"]
    results: list[RankedDocument]
    meta: RankingMeta
    reused_documents: NotRequired[int]
    document_count: NotRequired[int]


class ModelPayload(TypedDict):
    """A model that jobs may name; `workers` GPU workers serve it now."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    context_length: int
    fingerprint: str
    served: bool
    workers: int


class ModelList(TypedDict):
    """All models, those that are served now first."""

    object: Literal["list"]
    data: list[ModelPayload]
