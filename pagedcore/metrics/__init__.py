"""Metrics: what is measured and how it is shown. Imported only when somebody asks for it."""
