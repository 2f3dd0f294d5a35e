"""How each tensor of the converted model is put together from a source's tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nightjar.checkpoints.convert.arrays import (
    Piece,
    Recipe,
    Run,
    StoredArray,
    columns_in_order,
    rows_in_order,
)
from nightjar.checkpoints.convert.projections import (
    ROLES,
    FusedRows,
    head_runs,
    interleaved,
    joined,
    separate,
)
from nightjar.checkpoints.convert.shape import family_of
from nightjar.checkpoints.convert.source import Source
from nightjar.checkpoints.errors import CheckpointError
from nightjar.checkpoints.weights import TENSOR_NAMES


class RecipeBook:
    """Makes the recipes of one model.

    vocab_size: tokens of the tokenizer; rows beyond them pad the table and are left out.
    dtype: that of all tensors, or None to keep each one's own.
    """

    def __init__(self, source: Source, vocab_size: int, dtype: str | None) -> None:
        self._source = source
        self._shape = source.shape
        self._vocab_size = vocab_size
        self._dtype = dtype
        self._family = family_of(self._shape)
        self._names = TENSOR_NAMES[self._family]

    def recipes(self) -> list[Recipe]:
        """Return all recipes in the order of the model.

        Raises:
            CheckpointError: A tensor is missing, or its shards do not make its shape.
        """
        made = list(self._all())
        for recipe in made:
            recipe.check()
        return made

    def _all(self) -> Iterator[Recipe]:
        names, shape, prefix = self._names, self._shape, self._names.prefix
        table = (self._vocab_size, shape.hidden_size)
        yield self._table("tokens", f"{prefix}{names.tokens}.weight", table)
        if shape.rotary_share is None:
            positions = (shape.context_length, shape.hidden_size)
            yield self._plain("positions.weight", f"{prefix}{names.positions}.weight", positions)
        for layer in range(shape.n_layers):
            yield from self._layer(f"layers.{layer}.", f"{prefix}{names.layer}.{layer}.")
        yield from self._norm("last_norm", f"{prefix}{names.last_norm}", shape.hidden_size)
        if not shape.tied:
            yield self._table("head", f"{names.head}.weight", table)

    def _layer(self, source: str, target: str) -> Iterator[Recipe]:
        names, shape = self._names, self._shape
        yield from self._norm(
            f"{source}attention_norm", f"{target}{names.attention_norm}", shape.hidden_size
        )
        yield from self._query_key_value(source, target)
        width = shape.n_heads * shape.head_size
        yield from self._linear(
            f"{source}attention_out", f"{target}{names.attention_out}", shape.hidden_size, width
        )
        if shape.qk_norm:
            for name, norm in zip(("q_norm", "k_norm"), names.qk_norms, strict=True):
                for recipe in self._norm(f"{source}{name}", f"{target}{norm}", shape.head_size):
                    runs = head_runs(shape.head_size, self._pairs)
                    piece = Piece(recipe.pieces[0].stored, tuple(runs))
                    yield replace(recipe, pieces=(piece,), equal=())
        yield from self._norm(f"{source}mlp_norm", f"{target}{names.mlp_norm}", shape.hidden_size)
        yield from self._feed_forward(source, target)
        yield from self._linear(
            f"{source}mlp_out",
            f"{target}{names.mlp_out}",
            shape.hidden_size,
            shape.intermediate_size,
        )

    def _norm(self, source: str, target: str, width: int) -> Iterator[Recipe]:
        one = self._source.adds_one
        yield replace(self._plain(f"{source}.weight", f"{target}.weight", (width,)), add_one=one)
        if self._shape.norm == "LayerNorm":
            yield self._plain(f"{source}.bias", f"{target}.bias", (width,))

    def _linear(self, source: str, target: str, outputs: int, inputs: int) -> Iterator[Recipe]:
        parts = self._source.parts(f"{source}.weight")
        pieces = columns_in_order(parts)
        yield self._matrix(f"{target}.weight", parts, pieces, (outputs, inputs))
        if self._shape.linear_bias:
            yield self._plain(f"{source}.bias", f"{target}.bias", (outputs,))

    def _query_key_value(self, source: str, target: str) -> Iterator[Recipe]:
        shape, names = self._shape, self._names.query_key_value
        kinds = [("weight", (shape.hidden_size,))] + ([("bias", ())] if shape.qkv_bias else [])
        for kind, inputs in kinds:
            parts = self._source.parts(f"{source}qkv.{kind}")
            rows = self._fused_rows(parts)
            total = rows.rows * len(parts)
            if len(names) == 1:
                arrange = interleaved if self._names.interleaved else joined
                pieces = arrange(parts, rows)
                yield self._matrix(f"{target}{names[0]}.{kind}", parts, pieces, (total, *inputs))
                continue
            for role, name in zip(ROLES, names, strict=True):
                heads = shape.n_heads if role == "query" else shape.n_kv_heads
                pieces = separate(parts, rows, role)
                size = (heads * shape.head_size, *inputs)
                yield self._matrix(f"{target}{name}.{kind}", parts, pieces, size)

    def _fused_rows(self, parts: tuple[StoredArray, ...]) -> FusedRows:
        shape, ranks = self._shape, len(parts)
        if shape.n_heads % ranks or shape.n_kv_heads % ranks:
            raise CheckpointError(
                f"{parts[0].path}: {shape.n_heads} heads ({shape.n_kv_heads} of keys and values) "
                f"do not divide among {ranks} shards"
            )
        grouped = shape.n_kv_heads != shape.n_heads
        rows = FusedRows(
            "groups" if grouped else self._source.row_order,
            shape.n_heads // ranks,
            shape.n_kv_heads // ranks,
            shape.head_size,
            self._pairs,
        )
        for part in parts:
            if part.shape[0] != rows.rows:
                raise CheckpointError(
                    f"{part.path}: {part.label} has {part.shape[0]} rows, but {rows.heads} heads "
                    f"of {rows.head_size} channels on each of {ranks} shards need {rows.rows}; "
                    "the arguments do not belong to these weights"
                )
        return rows

    @property
    def _pairs(self) -> int:
        """How many channels of a head rotate as neighbours."""
        shape = self._shape
        return int(shape.head_size * (shape.rotary_share or 0)) if shape.rotary_pairs else 0

    def _feed_forward(self, source: str, target: str) -> Iterator[Recipe]:
        shape, names = self._shape, self._names.mlp_in
        kinds = [("weight", (shape.hidden_size,))] + ([("bias", ())] if shape.linear_bias else [])
        for kind, inputs in kinds:
            parts = self._source.parts(f"{source}mlp_in.{kind}")
            for half, name in enumerate(names):
                pieces = self._half(parts, half) if shape.gated else rows_in_order(parts)
                size = (shape.intermediate_size, *inputs)
                yield self._matrix(f"{target}{name}.{kind}", parts, pieces, size)

    def _half(self, parts: tuple[StoredArray, ...], half: int) -> tuple[Piece, ...]:
        """Return the gate (0) or the other projection (1) out of fused rows."""
        inner = self._shape.intermediate_size
        if not self._source.gate_within_ranks:
            return _rows(parts, half * inner, inner)
        pieces, to = [], 0
        for part in parts:
            count = part.shape[0] // 2
            pieces.append(Piece(part, (Run(half * count, count, to),)))
            to += count
        return tuple(pieces)

    def _table(self, source: str, target: str, shape: tuple[int, int]) -> Recipe:
        parts = self._source.parts(f"{source}.weight")
        pieces = rows_in_order(parts, limit=shape[0])
        made = self._matrix(target, parts, pieces, shape, transposed=False)
        others = self._source.equal.get(f"{source}.weight", ())
        return replace(made, equal=rows_in_order(others, limit=shape[0]))

    def _plain(self, source: str, target: str, shape: tuple[int, ...]) -> Recipe:
        """Return a tensor that every rank holds whole."""
        parts = self._source.parts(source)
        made = self._matrix(target, parts[:1], rows_in_order(parts[:1]), shape, transposed=False)
        return replace(made, equal=tuple(rows_in_order((part,))[0] for part in parts[1:]))

    def _matrix(
        self,
        target: str,
        parts: tuple[StoredArray, ...],
        pieces: tuple[Piece, ...],
        shape: tuple[int, ...],
        transposed: bool | None = None,
    ) -> Recipe:
        turned = self._names.input_major and len(shape) == 2 if transposed is None else transposed
        dtype = self._dtype or parts[0].dtype
        written = shape[::-1] if turned else shape
        return Recipe(target, dtype, written, pieces, transposed=turned)


def _rows(parts: tuple[StoredArray, ...], start: int, count: int) -> tuple[Piece, ...]:
    """Return the rows from start of arrays that stand one below the other."""
    pieces, first = [], 0
    for part in parts:
        begin, end = max(start, first), min(start + count, first + part.shape[0])
        if begin < end:
            pieces.append(Piece(part, (Run(begin - first, end - begin, begin - start),)))
        first += part.shape[0]
    return tuple(pieces)
