"""A decoder with random weights, made on the device: nothing is downloaded or read."""

import torch
from torch import Tensor

from nightjar.checkpoints import ModelConfig
from nightjar.gpu_worker.models import Decoder
from nightjar.gpu_worker.models.decoder import DecoderWeights
from nightjar.kernels import LayerWeights, LinearWeight, Norm, pack_linear

STD = 0.02
"""GPT-2's own; the residual stream stays small enough for FP16 over 24 layers."""


@torch.inference_mode()
def random_decoder(config: ModelConfig, dtype: torch.dtype, device: str) -> Decoder:
    """A GPT of the config's shape (LayerNorm, learned positions, biases), the same for every call
    on one device."""
    generator = torch.Generator(device).manual_seed(0)
    width, inner = config.hidden_size, config.intermediate_size

    def normal(*size: int) -> Tensor:
        made = torch.empty(*size, dtype=dtype, device=device)
        return made.normal_(0.0, STD, generator=generator)

    def norm() -> Norm:
        ones = torch.ones(width, dtype=torch.float32, device=device)
        return Norm(ones, torch.zeros_like(ones), config.norm_epsilon)

    def linear(inputs: int, outputs: int) -> LinearWeight:
        return pack_linear(normal(outputs, inputs), normal(outputs))

    def layer() -> LayerWeights:
        return LayerWeights(
            attention_norm=norm(),
            qkv=linear(width, 3 * width),
            query_norm=None,
            key_norm=None,
            attention_out=linear(width, width),
            attention_post_norm=None,
            mlp_norm=norm(),
            up=linear(width, inner),
            down=linear(inner, width),
            mlp_post_norm=None,
        )

    tokens = normal(config.vocab_size, width)
    weights = DecoderWeights(
        tokens=tokens,
        positions=normal(config.context_length, width),
        rope=None,
        layers=tuple(layer() for _ in range(config.n_layers)),
        last_norm=norm(),
        head=pack_linear(tokens, None),
    )
    return Decoder(config, weights, dtype, dtype, device)
