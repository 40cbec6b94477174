"""Kernels for NVIDIA cards, written in Numba-CUDA: compiled to cubins by Numba and nvJitLink, launched by cuda-python."""
