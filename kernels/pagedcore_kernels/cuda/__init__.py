"""Kernels for NVIDIA cards, written in Numba-CUDA: compiled by Numba and nvJitLink, launched by cuda-python."""
