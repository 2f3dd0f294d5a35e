"""The decoder's ops in CUDA C++: a .cu file an op, its Python wrapper, and how it is compiled.

`nightjar.kernels.cuda_ops` is the list.  The wrappers take torch tensors, check them, choose an
instance and start it; docs/explanations/kernels.md tells the rest.  Nothing here needs CuPy or
a GPU until a kernel is started.
"""
