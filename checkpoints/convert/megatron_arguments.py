"""The training arguments that a Megatron-LM checkpoint keeps, as the shape of a decoder.

Facts about their eras: below checkpoint version 3.0 the parallel size is `model_parallel_size`.
`num_query_groups` is 1 where grouping is off.  The classic model ignored `rotary_base`.  The norms'
epsilon has two names.  No checkpoint holds the size of the vocabulary without padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nightjar.checkpoints.convert.pickles import Opaque
from nightjar.checkpoints.convert.shape import SourceShape
from nightjar.checkpoints.errors import CheckpointError

_DEFAULT_ROTARY_BASE = 10_000.0


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments by name.  where: names the file in errors.

    core: the checkpoint is of Megatron-Core, not of the classic model.
    """

    values: Mapping[str, Any]
    where: str
    core: bool

    @staticmethod
    def of(namespace: object, given: Mapping[str, Any], where: str, core: bool) -> Arguments:
        """Take the arguments of a checkpoint, and those that the caller gives in their place."""
        found: dict[str, Any] = {}
        if isinstance(namespace, Opaque):
            found = namespace.state
        elif isinstance(namespace, dict):
            found = namespace
        plain = {
            key: value
            for key, value in found.items()
            if value is None or isinstance(value, bool | int | float | str | list)
        }
        return Arguments({**plain, **given}, where, core)

    def size(self, *names: str, default: int | None = None) -> int:
        """Return the first of the named whole numbers that is there, from 1 up."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if type(value) is not int or value < 1:
                raise CheckpointError(f"{self.where}: argument {name} is {value!r}")
            return value
        if default is None:
            raise CheckpointError(
                f"{self.where}: the checkpoint keeps no argument {names[0]}; give it with "
                f"--argument {names[0]}=NUMBER"
            )
        return default

    def number(self, *names: str, default: float) -> float:
        """Return the first of the named numbers that is there."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise CheckpointError(f"{self.where}: argument {name} is {value!r}")
            return float(value)
        return default

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a switch."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.where}: argument {name} is {value!r}")
        return value

    @property
    def tensor_ranks(self) -> int:
        """Into how many shards each matrix is cut."""
        return self.size("tensor_model_parallel_size", "model_parallel_size", default=1)

    @property
    def pipeline_ranks(self) -> int:
        """Into how many stages the layers are cut."""
        return self.size("pipeline_model_parallel_size", default=1)

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding table."""
        return not self.flag("untie_embeddings_and_output_weights")

    @property
    def hybrid(self) -> bool:
        """Attention and feed-forward blocks are layers of their own (HybridModel)."""
        pattern = self._pattern()
        if pattern and pattern != "*-" * (len(pattern) // 2):
            raise CheckpointError(
                f"{self.where}: the layers follow the pattern {pattern!r}; only decoders of "
                "attention and feed-forward blocks in turn (*-*-...) are served"
            )
        return bool(pattern)

    def _pattern(self) -> str:
        for name in ("hybrid_layer_pattern", "hybrid_override_pattern"):
            value = self.values.get(name)
            if isinstance(value, str) and value:
                return value.split("/")[0].replace("|", "")
        return ""

    def shape(self, vocab_rows: int) -> SourceShape:
        """Return the shape; vocab_rows: rows of the embedding table.

        Raises:
            CheckpointError: An argument is missing, or is of a decoder that is not served.
        """
        self._refuse()
        hidden = self.size("hidden_size")
        heads = self.size("num_attention_heads")
        if hidden % heads and self.values.get("kv_channels") is None:
            raise CheckpointError(f"{self.where}: {heads} heads do not divide {hidden} channels")
        layers = self.size("num_layers")
        grouped = self.flag("group_query_attention")
        gated = self.flag("swiglu")
        linear_bias = self.flag("add_bias_linear", default=not self.flag("disable_bias_linear"))
        return SourceShape(
            vocab_rows=vocab_rows,
            context_length=self.size("max_position_embeddings", "seq_length"),
            hidden_size=hidden,
            n_layers=layers // 2 if self.hybrid else layers,
            n_heads=heads,
            n_kv_heads=self.size("num_query_groups") if grouped else heads,
            head_size=self.size("kv_channels", default=hidden // heads),
            intermediate_size=self.size("ffn_hidden_size", default=4 * hidden),
            norm="RMSNorm" if self.values.get("normalization") == "RMSNorm" else "LayerNorm",
            norm_epsilon=self.number("norm_epsilon", "layernorm_epsilon", default=1e-5),
            activation=self._activation(gated),
            gated=gated,
            tied=self.tied,
            linear_bias=linear_bias,
            qkv_bias=linear_bias or self.flag("add_qkv_bias"),
            qk_norm=self.flag("qk_layernorm"),
            rotary_share=self._rotary_share(),
            rotary_base=self._rotary_base(),
            rotary_pairs=self.flag("rotary_interleaved"),
            extra=self._rotary_scaling(),
        )

    @property
    def adds_one(self) -> bool:
        """Norms keep their weights less one (`apply_layernorm_1p`)."""
        return self.flag("apply_layernorm_1p")

    def vocab_multiple(self, ranks: int) -> int | None:
        """Return to a multiple of how many rows the table was padded; None if that is unknown.

        With a multiple of 1, the padding is not checked.
        """
        multiple = self.size("make_vocab_size_divisible_by", default=1)
        return multiple * ranks if multiple > 1 else None

    def _refuse(self) -> None:
        """Refuse what no served family computes."""
        refused = {
            "apply_residual_connection_post_layernorm": "residuals after the norm",
            "squared_relu": "a squared ReLU",
            "multi_latent_attention": "latent attention",
            "add_position_embedding_and_rotary": "two kinds of positions",
            "relative_attention": "relative positions",
            "parallel_layernorm": "parallel norms",
        }
        for name, what in refused.items():
            if self.values.get(name) is True:
                raise CheckpointError(
                    f"{self.where}: the model has {what} ({name}), which is not supported"
                )
        if self.values.get("num_experts"):
            raise CheckpointError(f"{self.where}: mixtures of experts are not supported")
        if self.values.get("window_size"):
            raise CheckpointError(f"{self.where}: windows of attention are not supported")
        norm = self.values.get("normalization", "LayerNorm")
        if norm not in ("LayerNorm", "RMSNorm", None):
            raise CheckpointError(f"{self.where}: normalization {norm!r} is not supported")

    def _activation(self, gated: bool) -> str:
        """Return config.json's name of the activation.

        The fused kernel computes GELU's tanh form, plain PyTorch the exact form.
        """
        if gated:
            return "silu"
        fused = self.flag("bias_gelu_fusion", default=True) and not self.flag("onnx_safe")
        return "gelu_new" if fused or self.flag("openai_gelu") else "gelu"

    def _rotary_share(self) -> float | None:
        kind = self.values.get("position_embedding_type")
        rotary = kind == "rope" or self.flag("use_rotary_position_embeddings")
        if not rotary and kind not in ("learned_absolute", None):
            raise CheckpointError(f"{self.where}: positions of kind {kind!r} are not supported")
        return self.number("rotary_percent", default=1.0) if rotary else None

    def _rotary_base(self) -> float:
        if not self.core:
            return _DEFAULT_ROTARY_BASE
        return self.number("rotary_base", default=_DEFAULT_ROTARY_BASE)

    def _rotary_scaling(self) -> dict[str, Any]:
        if self.flag("use_rope_scaling"):
            return {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": self.number("rope_scaling_factor", default=8.0),
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                }
            }
        factor = self.values.get("rotary_seq_len_interpolation_factor")
        if factor is None or factor == 1:
            return {}
        factor = self.number("rotary_seq_len_interpolation_factor", default=1.0)
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
