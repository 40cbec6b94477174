"""Text to tokens and back, for one model."""
