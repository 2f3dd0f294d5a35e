"""Models that the CUDA kernels can compute, as small as those allow: heads have 64 channels."""

from tests.families import Case
from tests.models import Gpt2Shape

GPU_TINY = Gpt2Shape(n_layer=1, n_embd=128, n_head=2, n_positions=192, vocab_size=320)

GPU_FAMILY = Case(
    "qwen3",
    {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "vocab_size": 320,
    },
)
