"""Attention, sampling and elementwise kernels, and the layout of the KV pool they share."""
