"""GPT-2's weights, from the names that transformers stores them under."""

from __future__ import annotations

import torch

from nightjar.checkpoints import ModelConfig
from nightjar.gpu_worker.models.decoder import DecoderWeights, LayerWeights, NormWeights
from nightjar.gpu_worker.models.precision import Precision
from nightjar.gpu_worker.models.weight_reader import WeightReader
from nightjar.kernels import LinearWeight


def gpt2_weights(
    config: ModelConfig, reader: WeightReader, precision: Precision, device: str
) -> DecoderWeights:
    """Read and pack all weights; norms stay in FP32."""
    dtype = precision.dtype

    def norm(name: str) -> NormWeights:
        parts = [reader.tensor(f"{name}.{part}", torch.float32, device) for part in NORM_PARTS]
        return NormWeights(*parts)

    def projection(name: str) -> LinearWeight:
        weight = reader.tensor(f"{name}.weight", dtype, device)
        return precision.pack(weight.t(), reader.tensor(f"{name}.bias", dtype, device))

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
        head = precision.pack(tokens, None)
    else:
        head = precision.pack(reader.tensor("lm_head.weight", dtype, device), None)
    return DecoderWeights(
        tokens=tokens,
        positions=reader.tensor("wpe.weight", dtype, device),
        layers=layers,
        last_norm=norm("ln_f"),
        head=head,
    )


NORM_PARTS = ("weight", "bias")
