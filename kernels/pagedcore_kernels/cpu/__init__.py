"""Kernels for the CPU, compiled by Numba on first use; nothing is imported here, as Numba takes its time."""
