"""Modules become a step: plain, fused, recorded."""
