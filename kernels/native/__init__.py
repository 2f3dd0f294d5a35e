"""The ops in C++: the fast CPU path for FP32 activations.

Each op has a file `name.cpp` and a wrapper.  Products and layers have a function for each kind of
weights.  `build.py` compiles all of them for this processor when they are first needed.  For
tensors that a kernel does not take, or without a compiler, the wrapper calls the torch reference.
The tests compare both.
"""

# ruff: noqa: F401 (the modules are the names of the package)
from nightjar.kernels.native import (
    activation,
    argmax,
    attention,
    embedding,
    float_linear,
    int8_linear,
    layers,
    log_prob,
    low_rank,
    norm,
    packing,
    products,
)
