"""Measures what batching is worth, on the machine at hand; uses the engine by its public names.

Read ``workloads.py``, then ``throughput.py``; ``pagedcore bench throughput`` is the door.
"""
