"""Norms, rotary embeddings and activations on the CPU."""
