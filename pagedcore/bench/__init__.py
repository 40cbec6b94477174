"""Measures what batching is worth, on the machine at hand.

Owns workloads, the measuring loop and the report; never the engine, which it uses by its public names. Read
``workloads.py``, then ``throughput.py``; ``pagedcore bench throughput`` is the door.
"""
