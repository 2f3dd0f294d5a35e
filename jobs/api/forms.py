"""A multipart form with one file, parsed while it arrives.

The parser calls back with pieces of headers and data. The bytes of the file are collected for
somebody who takes them away; nothing else that grows is kept.
"""

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from nightjar.jobs.api.body import RefusedRequestError

FILE_FIELD = "file"
MAX_PARTS = 8
MAX_FIELD_BYTES = 1_024
# All that a form may hold beside the file: headers of 4 KiB, and the values of fields.
MAX_OVERHEAD_BYTES = MAX_PARTS * (8 * 4_224 + MAX_FIELD_BYTES)
_PLAIN_ENCODINGS = (b"", b"binary", b"7bit", b"8bit")
_SHOWN = 64  # characters of a name in a message


class UploadForm:
    """One form: some fields with short values, and the field `file`.

    fields: The values that are whole.
    filename: What the sender calls the file; None before the file begins, "" without a name.
    data: Bytes of the file that have arrived and were not taken yet.
    """

    def __init__(self, content_type: str, known_fields: tuple[str, ...]) -> None:
        """Raises RefusedRequestError if the type of the content is not that of a form."""
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.data = bytearray()
        self._known_fields = known_fields
        self._complete = False
        self._parts = 0
        self._headers: dict[bytes, bytes] = {}
        self._header_name, self._header_value = b"", b""
        self._field = ""  # the one that is arriving
        self._value = bytearray()
        self._parser = MultipartParser(
            _boundary(content_type),
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._add_header_name,
                "on_header_value": self._add_header_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._begin_data,
                "on_part_data": self._add_data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )

    def feed(self, piece: bytes) -> None:
        """Parse the next piece of the body; raises RefusedRequestError."""
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise _broken(
                "is no multipart form, or its boundary is not the one that the Content-Type names"
            ) from error

    def take(self, size: int) -> bytes:
        """Up to `size` bytes of the file; they are not kept here any longer."""
        taken = bytes(memoryview(self.data)[:size])
        del self.data[:size]
        return taken

    def check_complete(self) -> None:
        """Raise RefusedRequestError unless the form has ended and holds a file."""
        if not self._complete:
            raise _broken(
                "ends before its closing boundary: a part of it is missing; send it again"
            )
        if self.filename is None:
            raise missing(FILE_FIELD)

    def _begin_part(self) -> None:
        self._headers = {}
        self._field, self._value = "", bytearray()

    def _add_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        self._headers[self._header_name.lower()] = self._header_value
        self._header_name, self._header_value = b"", b""

    def _begin_data(self) -> None:
        """Find out which field begins; its headers have arrived."""
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise _bad("too_many_fields", f"the form has more than {MAX_PARTS} fields")
        kind, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        if kind != b"form-data" or b"name" not in options:
            raise _broken("has a part without a name: Content-Disposition: form-data; name=...")
        self._field = name = options[b"name"].decode(errors="replace")
        shown = name[:_SHOWN]
        if name != FILE_FIELD and name not in self._known_fields:
            known = ", ".join((FILE_FIELD, *self._known_fields))
            raise _bad("unknown_field", f"the form has a field {shown!r}; known are {known}", shown)
        if name in self.fields or (name == FILE_FIELD and self.filename is not None):
            raise _bad("repeated_field", f"the form has the field {shown!r} twice", shown)
        encoding = self._headers.get(b"content-transfer-encoding", b"").strip().lower()
        if encoding not in _PLAIN_ENCODINGS:
            raise _bad(
                "unsupported_encoding",
                f"the field {shown!r} has a Content-Transfer-Encoding; send its bytes as they are",
                shown,
            )
        if name == FILE_FIELD:
            self.filename = options.get(b"filename", b"").decode(errors="replace")

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._field == FILE_FIELD:
            self.data += memoryview(data)[start:end]
            return
        if len(self._value) + end - start > MAX_FIELD_BYTES:
            message = f"the field {self._field!r} is longer than {MAX_FIELD_BYTES} bytes"
            raise _bad("field_too_long", message, self._field)
        self._value += data[start:end]

    def _end_part(self) -> None:
        if self._field == FILE_FIELD:
            return
        try:
            self.fields[self._field] = self._value.decode()
        except UnicodeDecodeError as error:
            message = f"the field {self._field!r} is not UTF-8"
            raise _bad("invalid_value", message, self._field) from error

    def _end(self) -> None:
        self._complete = True


def missing(name: str) -> RefusedRequestError:
    """The refusal of a form that lacks a field."""
    return _bad("missing_field", f"the form lacks the field {name!r}; send it as form-data", name)


def _boundary(content_type: str) -> bytes:
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data":
        message = "send the file as multipart/form-data, in the field 'file'"
        raise RefusedRequestError(415, "unsupported_content_type", message, "Content-Type")
    boundary = options.get(b"boundary", b"")
    if not 0 < len(boundary) <= 70 or not boundary.isascii():
        message = "names no boundary of 1 to 70 ASCII characters; let the HTTP client write it"
        raise _bad("invalid_form", f"the Content-Type {message}", "Content-Type")
    return boundary


def _broken(fault: str) -> RefusedRequestError:
    return _bad("invalid_form", f"the body {fault}")


def _bad(code: str, message: str, param: str | None = None) -> RefusedRequestError:
    return RefusedRequestError(400, code, message, param)
