"""The CPU side of models: packed linear layers and the fused decoder."""
