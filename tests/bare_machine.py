"""What there is on a bare GPU machine, and which tests run there.

It has torch, CuPy, NumPy, tokenizers, safetensors, transformers and pytest; Nightjar runs from its
checkout.
"""

GPU_FOLDERS = ("engine_cuda", "gpu", "kernels_cuda")
"""The folders of tests/ that hold tests marked `gpu`; no other does."""

DISTRIBUTIONS = (
    "cupy-cuda13x",
    "numpy",
    "pytest",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
)
"""What is installed there; what these need comes with them."""

PACKAGES = {"cupy", "jinja2", "numpy", "pytest", "safetensors", "tokenizers", "torch"} | {
    "transformers"
}
"""What may be imported there.  torch needs Jinja2."""


def asks_for_gpu_alone(expression: str) -> bool:
    """Whether a mark expression (`pytest -m`) takes only tests marked `gpu`: "gpu", "gpu and not
    slow"; an expression with "or" is taken for one that does not."""
    terms = [term.strip() for term in expression.split(" and ")]
    return "gpu" in terms and " or " not in expression
