"""The names of tensors in Megatron-LM's eras, brought to one set.

Tensors of a layer are called by these names after `layers.N.`: attention_norm, qkv, attention_out,
mlp_norm, mlp_in, mlp_out, q_norm, k_norm.  Beside them are tokens, positions, head, last_norm.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from nightjar.checkpoints.convert.pickles import Opaque, TensorReference
from nightjar.checkpoints.errors import CheckpointError

_OUTSIDE = {
    "language_model.embedding.word_embeddings.weight": "tokens.weight",
    "embedding.word_embeddings.weight": "tokens.weight",
    "language_model.embedding.position_embeddings.weight": "positions.weight",
    "embedding.position_embeddings.weight": "positions.weight",
    "word_embeddings_for_head.weight": "head.weight",
    "language_model.output_layer.weight": "head.weight",
    "output_layer.weight": "head.weight",
}
_STACK = r"(?:language_model\.(?:transformer|encoder)|decoder)"
_LAYER = re.compile(_STACK + r"\.layers\.(\d+)\.(.+)\.(weight|bias)")
_FUSED_NORM = re.compile(_STACK + r"\.layers\.(\d+)\.(.+)\.layer_norm_(weight|bias)")
_LAST_NORM = re.compile(_STACK + r"\.final_(?:layernorm|norm)\.(weight|bias)")
_WITHIN = {
    "input_layernorm": "attention_norm",
    "input_norm": "attention_norm",
    "attention.query_key_value": "qkv",
    "self_attention.query_key_value": "qkv",
    "self_attention.linear_qkv": "qkv",
    "attention.dense": "attention_out",
    "self_attention.dense": "attention_out",
    "self_attention.linear_proj": "attention_out",
    "post_attention_layernorm": "mlp_norm",
    "post_attention_norm": "mlp_norm",
    "pre_mlp_layernorm": "mlp_norm",
    "mlp.dense_h_to_4h": "mlp_in",
    "mlp.linear_fc1": "mlp_in",
    "mlp.dense_4h_to_h": "mlp_out",
    "mlp.linear_fc2": "mlp_out",
    "self_attention.q_layernorm": "q_norm",
    "self_attention.k_layernorm": "k_norm",
}
# The norm that Transformer Engine keeps within the projection after it.
_FUSED = {"self_attention.linear_qkv": "attention_norm", "mlp.linear_fc1": "mlp_norm"}
_NO_WEIGHTS = ("_extra_state", "inv_freq", "rotary_pos_emb", "masked_bias", "attention.bias")
_MAX_DEPTH = 12


def flatten(tree: object, path: str = "", depth: int = 0) -> Iterator[tuple[str, TensorReference]]:
    """Yield the tensors of nested dictionaries, by their joined names."""
    if isinstance(tree, TensorReference):
        yield path.removeprefix("module."), tree
    elif isinstance(tree, dict) and depth < _MAX_DEPTH:
        for key, value in tree.items():
            yield from flatten(value, f"{path}.{key}" if path else str(key), depth + 1)
    elif isinstance(tree, Opaque) and depth < _MAX_DEPTH:
        yield from flatten(tree.entries, path, depth + 1)


def common_names(
    tensors: Mapping[str, TensorReference], first_layer: int, hybrid: bool, where: str
) -> dict[str, TensorReference]:
    """Return the tensors of one stage by their common names.

    first_layer: the number of the stage's first layer in the whole model.
    hybrid: every other layer is a feed-forward block.

    Raises:
        CheckpointError: A name belongs to another kind of model.
    """
    found: dict[str, TensorReference] = {}
    for name, tensor in tensors.items():
        if any(part in name for part in _NO_WEIGHTS):
            continue
        common = common_name(name, first_layer, hybrid)
        if common is None:
            kind = "mixtures of experts are" if ".experts." in name else f"tensor {name!r} is"
            raise CheckpointError(f"{where}: {kind} not supported")
        if common in found:
            raise CheckpointError(f"{where}: two tensors stand for {common}")
        found[common] = tensor
    return found


def layer_count(tensors: Mapping[str, TensorReference]) -> int:
    """Return how many layers a stage has."""
    numbers = {int(match[1]) for name in tensors if (match := re.search(r"layers\.(\d+)\.", name))}
    return max(numbers, default=-1) + 1


def common_name(name: str, first_layer: int, hybrid: bool) -> str | None:
    """Return a tensor's common name, or None if it belongs to another kind of model."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    if match := _LAST_NORM.fullmatch(name):
        return f"last_norm.{match[1]}"
    for pattern, names in ((_FUSED_NORM, _FUSED), (_LAYER, _WITHIN)):
        match = pattern.fullmatch(name)
        if match and match[2] in names:
            layer = first_layer + int(match[1])
            return f"layers.{layer // 2 if hybrid else layer}.{names[match[2]]}.{match[3]}"
    return None
