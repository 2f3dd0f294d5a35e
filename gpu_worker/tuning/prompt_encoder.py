"""What is learned: the vectors themselves, or the inputs and weights of P-tuning's network."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nightjar.gpu_worker.tuning.frozen_model import FrozenModel
from nightjar.gpu_worker.tuning.options import Encoder


class PromptEncoder(nn.Module):
    """Gives the prompt vectors [n, H] from what is learned.

    "none": the vectors are learned directly (arXiv 2104.08691). "mlp": three layers give them, as
    PEFT's PromptEncoder of type MLP does (arXiv 2103.10385). Only the vectors are kept afterwards.
    """

    def __init__(self, start: Tensor, kind: Encoder) -> None:
        """start: where the vectors begin, float32[n, H]."""
        super().__init__()
        width = start.shape[1]
        self.start = nn.Parameter(start.clone())
        self.network: nn.Module | None = None
        if kind == "mlp":
            layers = [nn.Linear(width, width) for _ in range(3)]
            # The last one begins with nothing, so that training begins with the start vectors.
            nn.init.zeros_(layers[2].weight)
            nn.init.zeros_(layers[2].bias)
            self.network = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])

    def forward(self) -> Tensor:
        """Return the vectors: float32[n, H]."""
        if self.network is None:
            return self.start
        added: Tensor = self.network(self.start)
        return self.start + added


def start_vectors(model: FrozenModel, count: int, generator: torch.Generator) -> Tensor:
    """Return the embeddings of tokens drawn at random: float32[count, H]."""
    drawn = torch.randint(model.config.vocab_size, (count,), generator=generator)
    return model.embed(drawn.to(model.device)).float()
