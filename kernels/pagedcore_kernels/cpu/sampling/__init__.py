"""The sampler on the CPU."""
