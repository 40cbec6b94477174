"""Paged attention on NVIDIA GPUs: the host side."""
