"""How CUDA kernels are compiled, stored and found."""
