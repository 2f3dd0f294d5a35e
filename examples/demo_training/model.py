"""What is trained: a GPT-2 of few layers, lean for training."""

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from examples.demo_training.config import Config


class RowDropout(nn.Module):
    """Dropout with one mask for all positions of a row: far fewer random numbers to draw."""

    def __init__(self, chance: float) -> None:
        super().__init__()
        self.chance = chance

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, width)."""
        if not self.training:
            return x
        kept = torch.rand(x.shape[0], 1, x.shape[2], device=x.device) >= self.chance
        return x * (kept / (1 - self.chance))


class NgramSum(nn.Module):
    """Adds to each token's vector the mean of the vectors of its character n-grams.

    So tokens such as 재밌다 and 재밌는 share what is learnt of 재밌, as in fastText (Bojanowski
    et al. 2017).
    """

    flat: Tensor
    starts: Tensor

    def __init__(self, ngrams: Sequence[Sequence[int]], width: int) -> None:
        super().__init__()
        flat = [gram for grams in ngrams for gram in grams]
        starts = [0, *accumulate(len(grams) for grams in ngrams)][:-1]
        self.vectors = nn.Parameter(torch.zeros(max(flat) + 1, width))
        self.register_buffer("flat", torch.tensor(flat), persistent=False)
        self.register_buffer("starts", torch.tensor(starts), persistent=False)

    def forward(self, own: Tensor) -> Tensor:
        """own (vocabulary, width): the part of the vectors that tokens do not share."""
        return own + self.shared()

    def right_inverse(self, whole: Tensor) -> Tensor:
        """The own part that gives the whole vectors (vocabulary, width)."""
        return whole - self.shared().detach()

    def shared(self) -> Tensor:
        """The n-grams' part (vocabulary, width); zero for tokens that hold none."""
        return F.embedding_bag(self.flat, self.vectors, self.starts, mode="mean")


class Block(nn.Module):
    """One GPT-2 layer: attention and MLP, each after a LayerNorm and added to its input."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.ln_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.fc = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)
        self.drop = RowDropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """x (B, T, width), mask (B, 1, T, T) added to the scores, None: causal."""
        rows, length, width = x.shape
        shape = (rows, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.ln_1(x)).view(shape).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.drop(self.proj(y.transpose(1, 2).reshape(rows, length, width)))
        hidden = F.gelu(self.fc(self.ln_2(x)), approximate="tanh")
        added: Tensor = x + self.drop(self.out(hidden))
        return added


class Gpt(nn.Module):
    """GPT-2 with tied embeddings, lean for training; `export` writes the usual names."""

    def __init__(self, config: Config, ngrams: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.width)
        self.wpe = nn.Embedding(config.positions, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.width)
        self.drop = RowDropout(config.dropout)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Outputs that add to the residual start smaller, as in GPT-2.
                depth = math.sqrt(2 * config.layers) if "proj" in name or "out" in name else 1
                nn.init.normal_(parameter, std=(0.01 if "wpe" in name else 0.04) / depth)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        # Not exported: what the teacher says of a review so far, read off each state.
        self.hint = nn.Linear(config.width, 1)
        parametrize.register_parametrization(self.wte, "weight", NgramSum(ngrams, config.width))

    def finish(self) -> None:
        """Becomes the plain GPT-2 that is exported."""
        del self.hint
        parametrize.remove_parametrizations(self.wte, "weight")

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """tokens and positions (B, T), mask as in Block; returns the last states (B, T, width)."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.wte(tokens) + self.wpe(positions))
        for block in self.blocks:
            x = block(x, mask)
        normed: Tensor = self.ln_f(x)
        return normed

    def losses(self, states: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihoods (N) of targets (N) after states (N, width)."""
        return F.cross_entropy(states @ self.wte.weight.T, targets, reduction="none")
