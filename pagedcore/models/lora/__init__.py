"""Adapters become updates of products: read, checked, and found by a step's rows."""
