"""Products of activations and packed weights on the CPU."""
