"""Reads models that were converted for FasterTransformer: one file a tensor and rank.

A folder such as `1-gpu` holds config.ini and `model.*.bin`, plain numbers without a header.
Matrices are stored [in, out]; the fused projection's columns are all queries of the rank, then its
keys, then its values.
"""

from __future__ import annotations

import configparser
import re
from pathlib import Path

from nightjar.checkpoints.convert.arrays import StoredArray
from nightjar.checkpoints.convert.shape import SourceShape
from nightjar.checkpoints.convert.source import Source, cut_dimension
from nightjar.checkpoints.errors import CheckpointError

CONFIG = "config.ini"
_DTYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_FILE = re.compile(r"model\.(.+?)(?:\.(\d+))?\.bin")
_NAMES = {
    "wte": "tokens.weight",
    "wpe": "positions.weight",
    "lm_head.weight": "head.weight",
    "final_layernorm.weight": "last_norm.weight",
    "final_layernorm.bias": "last_norm.bias",
}
_WITHIN = {
    "input_layernorm": "attention_norm",
    "attention.query_key_value": "qkv",
    "attention.dense": "attention_out",
    "post_attention_layernorm": "mlp_norm",
    "mlp.dense_h_to_4h": "mlp_in",
    "mlp.dense_4h_to_h": "mlp_out",
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")


def open_faster_transformer(folder: Path) -> Source:
    """Open the folder of a model.

    Raises:
        CheckpointError: A file is missing or has another size than config.ini says.
    """
    section = _section(folder / CONFIG)
    reader = _Reader(folder, section)
    shape = reader.shape()
    tensors = reader.tensors(shape)
    ranks = reader.ranks
    return Source(
        description=f"FasterTransformer, {ranks} shards",
        shape=shape,
        tensors=tensors,
        row_order="parts",
        gate_within_ranks=True,
        equal={},
        files=(folder / CONFIG, *(part.path for parts in tensors.values() for part in parts)),
    )


def _section(path: Path) -> configparser.SectionProxy:
    parser = configparser.ConfigParser()
    try:
        parser.read_string(path.read_text())
    except (OSError, configparser.Error, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    named = [name for name in parser.sections() if parser.has_option(name, "head_num")]
    if not named:
        raise CheckpointError(
            f"{path}: no section with head_num; it is no GPT of FasterTransformer"
        )
    return parser[named[0]]


class _Reader:
    """Reads one folder.  ranks: into how many shards the matrices are cut."""

    def __init__(self, folder: Path, section: configparser.SectionProxy) -> None:
        self._folder = folder
        self._section = section
        dtype = section.get("weight_data_type", "fp32")
        if dtype not in _DTYPES:
            raise CheckpointError(
                f"{folder / CONFIG}: weight_data_type {dtype!r}: expected one of "
                f"{', '.join(_DTYPES)}"
            )
        self._dtype = _DTYPES[dtype]
        self._files = self._found_files()
        self.ranks = max((len(files) for files in self._files.values()), default=1)

    def shape(self) -> SourceShape:
        """Return the shape of the decoder."""
        if self._section.get("layernorm_type", "pre_layernorm") != "pre_layernorm":
            raise CheckpointError(f"{self._folder / CONFIG}: only pre_layernorm is supported")
        if self._section.get("activation_type", "gelu").lower() != "gelu":
            raise CheckpointError(f"{self._folder / CONFIG}: only the activation gelu is supported")
        heads, size = self._size("head_num"), self._size("size_per_head")
        hidden = heads * size
        return SourceShape(
            vocab_rows=self._count("tokens.weight") // hidden,
            context_length=self._size("max_pos_seq_len"),
            hidden_size=hidden,
            n_layers=self._size("num_layer"),
            n_heads=heads,
            n_kv_heads=heads,
            head_size=size,
            intermediate_size=self._size("inter_size"),
            norm="LayerNorm",
            norm_epsilon=float(self._section.get("layernorm_eps", "1e-5")),
            activation="gelu_new",
            gated=False,
            tied="head.weight" not in self._files,
            linear_bias=True,
            qkv_bias=True,
            qk_norm=False,
            rotary_share=None,
            rotary_base=10_000.0,
            rotary_pairs=False,
            extra={},
        )

    def tensors(self, shape: SourceShape) -> dict[str, tuple[StoredArray, ...]]:
        """Return the array of each rank by common name."""
        return {
            name: tuple(
                self._array(name, files.get(rank), rank, shape) for rank in range(len(files))
            )
            for name, files in self._files.items()
        }

    def _size(self, key: str) -> int:
        value = self._section.get(key, "")
        if not value.isdecimal() or int(value) < 1:
            raise CheckpointError(
                f"{self._folder / CONFIG}: {key} is {value!r}: expected a whole number"
            )
        return int(value)

    def _count(self, name: str) -> int:
        files = self._files.get(name)
        if not files:
            raise CheckpointError(f"{self._folder}: no file of {name}; copy the folder again")
        return sum(path.stat().st_size for path in files.values()) // _ITEM_BYTES[self._dtype]

    def _found_files(self) -> dict[str, dict[int, Path]]:
        found: dict[str, dict[int, Path]] = {}
        for path in sorted(self._folder.glob("model.*.bin")):
            match = _FILE.fullmatch(path.name)
            name = _common_name(match[1]) if match else None
            if match is None or name is None:
                raise CheckpointError(f"{path}: a tensor of another kind of model")
            found.setdefault(name, {})[int(match[2] or 0)] = path
        for name, files in found.items():
            if set(files) != set(range(len(files))):
                raise CheckpointError(f"{self._folder}: a shard of {name} is missing")
        return found

    def _array(self, name: str, path: Path | None, rank: int, shape: SourceShape) -> StoredArray:
        if path is None:
            raise CheckpointError(f"{self._folder}: shard {rank} of {name} is missing")
        outputs, inputs = _dimensions(name, shape)
        cut = cut_dimension(name)
        if cut == 0 and len(self._files[name]) > 1:
            outputs //= self.ranks
        if cut == 1 and inputs is not None:
            inputs //= self.ranks
        count = outputs * (inputs or 1)
        if path.stat().st_size != count * _ITEM_BYTES[self._dtype]:
            raise CheckpointError(
                f"{path}: {path.stat().st_size} bytes, but config.ini asks for "
                f"{count * _ITEM_BYTES[self._dtype]}; copy the file again"
            )
        if inputs is None:
            return StoredArray(path, 0, self._dtype, (outputs,), (1,), name)
        row_major = name in ("tokens.weight", "positions.weight", "head.weight")
        strides = (inputs, 1) if row_major else (1, outputs)
        return StoredArray(path, 0, self._dtype, (outputs, inputs), strides, name)


def _common_name(name: str) -> str | None:
    if name in _NAMES:
        return _NAMES[name]
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _WITHIN:
        return None
    return f"layers.{match[1]}.{_WITHIN[match[2]]}.{match[3]}"


def _dimensions(name: str, shape: SourceShape) -> tuple[int, int | None]:
    """Return [out, in] of a whole matrix, or [out, None] of a vector."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    part, kind = name.rsplit(".", 2)[-2:]
    outputs = {
        "tokens": shape.vocab_rows,
        "head": shape.vocab_rows,
        "positions": shape.context_length,
        "qkv": 3 * hidden,
        "mlp_in": inner,
    }.get(part, hidden)
    if kind == "bias" or part.endswith("norm"):
        return outputs, None
    return outputs, inner if part == "mlp_out" else hidden
