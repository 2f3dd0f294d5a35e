"""Files over HTTP, in the shape of OpenAI's API: upload, list, show, read and delete them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from nightjar.jobs.api import openai_examples as examples
from nightjar.jobs.api.body import RefusedRequestError
from nightjar.jobs.api.caller import Reader, Submitter
from nightjar.jobs.api.documenting import documented, errors, example_content
from nightjar.jobs.api.file_uploads import ANCHOR, CREATED_AT, PURPOSE, SECONDS, FileUploads
from nightjar.jobs.api.forms import FILE_FIELD
from nightjar.jobs.api.forwarding import UploadForwarder
from nightjar.jobs.api.openai_schemas import DeletedFile, FileList, FilePayload
from nightjar.jobs.api.results import is_id
from nightjar.jobs.errors import UnknownFileError
from nightjar.jobs.file_records import FileOrder, FilePurpose, StoredFile
from nightjar.jobs.lines.batch_lines import json_pieces
from nightjar.jobs.records import JsonObject
from nightjar.jobs.store import Store

MAX_FILES = 10_000  # of a page, as OpenAI's
_LONGEST_SHOWN = 64

# FastAPI cannot derive it: the form is not read by FastAPI.
_FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": [FILE_FIELD, PURPOSE],
                    "properties": {
                        FILE_FIELD: {"type": "string", "format": "binary"},
                        PURPOSE: {"type": "string", "enum": [FilePurpose.BATCH.value]},
                        ANCHOR: {"type": "string", "enum": [CREATED_AT]},
                        SECONDS: {"type": "integer", "minimum": 3_600, "maximum": 2_592_000},
                    },
                    "additionalProperties": False,
                }
            }
        },
    }
}


FileId = Annotated[str, Path(description="The id of a file.", examples=["file-019a8f0e6c1b2d"])]


class FileContent(StreamingResponse):
    """The bytes of a file, as they are read."""

    media_type = "application/octet-stream"


def uploading_router(uploads: FileUploads, forwarder: UploadForwarder | None) -> APIRouter:
    """`POST /v1/files`; `forwarder` hands uploads on to another process."""
    router = APIRouter(prefix="/v1/files", tags=["files"])

    @router.post(
        "",
        response_model=FilePayload,
        responses=documented(examples.FILE, 400, 408, 413, 415),
        openapi_extra=_FORM,
    )
    async def create_file(request: Request, caller: Submitter) -> Response:
        """Store the file of a form for a batch."""
        if forwarder is not None:
            return await forwarder.forward(request)
        return JSONResponse(file_payload(await uploads.receive(request, caller.tenant)))

    return router


def files_router(store: Store) -> APIRouter:
    """Lists, shows, reads and deletes files."""
    router = APIRouter(prefix="/v1/files", tags=["files"])

    @router.get("", response_model=FileList, responses=documented(examples.FILE_LIST, 400))
    def list_files(
        caller: Reader,
        limit: Annotated[int, Query(ge=1, le=MAX_FILES)] = MAX_FILES,
        after: str | None = None,
        order: FileOrder = "desc",
        purpose: str | None = None,
    ) -> JSONResponse:
        """The caller's files; ask on with `after=last_id` while `has_more` is true."""
        found: list[StoredFile] = []
        if purpose is None or purpose in list(FilePurpose):
            of = None if purpose is None else FilePurpose(purpose)
            try:
                behind = None if after is None else checked_file_id(after)
                found = store.files.newest(limit + 1, caller.tenant, behind, of, order)
            except UnknownFileError as error:
                message = f"after: this list has no file {error.file_id!r}"
                raise RefusedRequestError(400, "invalid_after", message, "after") from error
        return JSONResponse(list_payload([file_payload(one) for one in found], limit))

    @router.get("/{file_id}", response_model=FilePayload, responses=documented(examples.FILE, 404))
    def show_file(file_id: FileId, caller: Reader) -> JSONResponse:
        """A file without its content."""
        found = store.files.get(checked_file_id(file_id), caller.tenant)
        return JSONResponse(file_payload(found))

    @router.delete(
        "/{file_id}",
        response_model=DeletedFile,
        responses=documented(examples.DELETED_FILE, 404, 409),
    )
    def delete_file(file_id: FileId, caller: Submitter) -> JSONResponse:
        """Delete a file; the results that a result file shows stay with their job."""
        store.files.delete(checked_file_id(file_id), caller.tenant)
        gone: DeletedFile = {"id": file_id, "object": "file", "deleted": True}
        return JSONResponse(gone)

    @router.get(
        "/{file_id}/content",
        response_class=FileContent,
        responses={200: {"content": example_content("", FileContent.media_type)}, **errors(404)},
    )
    def read_file(file_id: FileId, caller: Reader) -> StreamingResponse:
        """The bytes of a file, in pieces."""
        found = store.files.get(checked_file_id(file_id), caller.tenant)
        headers = {
            "Content-Disposition": f"attachment; filename*=UTF-8''{quote(found.filename, safe='')}",
            "X-Content-Type-Options": "nosniff",
        }
        if found.sha256 is not None:
            headers |= {"Content-Length": str(found.bytes), "ETag": f'"{found.sha256}"'}
        return FileContent(content_of(store, found), headers=headers)

    return router


def content_of(store: Store, found: StoredFile) -> Iterator[bytes]:
    """The content of a file, in pieces; that of a result file is read from its job's results."""
    if found.job_id is None or found.outcome is None:
        return store.files.parts(found.id)
    return json_pieces(store.results.iterate_raw(found.job_id, outcome=found.outcome))


def file_payload(found: StoredFile) -> FilePayload:
    """A file as OpenAI's API shows it; moments are whole seconds since 1970."""
    expires_at = None if found.expires_at is None else int(found.expires_at.timestamp())
    return {
        "id": found.id,
        "object": "file",
        "bytes": found.bytes,
        "created_at": int(found.created_at.timestamp()),
        "expires_at": expires_at,
        "filename": found.filename,
        "purpose": found.purpose,
        "status": "processed",  # no other file is found
    }


def list_payload(data: Sequence[Mapping[str, Any]], limit: int) -> JsonObject:
    """A page of the first `limit` objects, in OpenAI's shape; if there are more, it says so."""
    page = data[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(data) > limit,
    }


def checked_file_id(file_id: str) -> str:
    """The id, if a file can have it; raises UnknownFileError."""
    if not is_id(file_id):
        raise UnknownFileError(file_id[:_LONGEST_SHOWN])
    return file_id
