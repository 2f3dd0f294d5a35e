"""GPT-2's names and shapes, as transformers stores them."""

from __future__ import annotations

import torch

from nightjar.checkpoints import ModelConfig
from nightjar.gpu_worker.models.decoder import DecoderWeights, LayerWeights, NormWeights
from nightjar.gpu_worker.models.weight_reader import WeightReader
from nightjar.kernels import LinearWeight, pack_linear


def gpt2_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the config asks for.  Projections are stored [in, out]; the causal masks that
    old checkpoints carry (h.*.attn.bias) are not weights and are not asked for."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "wte.weight": (config.vocab_size, hidden),
        "wpe.weight": (config.context_length, hidden),
        "ln_f.weight": (hidden,),
        "ln_f.bias": (hidden,),
    }
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    projections = {
        "attn.c_attn": (hidden, 3 * hidden),
        "attn.c_proj": (hidden, hidden),
        "mlp.c_fc": (hidden, inner),
        "mlp.c_proj": (inner, hidden),
    }
    for layer in range(config.n_layers):
        for norm in ("ln_1", "ln_2"):
            shapes[f"h.{layer}.{norm}.weight"] = (hidden,)
            shapes[f"h.{layer}.{norm}.bias"] = (hidden,)
        for name, shape in projections.items():
            shapes[f"h.{layer}.{name}.weight"] = shape
            shapes[f"h.{layer}.{name}.bias"] = shape[1:]
    return shapes


def gpt2_weights(
    config: ModelConfig, reader: WeightReader, dtype: torch.dtype, device: str
) -> DecoderWeights:
    """Read and pack all weights; norms stay in FP32."""

    def norm(name: str) -> NormWeights:
        parts = [reader.tensor(f"{name}.{part}", torch.float32, device) for part in NORM_PARTS]
        return NormWeights(*parts)

    def projection(name: str) -> LinearWeight:
        weight = reader.tensor(f"{name}.weight", dtype, device)
        return pack_linear(weight.t(), reader.tensor(f"{name}.bias", dtype, device))

    layers = tuple(
        LayerWeights(
            attention_norm=norm(f"h.{index}.ln_1"),
            qkv=projection(f"h.{index}.attn.c_attn"),
            attention_out=projection(f"h.{index}.attn.c_proj"),
            mlp_norm=norm(f"h.{index}.ln_2"),
            up=projection(f"h.{index}.mlp.c_fc"),
            down=projection(f"h.{index}.mlp.c_proj"),
        )
        for index in range(config.n_layers)
    )
    tokens = reader.tensor("wte.weight", dtype, device)
    if config.tied_embeddings:
        head = pack_linear(tokens, None)
    else:
        head = pack_linear(reader.tensor("lm_head.weight", dtype, device), None)
    return DecoderWeights(
        tokens=tokens,
        positions=reader.tensor("wpe.weight", dtype, device),
        layers=layers,
        last_norm=norm("ln_f"),
        head=head,
    )


NORM_PARTS = ("weight", "bias")
