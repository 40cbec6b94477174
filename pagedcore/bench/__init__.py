"""Measures what batching is worth, on the machine at hand; ``pagedcore bench batching`` is the door."""
