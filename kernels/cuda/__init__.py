"""The op list in CUDA C++: a .cu file an op, its Python wrapper, and how it is compiled.

The wrappers take torch tensors, check them, choose an instance and start it;
docs/explanations/kernels.md tells the rest.  Nothing here needs CuPy or a GPU until a kernel is
started.
"""

# ruff: noqa: F401 (the modules are the names of the package)
from nightjar.kernels.cuda import (
    activation,
    argmax,
    attention,
    decode_attention,
    embedding,
    kv_transfer,
    linear,
    merge,
    norm,
    packing,
    penalties,
    philox,
    prompt_attention,
    qkv_post,
    sample,
    step_update,
    token_nll,
)
