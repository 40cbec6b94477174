"""Which files hold the weights of a directory: safetensors in it, by their usual name or by its index.

Owns the look at names, which every loader does before a file is opened, also where transformers opens it: that reads
what an index names in whatever way the name's ending says, pickles among them. Links are followed, as the hub's cache
is made of them, so names are what is checked.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Final

from pagedcore.config.limits import MAX_INDEX_BYTES
from pagedcore.errors import InvalidConfig, ModelNotSupported

_log = logging.getLogger("pagedcore")
_WEIGHTS: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_ADAPTER: Final = "adapter_config.json"
_ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
_NAME: Final = re.compile(r"[\w-][\w.+ -]{0,199}\.safetensors")
"""What a file of weights may be called: no directory, no link upward, nothing that a shell or the hub would expand."""
_PICKLES: Final = frozenset((".bin", ".ckpt", ".pkl", ".pt", ".pth"))


def weight_files(directory: Path) -> list[Path]:
    """Return the files that have the weights, in the order of their names; nothing of them is read.

    Raises:
        ModelNotSupported: there are none, or the index names what is no safetensors file of the directory.
    """
    if (directory / _WEIGHTS).is_file():
        return [directory / _WEIGHTS]
    names = indexed_names(directory)
    if not names:
        _refuse_others(directory)
    if missing := [name for name in names if not (directory / name).is_file()]:
        raise ModelNotSupported(f"model: its index names {missing[0]!r}, which is no file of its directory.")
    return [directory / name for name in names]


def has_adapter(directory: Path) -> bool:
    """Whether there is an adapter, beside a model or alone."""
    return (directory / _ADAPTER).exists()


def tell_adapter(directory: Path) -> None:
    """Log that an adapter beside a model is not applied by itself, if there is one."""
    if has_adapter(directory):
        _log.info("An adapter lies beside the model (%s): the model runs without it, save for requests with lora=... "
                  "where adapters={...} names its directory.", _ADAPTER)


def require_model(directory: Path) -> None:
    """Refuse a directory that has no configuration of a model.

    Raises:
        ModelNotSupported: it has an adapter alone.
        InvalidConfig: it has nothing of a model.
    """
    if (directory / "config.json").is_file():
        return
    if has_adapter(directory):
        raise ModelNotSupported(
            f"model: the directory has an adapter ({_ADAPTER}) and no model. Name its base model, or merge it into "
            "that, with merge_and_unload of peft, and save the result."
        )
    raise InvalidConfig("model: the directory has no config.json.")


def indexed_names(directory: Path) -> list[str]:
    """Return the names of files in a directory's index, sorted; none if there is no index.

    Raises:
        ModelNotSupported: it is none, or has a name that is not that of a safetensors file beside it.
    """
    index = directory / _INDEX
    if not index.is_file():
        return []
    if (size := index.stat().st_size) > MAX_INDEX_BYTES:
        raise ModelNotSupported(f"model: its {_INDEX} has {size} bytes, allowed are {MAX_INDEX_BYTES}.")
    try:
        names = list(json.loads(index.read_bytes())["weight_map"].values())
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        names = []
    if not names:
        raise ModelNotSupported(f"model: its {_INDEX} has no weight_map of names.")
    # Safety: what the loader of transformers opens is what is named here, by a reader that depends on the ending.
    for name in names:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            shown = repr(name)[:100]
            raise ModelNotSupported(
                f"model: its index names {shown}, allowed are files of its directory whose names end in .safetensors."
            )
    return sorted(set(names))


def only_file(directory: Path) -> list[Path]:
    """Return the files as ``weight_files``, or the only one that there is, whatever its name; errors as there."""
    found = [path for path in sorted(directory.glob("*.safetensors")) if path.name != _ADAPTER_WEIGHTS]
    has_usual = any((directory / name).is_file() for name in (_WEIGHTS, _INDEX))
    return found if len(found) == 1 and not has_usual else weight_files(directory)


def _refuse_others(directory: Path) -> None:
    if (directory / _ADAPTER_WEIGHTS).is_file():
        raise ModelNotSupported(
            f"model: it has the weights of an adapter ({_ADAPTER_WEIGHTS}) and none of a model. Put those beside."
        )
    pickles = sorted(path.name for path in directory.iterdir() if path.suffix.lower() in _PICKLES)
    if pickles:
        raise ModelNotSupported(
            f"model: its weights are in {pickles[0][:80]!r}, a format whose reading can run code; only safetensors are "
            "read. If you trust its source, load it with transformers and save it again with save_pretrained."
        )
    number = len([path for path in directory.glob("*.safetensors") if path.name != _ADAPTER_WEIGHTS])
    raise ModelNotSupported(f"model: it has {number} safetensors files and no {_WEIGHTS} or {_INDEX}.")
