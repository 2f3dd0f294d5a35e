"""The op list in C++: the fast CPU path for FP32 activations.

One op a file, `name.cpp` and its wrapper, but products and layers, which have a function for each
kind of weights; `build.py` compiles them for the processor at hand when they are first needed.
Where a wrapper says that it does not serve (another dtype, no compiler), the torch reference does,
and is the oracle of these in the tests.
"""

# ruff: noqa: F401 (the modules are the names of the package)
from nightjar.kernels.native import (
    argmax,
    attention,
    embedding,
    float_linear,
    int8_linear,
    layers,
    log_prob,
    norm,
    packing,
    products,
)
