"""Measures what batching is worth, on the machine at hand; ``pagedcore bench throughput`` is the door."""
