"""Models with random weights in the shapes of real ones: speed does not depend on what the weights say.

Owns the shapes; needs no files and no network. ``throughput.py`` measures what is made here.
"""

from __future__ import annotations

from typing import Any, Final

from pagedcore.errors import InvalidConfig

SHAPES: Final[dict[str, dict[str, Any]]] = {
    "tiny": {
        "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
        "intermediate_size": 768, "vocab_size": 4096, "max_position_embeddings": 4096,
    },
    "qwen05b": {
        "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "intermediate_size": 4864, "vocab_size": 151936, "max_position_embeddings": 32768,
    },
}
"""By name; "qwen05b" is the published shape of Qwen2.5-0.5B."""


def random_model(shape: str, dtype: str) -> Any:
    """Build a Qwen2 model of ``shape`` with random weights, the same ones every time.

    Raises:
        InvalidConfig: there is no such shape.
    """
    if shape not in SHAPES:
        raise InvalidConfig(f"random weights: got {shape!r}, allowed is one of {', '.join(SHAPES)}.")
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        Qwen2Config(tie_word_embeddings=True, **SHAPES[shape]), dtype=getattr(torch, dtype)
    ).eval()
