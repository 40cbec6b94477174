"""What ``convert`` takes of a GGUF file: its configuration, its tensors as numbers, and its tokenizer as files.

Owns what has no counterpart in a directory of transformers: factors of frequencies become the parameters of Llama 3,
and metadata become files. What the file's tensors are, ``gguf.py`` knows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from pagedcore.models.checkpoints.gguf import GGUF
from pagedcore.models.linears.stored_weight import refusal
from pagedcore.tokenizer.gguf_tokenizer import gguf_tokenizer, tokenizer_in_metadata

_LLAMA_3: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of all models of Llama 3; files have the factors that these come to, and not the numbers."""
_TOLERANCE: Final = 1e-5
"""Relative difference of factors: files have them in float32."""


class GGUFSource:
    """The model of a GGUF file as ``convert`` reads it; ``expect`` and ``in`` are those of ``TensorFiles``.

    Raises:
        InvalidConfig: the file is damaged, or its tokenizer is not known and there is none beside it.
        ModelNotSupported: it cannot be computed here, or its frequencies have factors that are not Llama 3's.
    """

    def __init__(self, path: str, dtype: torch.dtype) -> None:
        self._stored, self._dtype = GGUF(path), dtype
        self._fields = {**self._stored.fields, "rope_parameters": self._rope()}
        del self._fields["rope_frequency_factors"]
        self._tokenizer = tokenizer_in_metadata(self._stored.metadata)
        is_beside = self._tokenizer is None and gguf_tokenizer(self._stored.metadata, Path(path).parent) is not None
        self.directory = Path(path).parent if is_beside else None
        """Where the files of the tokenizer are, if it is one beside the file."""

    def config(self) -> Any:
        """Return the configuration as transformers has it."""
        from transformers import AutoConfig

        return AutoConfig.for_model(**self._fields)

    def require_names(self, model: torch.nn.Module) -> None:
        """Refuse a file with other tensors than a model has; ``ModelNotSupported``."""
        self._stored.require_names(model.state_dict())

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def expect(self, name: str, shape: tuple[int, ...], *formats: str) -> torch.Tensor:
        """Return a tensor's numbers; of blocks, in the number format that the model is converted in.

        Raises:
            ModelNotSupported: there is none of this shape, or a scale is not finite.
        """
        return self._stored.numbers(name, shape, self._dtype)

    def write_others(self, directory: Path) -> None:
        """Write tokenizer and chat template of the metadata, and which tokens begin and end a text and never come.

        Raises:
            OSError: they cannot be written.
        """
        if self._tokenizer is not None:
            self._tokenizer.save(directory)
        fields = {name: self._fields[name] for name in ("bos_token_id", "eos_token_id")}
        held = {**fields, "suppress_tokens": self._stored.suppressed or None}
        said = {name: value for name, value in held.items() if value is not None}
        (directory / "generation_config.json").write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")

    def _rope(self) -> dict[str, Any]:
        """Return the parameters of the rotary embedding, those of Llama 3 in the place of factors.

        The formula is that of transformers' "llama3" (``modeling_rope_utils.py``), in float64.
        """
        rope, factors = self._stored.fields["rope_parameters"], self._stored.fields["rope_frequency_factors"]
        if factors is None:
            return dict(rope)
        length = 2 * len(factors)
        turns = _LLAMA_3["original_max_position_embeddings"] / (2 * np.pi) * (
            rope["rope_theta"] ** -(np.arange(0, length, 2) / length)
        )
        low, high = _LLAMA_3["low_freq_factor"], _LLAMA_3["high_freq_factor"]
        smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
        expected = 1.0 / ((1.0 - smooth) / factors[-1] + smooth)
        if rope["rope_type"] != "default" or not np.allclose(factors, expected, rtol=_TOLERANCE, atol=0.0):
            raise refusal("rope_freqs.weight has factors that are not those of Llama 3, which no configuration says")
        return {**rope, "rope_type": "llama3", "factor": factors[-1], **_LLAMA_3}
