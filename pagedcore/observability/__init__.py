"""What an engine shows of itself: metrics for Prometheus, fed by the observing hooks.

Never changes what an engine does. Read ``metric_tables.py`` for what there is, then ``metrics.py``.
"""
