"""Which sizes and settings a training run has."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """Sizes of the model and settings of its training."""

    vocab_size: int = 8192
    positions: int = 512
    width: int = 192
    layers: int = 4
    heads: int = 3
    dropout: float = 0.1
    bpe_dropout: float = 0.1
    peak_lr: float = 1e-3
    weight_decay: float = 0.1
    review_tokens: int = 1400
    chat_group: int = 12
    pack_rows: int = 20
    bag_steps: int = 280
    seed: int = 20
