"""Grammars compiled for one vocabulary, and the masks that keep completions to them."""
