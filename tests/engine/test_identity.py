"""What tells engines apart for caches of their completions."""

from __future__ import annotations

from typing import Any

from pagedcore import Engine
from pagedcore.demo_model import DEMO_MODEL_DIR
from pagedcore.tokenizer.tokenizer import HFTokenizer


def identity(**settings: Any) -> str:
    with Engine.from_pretrained("demo", num_kv_blocks=16, **settings) as engine:
        return engine.identity


def test_engines_with_other_tokenizers_are_other_engines() -> None:
    """The same text may be other tokens: a tokenizer by name counts, and one given as an object is like no other."""
    tokenizer = HFTokenizer.from_directory(DEMO_MODEL_DIR)
    assert identity() == identity()
    seen = [identity(), identity(tokenizer=str(DEMO_MODEL_DIR)), identity(tokenizer=tokenizer),
            identity(tokenizer=tokenizer)]
    assert len(set(seen)) == 4
