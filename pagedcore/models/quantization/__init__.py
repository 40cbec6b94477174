"""Weights in fewer bits: what a quantisation scheme does to a linear layer."""
