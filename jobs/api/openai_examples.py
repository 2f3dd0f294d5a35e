"""Examples of the routes in the shape of other APIs; mypy compares them with the types."""

from nightjar.jobs.answer_shapes import ChatCompletion, Completion
from nightjar.jobs.api.openai_schemas import (
    BatchList,
    BatchPayload,
    DeletedFile,
    FileList,
    FilePayload,
    ModelList,
    ModelPayload,
    Ranking,
)
from nightjar.jobs.file_records import FilePurpose
from nightjar.jobs.states import BatchStatus

FILE: FilePayload = {
    "id": "file-019a8f0e6c1b2d",
    "object": "file",
    "bytes": 1024,
    "created_at": 1795474162,
    "expires_at": 1798066162,
    "filename": "in.jsonl",
    "purpose": FilePurpose.BATCH,
    "status": "processed",
}
FILE_LIST: FileList = {
    "object": "list",
    "data": [FILE],
    "first_id": FILE["id"],
    "last_id": FILE["id"],
    "has_more": False,
}
DELETED_FILE: DeletedFile = {"id": FILE["id"], "object": "file", "deleted": True}

NEW_BATCH = {
    "input_file_id": FILE["id"],
    "endpoint": "/v1/completions",
    "completion_window": "24h",
}
BATCH: BatchPayload = {
    "id": "batch_019a8f0e6c1b2d",
    "object": "batch",
    "endpoint": "/v1/completions",
    "model": "tiny",
    "errors": None,
    "input_file_id": FILE["id"],
    "completion_window": "24h",
    "status": BatchStatus.IN_PROGRESS,
    "output_file_id": None,
    "error_file_id": None,
    "created_at": 1795474162,
    "in_progress_at": 1795474163,
    "expires_at": 1795560562,
    "finalizing_at": None,
    "completed_at": None,
    "failed_at": None,
    "expired_at": None,
    "cancelling_at": None,
    "cancelled_at": None,
    "request_counts": {"total": 3, "completed": 1, "failed": 0, "cancelled": 0},
    "usage": {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 12,
    },
    "metadata": {"team": "search"},
    "strict": False,
    "priority": 0,
    "job_id": "job_019a8f0e6c1b2d",
    "purged_at": None,
}
BATCH_LIST: BatchList = {
    "object": "list",
    "data": [BATCH],
    "first_id": BATCH["id"],
    "last_id": BATCH["id"],
    "has_more": False,
}

NEW_COMPLETION = {"model": "tiny", "prompt": "Owls hunt", "max_tokens": 16, "temperature": 0}
COMPLETION: Completion = {
    "id": "cmpl-019a8f0e6c1b2d",
    "object": "text_completion",
    "created": 1795474162,
    "model": "tiny",
    "precision": "fp32",
    "choices": [{"index": 0, "text": " at night.", "logprobs": None, "finish_reason": "stop"}],
    "usage": {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "requested_tokens": 16,
        "saved_tokens": 13,
    },
}
NEW_CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "What do owls do?"}]}
CHAT: ChatCompletion = {
    "id": "chatcmpl-019a8f0e6c1b2d",
    "object": "chat.completion",
    "created": COMPLETION["created"],
    "model": COMPLETION["model"],
    "precision": COMPLETION["precision"],
    "usage": COMPLETION["usage"],
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "They hunt at night."},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ],
}
NEW_RANKING = {"model": "tiny", "query": "Who hunts at night?", "documents": ["owls", "larks"]}
RANKING: Ranking = {
    "id": "rerank-019a8f0e6c1b2d",
    "object": "rerank",
    "created": 1795474162,
    "model": "tiny",
    "precision": "fp32",
    "results": [
        {"index": 0, "relevance_score": 0.31, "mean_nll": 1.17, "token_count": 2},
        {"index": 1, "relevance_score": 0.12, "mean_nll": 2.12, "token_count": 2},
    ],
    "usage": {"prompt_tokens": 9, "completion_tokens": 0, "total_tokens": 9},
    "meta": {
        "api_version": {"version": "2"},
        "billed_units": {"search_units": 1},
        "tokens": {"input_tokens": 9},
    },
}

MODEL: ModelPayload = {
    "id": "tiny",
    "object": "model",
    "created": 1795474162,
    "owned_by": "nightjar",
    "context_length": 512,
    "fingerprint": "3f2a9c0d1b7e",
    "served": True,
    "workers": 1,
}
MODEL_LIST: ModelList = {"object": "list", "data": [MODEL]}
