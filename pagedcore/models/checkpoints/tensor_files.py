"""The tensors of a directory's safetensors files by name: shapes from their headers first, then mapped, not copied.

Owns where a checkpoint's tensors lie. Names, shapes and types are checked against what is expected before a tensor is
made; the library has checked by then that a header describes its file and no more.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from pagedcore.models.checkpoints.fused_experts import is_fused, split_experts
from pagedcore.models.checkpoints.tensor_part import TensorPart
from pagedcore.models.checkpoints.weight_files import only_file
from pagedcore.models.families.tensor_shapes import EMBEDDING
from pagedcore.models.families.wrappers import fuses_experts, is_wrapper, names_of_text, num_spare_rows
from pagedcore.models.linears.stored_weight import refusal

FLOATS: Final = ("BF16", "F16", "F32")
"""Names of number formats in safetensors; others are I8, U8, I32, I64."""


class TensorFiles:
    """All tensors of one directory, by the names that ``rename`` makes of those in the files; of a wrapper those of its
    language model.

    Raises:
        ModelNotSupported: there are no such files, or they do not hold what the index says.
        SafetensorError: a file is damaged.
    """

    def __init__(self, directory: Path, rename: Callable[[str], str] = str) -> None:
        from safetensors import safe_open

        self.directory = directory
        """Where they are."""
        self._places: dict[str, tuple[Any, str]] = {}
        self._file_names: dict[str, str] = {}
        own_name = name_of_text(directory)
        for path in only_file(directory):
            file: Any = safe_open(path, framework="pt")
            for name in file.keys():  # noqa: SIM118, it is no dictionary
                if not (new := rename(own_name(name))):
                    continue
                if new in self._places:
                    raise refusal(f"{name} is in its files twice")
                self._places[new], self._file_names[new] = (file, name), path.name
        self._parts: dict[str, TensorPart] = {}
        if fuses_experts(config := _config_of(directory)):
            self._split_experts()
        if num_spare := num_spare_rows(config):
            self._cut_embedding(num_spare)

    def __contains__(self, name: str) -> bool:
        return name in self._places or name in self._parts

    def __len__(self) -> int:
        return len(self._places) + len(self._parts)

    def unread(self) -> dict[str, Any]:
        """Return all tensors by name as the library's slices, of which nothing is read yet."""
        return {name: self._slice(name) for name in (*self._places, *self._parts)}

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape; nothing is read."""
        return tuple(self._slice(name).get_shape())

    def format_of(self, name: str) -> str:
        """Return the name of a tensor's number format in safetensors; nothing is read."""
        return str(self._slice(name).get_dtype())

    def place_of(self, name: str) -> str:
        """Return a tensor's name with that of its file, for people."""
        return f"{name} (in {self._file_names.get(name, 'its files')})"

    def expect(self, name: str, shape: tuple[int, ...], *formats: str) -> torch.Tensor:
        """Return a tensor of this shape and of one of these number formats, mapped.

        Raises:
            ModelNotSupported: there is none.
        """
        if name not in self:
            raise refusal(f"{name} is missing in its files")
        if self.shape_of(name) != shape or self.format_of(name) not in formats:
            raise refusal(
                f"{name} is {self.format_of(name)} of shape {list(self.shape_of(name))}, needed is "
                f"{' or '.join(formats)} of shape {list(shape)}"
            )
        if name in self._parts:
            return self._parts[name][...]
        file, name = self._places[name]
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    def scales(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor of finite scales, as ``expect`` does."""
        scales = self.expect(name, shape, *FLOATS)
        if not (is_finite := scales.isfinite()).all():
            first = float(scales[~is_finite][0])
            raise refusal(f"{self.place_of(name)} has values that are not finite, the first is {first}")
        return scales

    def _split_experts(self) -> None:
        fused = {name: self._slice(name) for name in self._places if is_fused(name)}
        for name in fused:
            del self._places[name]
        for name, one in split_experts(fused):
            if name in self._places:
                raise refusal(f"{name} is in its files twice")
            self._parts[name] = one

    def _cut_embedding(self, num_spare: int) -> None:
        whole = self._slice(EMBEDDING) if EMBEDDING in self._places else None
        if whole is not None and len(shape := whole.get_shape()) == 2 and shape[0] > num_spare:
            del self._places[EMBEDDING]
            shape = shape[0] - num_spare, shape[1]
            self._parts[EMBEDDING] = TensorPart(whole, (slice(shape[0]),), shape, is_turned=False)

    def _slice(self, name: str) -> Any:
        if name in self._parts:
            return self._parts[name]
        file, name = self._places[name]
        return file.get_slice(name)


def name_of_text(directory: Path) -> Callable[[str], str]:
    """Return what makes of a tensor's name in files the one that a model alone has; of a wrapper ``names_of_text``."""
    config = _config_of(directory)
    return names_of_text(config) if is_wrapper(config) else str


def _config_of(directory: Path) -> dict[str, Any]:
    """Return what ``config.json`` has; nothing of a damaged one, of which its loader says what is wrong."""
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}
