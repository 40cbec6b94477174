"""Models: a transformers model becomes a ``ModelBackend``."""
