"""Recordings taken again: the same decisions, other ones under other settings, and single points with the model."""
