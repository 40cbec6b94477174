"""Models behind the ``ModelBackend`` port."""
