"""Kernels for NVIDIA GPUs, written in Numba-CUDA: compiled by Numba and nvJitLink, launched by cuda-python."""
