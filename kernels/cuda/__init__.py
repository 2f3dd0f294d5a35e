"""The ops in CUDA C++: a .cu file for each op, its Python wrapper, and the compilation.

The wrappers take torch tensors, check them, choose an instance and start it; see
docs/explanations/kernels.md.  CuPy and a GPU are needed only when a kernel is started.
"""

# ruff: noqa: F401 (the modules are the names of the package)
from nightjar.kernels.cuda import (
    activation,
    argmax,
    attention,
    decode_attention,
    embedding,
    fp8_packing,
    kv_transfer,
    linear,
    merge,
    norm,
    packing,
    paged_prefill,
    penalties,
    philox,
    product_rows,
    prompt_attention,
    qkv_post,
    sample,
    step_update,
    token_nll,
)
