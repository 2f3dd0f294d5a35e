"""Writes Megatron-LM checkpoints of transformers' models, in every layout that training has had.

It shares no code with `checkpoints/convert`: it works on whole tensors with PyTorch.
"""

from __future__ import annotations

import io
from argparse import Namespace
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """How a checkpoint is laid out.

    era: names of the classic model: "transformer" (2020), "encoder", or "norm".
    core: names of Megatron-Core; fused_norms: Transformer Engine keeps norms in projections.
    padded_to: rows of the embedding table are padded to a multiple of so many on each rank.
    """

    version: float | None = 3.0
    era: str = "encoder"
    core: bool = False
    fused_norms: bool = False
    tp: int = 1
    pp: int = 1
    vp: int = 1
    padded_to: int = 8
    old_format: bool = False
    old_arguments: bool = False
    hybrid: bool = False
    interleaved_rotary: bool = False
    less_one: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass
class Block:
    """One layer of the reference: q [H, D, in], k and v [G, D, in], biases without `in`."""

    tensors: dict[str, Tensor]


Parts = tuple[dict[str, Tensor], list[Block], dict[str, Any]]
"""The outer tensors, the layers, and the training arguments."""


def blocks_of(model: Any) -> Parts:
    """The reference's outer tensors, its layers, and the training arguments that describe it."""
    kind = model.config.model_type
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return {"gpt2": _gpt2, "gpt_neox": _neox}.get(kind, _llama)(model.config, state)


def _gpt2(config: Any, state: dict[str, Tensor]) -> Parts:
    heads, size, hidden = config.n_head, config.n_embd // config.n_head, config.n_embd
    blocks = []
    for layer in range(config.n_layer):
        root = f"transformer.h.{layer}."
        weight = state[root + "attn.c_attn.weight"].T.reshape(3, heads, size, hidden)
        bias = state[root + "attn.c_attn.bias"].reshape(3, heads, size)
        blocks.append(
            Block(
                {
                    **{f"{n}.weight": weight[i] for i, n in enumerate("qkv")},
                    **{f"{n}.bias": bias[i] for i, n in enumerate("qkv")},
                    "out.weight": state[root + "attn.c_proj.weight"].T,
                    "out.bias": state[root + "attn.c_proj.bias"],
                    "up.weight": state[root + "mlp.c_fc.weight"].T,
                    "up.bias": state[root + "mlp.c_fc.bias"],
                    "down.weight": state[root + "mlp.c_proj.weight"].T,
                    "down.bias": state[root + "mlp.c_proj.bias"],
                    **_both(state, root + "ln_1", "norm1"),
                    **_both(state, root + "ln_2", "norm2"),
                }
            )
        )
    outer = {
        "tokens": state["transformer.wte.weight"],
        "positions": state["transformer.wpe.weight"],
        **_both(state, "transformer.ln_f", "last"),
    }
    if not config.tie_word_embeddings:
        outer["head"] = state["lm_head.weight"]
    arguments = {
        "num_layers": config.n_layer,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "max_position_embeddings": config.n_positions,
        "layernorm_epsilon": config.layer_norm_epsilon,
        "bias_gelu_fusion": config.activation_function == "gelu_new",
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        "ffn_hidden_size": config.n_inner or 4 * hidden,
    }
    return outer, blocks, arguments


def _neox(config: Any, state: dict[str, Tensor]) -> Parts:
    heads, hidden = config.num_attention_heads, config.hidden_size
    size = hidden // heads
    blocks = []
    for layer in range(config.num_hidden_layers):
        root = f"gpt_neox.layers.{layer}."
        weight = state[root + "attention.query_key_value.weight"].reshape(heads, 3, size, hidden)
        bias = state[root + "attention.query_key_value.bias"].reshape(heads, 3, size)
        blocks.append(
            Block(
                {
                    **{f"{n}.weight": weight[:, i] for i, n in enumerate("qkv")},
                    **{f"{n}.bias": bias[:, i] for i, n in enumerate("qkv")},
                    **_both(state, root + "attention.dense", "out"),
                    **_both(state, root + "mlp.dense_h_to_4h", "up"),
                    **_both(state, root + "mlp.dense_4h_to_h", "down"),
                    **_both(state, root + "input_layernorm", "norm1"),
                    **_both(state, root + "post_attention_layernorm", "norm2"),
                }
            )
        )
    outer = {
        "tokens": state["gpt_neox.embed_in.weight"],
        "head": state["lm_head.weight" if "lm_head.weight" in state else "embed_out.weight"],
        **_both(state, "gpt_neox.final_layer_norm", "last"),
    }
    arguments = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "max_position_embeddings": config.max_position_embeddings,
        "norm_epsilon": config.layer_norm_eps,
        "position_embedding_type": "rope",
        "rotary_percent": config.rope_parameters["partial_rotary_factor"],
        "rotary_base": int(config.rope_parameters["rope_theta"]),
        "bias_gelu_fusion": config.hidden_act == "gelu_new",
        "untie_embeddings_and_output_weights": True,
        "ffn_hidden_size": config.intermediate_size,
    }
    return outer, blocks, arguments


def _llama(config: Any, state: dict[str, Tensor]) -> Parts:
    heads, groups, hidden = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.hidden_size,
    )
    size = config.head_dim if getattr(config, "head_dim", None) else hidden // heads
    blocks = []
    for layer in range(config.num_hidden_layers):
        root = f"model.layers.{layer}."
        found = {
            "out.weight": state[root + "self_attn.o_proj.weight"],
            "gate.weight": state[root + "mlp.gate_proj.weight"],
            "up.weight": state[root + "mlp.up_proj.weight"],
            "down.weight": state[root + "mlp.down_proj.weight"],
            "norm1.weight": state[root + "input_layernorm.weight"],
            "norm2.weight": state[root + "post_attention_layernorm.weight"],
        }
        for name, count in (("q", heads), ("k", groups), ("v", groups)):
            weight = state[f"{root}self_attn.{name}_proj.weight"]
            found[f"{name}.weight"] = weight.reshape(count, size, hidden)
            bias = state.get(f"{root}self_attn.{name}_proj.bias")
            if bias is not None:
                found[f"{name}.bias"] = bias.reshape(count, size)
            norm = state.get(f"{root}self_attn.{name}_norm.weight")
            if norm is not None:
                found[f"{name}_norm.weight"] = norm
        blocks.append(Block(found))
    outer = {
        "tokens": state["model.embed_tokens.weight"],
        "last.weight": state["model.norm.weight"],
    }
    if not config.tie_word_embeddings:
        outer["head"] = state["lm_head.weight"]
    arguments = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups if groups != heads else 1,
        "kv_channels": size,
        "max_position_embeddings": config.max_position_embeddings,
        "norm_epsilon": config.rms_norm_eps,
        "normalization": "RMSNorm",
        "swiglu": True,
        "position_embedding_type": "rope",
        "rotary_percent": 1.0,
        "rotary_base": int(config.rope_parameters["rope_theta"]),
        "disable_bias_linear": True,
        "add_bias_linear": False,
        "add_qkv_bias": config.model_type == "qwen2",
        "qk_layernorm": config.model_type == "qwen3",
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        "ffn_hidden_size": config.intermediate_size,
    }
    return outer, blocks, arguments


def _both(state: dict[str, Tensor], source: str, target: str) -> dict[str, Tensor]:
    return {f"{target}.{kind}": state[f"{source}.{kind}"] for kind in ("weight", "bias")}


def write_checkpoint(model: Any, folder: Path, layout: Layout) -> Path:
    """Write the checkpoint of an iteration, and return the folder that training would load."""
    outer, blocks, arguments = blocks_of(model)
    iteration = folder / "iter_0000100"
    (folder / "latest_checkpointed_iteration.txt").parent.mkdir(parents=True, exist_ok=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("100")
    for rank in range(layout.tp):
        for stage in range(layout.pp):
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if layout.pp > 1 else "")
            (iteration / name).mkdir(parents=True)
            value = _shard(outer, blocks, arguments, layout, rank, stage)
            torch.save(
                value,
                iteration / name / "model_optim_rng.pt",
                _use_new_zipfile_serialization=not layout.old_format,
            )
    return folder


def _shard(
    outer: dict[str, Tensor],
    blocks: list[Block],
    arguments: dict[str, Any],
    layout: Layout,
    rank: int,
    stage: int,
) -> dict[str, Any]:
    value: dict[str, Any] = {
        "args": Namespace(**_arguments(arguments, layout, len(blocks))),
        "iteration": 100,
        "optimizer": {"fp32_from_fp16": [torch.ones(3)], "rank": rank},
        "rng_state": [{"random": (3, (1, 2), None)}],
    }
    if layout.version is not None:
        value["checkpoint_version"] = layout.version
    each = len(blocks) // (layout.pp * layout.vp)
    for chunk in range(layout.vp):
        first = (chunk * layout.pp + stage) * each
        is_first = chunk == 0 and stage == 0
        is_last = chunk == layout.vp - 1 and stage == layout.pp - 1
        tensors: dict[str, Tensor] = {}
        for local in range(each):
            tensors |= _layer(blocks[first + local], local, layout, rank)
        tensors = _with_outer(tensors, outer, layout, rank, is_first=is_first, is_last=is_last)
        key = "model" if layout.vp == 1 else f"model{chunk}"
        value[key] = _nest(tensors, layout)
    return value


def _arguments(arguments: dict[str, Any], layout: Layout, layers: int) -> dict[str, Any]:
    made = arguments | {
        "make_vocab_size_divisible_by": layout.padded_to,
        "tokenizer_type": "GPT2BPETokenizer",
        "params_dtype": torch.float16,
        "apply_layernorm_1p": layout.less_one,
        "rotary_interleaved": layout.interleaved_rotary,
    }
    if layout.hybrid:
        made |= {"num_layers": 2 * layers, "hybrid_override_pattern": "*-" * layers}
    if layout.old_arguments:
        made |= {"model_parallel_size": layout.tp}
        made.pop("ffn_hidden_size")
    else:
        made |= {
            "tensor_model_parallel_size": layout.tp,
            "pipeline_model_parallel_size": layout.pp,
            "virtual_pipeline_model_parallel_size": layout.vp if layout.vp > 1 else None,
        }
    return made | layout.arguments


def _layer(block: Block, number: int, layout: Layout, rank: int) -> dict[str, Tensor]:
    t = block.tensors
    made: dict[str, Tensor] = {}
    for kind in ("weight", "bias"):
        if f"q.{kind}" in t:
            made[f"qkv.{kind}"] = _fused(t, kind, layout, rank)
        if f"up.{kind}" in t:
            halves = [
                t[f"{n}.{kind}"].chunk(layout.tp)[rank]
                for n in ("gate", "up")
                if f"{n}.{kind}" in t
            ]
            made[f"in.{kind}"] = torch.cat(halves)
    made["out.weight"] = t["out.weight"].chunk(layout.tp, dim=1)[rank]
    made["down.weight"] = t["down.weight"].chunk(layout.tp, dim=1)[rank]
    for name in ("out.bias", "down.bias", "norm1.bias", "norm2.bias"):
        if name in t:
            made[name] = t[name]
    for name in ("norm1.weight", "norm2.weight", "q_norm.weight", "k_norm.weight"):
        if name in t:
            tensor = t[name]
            if layout.interleaved_rotary and "_norm" in name:
                tensor = _neighbours(tensor[None])[0]
            made[name] = tensor - 1 if layout.less_one else tensor
    return {_layer_name(name, number, layout): tensor for name, tensor in made.items()}


def _fused(t: dict[str, Tensor], kind: str, layout: Layout, rank: int) -> Tensor:
    q, k, v = (t[f"{n}.{kind}"].chunk(layout.tp)[rank] for n in "qkv")
    if layout.interleaved_rotary:
        q, k = _neighbours(q), _neighbours(k)
    tail = q.shape[2:]
    if q.shape[0] != k.shape[0]:
        each = q.shape[0] // k.shape[0]
        groups = [
            torch.cat([q[g * each : (g + 1) * each], k[g : g + 1], v[g : g + 1]])
            for g in range(k.shape[0])
        ]
        return torch.cat(groups).reshape(-1, *tail)
    version = 3.0 if layout.core else (layout.version or 0)
    dim = {0: 0, 1: 2}.get(int(version), 1)
    return torch.stack([q, k, v], dim=dim).reshape(-1, *tail)


def _neighbours(heads: Tensor) -> Tensor:
    """Channels i and i + D/2 become neighbours 2i and 2i + 1."""
    first, second = heads.chunk(2, dim=1)
    return torch.stack([first, second], dim=2).flatten(1, 2)


def _layer_name(name: str, number: int, layout: Layout) -> str:
    part, kind = name.split(".")
    if layout.core:
        attention = 2 * number if layout.hybrid else number
        mlp = 2 * number + 1 if layout.hybrid else number
        fused = {
            "norm1": f"{attention}.self_attention.linear_qkv.layer_norm_{kind}",
            "norm2": f"{mlp}.mlp.linear_fc1.layer_norm_{kind}",
        }
        if layout.fused_norms and part in fused:
            return f"decoder.layers.{fused[part]}"
        names = {
            "norm1": f"{attention}.input_layernorm",
            "qkv": f"{attention}.self_attention.linear_qkv",
            "out": f"{attention}.self_attention.linear_proj",
            "q_norm": f"{attention}.self_attention.q_layernorm",
            "k_norm": f"{attention}.self_attention.k_layernorm",
            "norm2": f"{mlp}.pre_mlp_layernorm",
            "in": f"{mlp}.mlp.linear_fc1",
            "down": f"{mlp}.mlp.linear_fc2",
        }
        return f"decoder.layers.{names[part]}.{kind}"
    attention_name = "attention" if layout.era == "transformer" else "self_attention"
    norm = "norm" if layout.era == "norm" else "layernorm"
    names = {
        "norm1": f"input_{norm}",
        "qkv": f"{attention_name}.query_key_value",
        "out": f"{attention_name}.dense",
        "norm2": f"post_attention_{norm}",
        "in": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
    }
    return f"layers.{number}.{names[part]}.{kind}"


def _with_outer(
    tensors: dict[str, Tensor],
    outer: dict[str, Tensor],
    layout: Layout,
    rank: int,
    *,
    is_first: bool,
    is_last: bool,
) -> dict[str, Tensor]:
    made = {name: tensor.clone() for name, tensor in tensors.items()}
    tied = "head" not in outer
    if is_first:
        made["tokens"] = _padded(outer["tokens"], layout, rank)
        if "positions" in outer:
            made["positions"] = outer["positions"]
    if is_last:
        for kind in ("weight", "bias"):
            if f"last.{kind}" in outer:
                less = layout.less_one and kind == "weight"
                made[f"last.{kind}"] = outer[f"last.{kind}"] - 1 if less else outer[f"last.{kind}"]
        if not tied:
            made["head"] = _padded(outer["head"], layout, rank)
        elif not is_first and layout.pp > 1:
            made["tied head"] = _padded(outer["tokens"], layout, rank)
    return made


def _padded(table: Tensor, layout: Layout, rank: int) -> Tensor:
    multiple = layout.padded_to * layout.tp
    rows = -(-table.shape[0] // multiple) * multiple
    padding = torch.full((rows - table.shape[0], table.shape[1]), 1e4).to(table.dtype)
    return torch.cat([table, padding]).chunk(layout.tp)[rank].clone()


def _nest(tensors: dict[str, Tensor], layout: Layout) -> Any:
    if layout.core:
        return _core_state(tensors, layout)
    stack = "transformer" if layout.era == "transformer" else "encoder"
    last = "final_norm" if layout.era == "norm" else "final_layernorm"
    layers: OrderedDict[str, Tensor] = OrderedDict()
    model: dict[str, Any] = {"language_model": {stack: layers}}
    language = model["language_model"]
    for name, tensor in tensors.items():
        if name == "tokens":
            language.setdefault("embedding", {})["word_embeddings"] = {"weight": tensor}
        elif name == "positions":
            language.setdefault("embedding", {})["position_embeddings"] = {"weight": tensor}
        elif name == "head":
            language["output_layer"] = OrderedDict(weight=tensor)
        elif name == "tied head":
            model["word_embeddings_for_head"] = OrderedDict(weight=tensor)
        elif name.startswith("last."):
            layers[f"{last}.{name.removeprefix('last.')}"] = tensor
        else:
            layers[name] = tensor
    return model


def _core_state(tensors: dict[str, Tensor], layout: Layout) -> OrderedDict[str, Any]:
    names = {
        "tokens": "embedding.word_embeddings.weight",
        "positions": "embedding.position_embeddings.weight",
        "head": "output_layer.weight",
        "tied head": "output_layer.weight",
        "last.weight": f"decoder.final_{'norm' if layout.hybrid else 'layernorm'}.weight",
        "last.bias": f"decoder.final_{'norm' if layout.hybrid else 'layernorm'}.bias",
    }
    state: OrderedDict[str, Any] = OrderedDict()
    for name, tensor in tensors.items():
        state[names.get(name, name)] = tensor
    state["decoder.layers.0.self_attention.core_attention._extra_state"] = io.BytesIO(b"fp8")
    state["decoder.layers.0.mlp.linear_fc1._extra_state"] = None
    return state
