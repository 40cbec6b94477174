"""Gives BentoML a home of its own before it is first imported; the folder goes when the process ends."""

from __future__ import annotations

import os
import tempfile

os.environ["BENTOML_DO_NOT_TRACK"] = "True"
_HOME = tempfile.TemporaryDirectory(prefix="bentoml-home-", ignore_cleanup_errors=True)
HOME = os.environ.setdefault("BENTOML_HOME", _HOME.name)
"""Where BentoML keeps what the tests build."""
