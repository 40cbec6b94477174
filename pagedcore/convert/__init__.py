"""Makes quantised checkpoints from models."""
