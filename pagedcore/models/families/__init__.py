"""Known architectures as data, and their modules without transformers."""
