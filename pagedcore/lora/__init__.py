"""Adapters by name: which are loaded, who uses which, and how they come into the slots of a model."""
