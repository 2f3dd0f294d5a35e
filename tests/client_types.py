"""Types as a client generator makes them of the OpenAPI document, only strict.

A struct refuses a field that the document does not name, and misses one that it promises.
"""

from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import Any, Literal

import msgspec

Schema = Mapping[str, Any]
_PLAIN: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "null": None,
}


class ClientTypes:
    """The types of a document's schemas, by name."""

    def __init__(self, document: Schema) -> None:
        self._document = document
        self._made: dict[str, Any] = {}

    def of_answer(self, path: str, method: str, status: int) -> Any:
        """The type of an answer in JSON; raises KeyError where the document has none."""
        answers = self._document["paths"][path][method.lower()]["responses"]
        return self.of(answers[str(status)]["content"]["application/json"]["schema"])

    def of(self, schema: Schema) -> Any:  # noqa: PLR0911 - one return for each kind of schema
        """The type of a schema."""
        if "$ref" in schema:
            return self._named(schema["$ref"].rpartition("/")[2])
        if "const" in schema:
            return Literal[schema["const"]]
        if "enum" in schema:
            return Literal[tuple(schema["enum"])]
        if "anyOf" in schema:
            return reduce(or_, (self.of(one) for one in schema["anyOf"]))
        kind = schema.get("type")
        if kind == "array":
            return list[self.of(schema["items"])]  # type: ignore[misc]
        if kind == "object":
            more = schema.get("additionalProperties", {})
            return dict[str, self.of(more) if isinstance(more, dict) else Any]  # type: ignore[misc]
        return Any if kind is None else _PLAIN[kind]

    def _named(self, name: str) -> Any:
        if name not in self._made:
            schema = self._document["components"]["schemas"][name]
            if "properties" in schema:
                self._made[name] = self._struct(name, schema)
            else:
                self._made[name] = self.of(schema)
        return self._made[name]

    def _struct(self, name: str, schema: Schema) -> type[msgspec.Struct]:
        required = schema.get("required", [])
        fields: list[Any] = []
        for field, inner in schema["properties"].items():
            made = self.of(inner)
            unset = (made | msgspec.UnsetType, msgspec.UNSET)
            fields.append((field, made) if field in required else (field, *unset))
        return msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
