"""A transformers model, or a directory of a known kind without that library, becomes a ``ModelBackend``."""
