"""Reads what a directory of sentence-transformers says of embeddings: ``modules.json`` and what it names.

Owns which of it is computed here. What cannot be is no reason to refuse the model, which may generate; the record says
why, for the first text that is to be embedded. Files come from strangers: names of folders lead nowhere else, and what
is of another type than it should be counts as unknown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from pagedcore.embedding_defaults import EmbeddingDefaults
from pagedcore.errors import show
from pagedcore.models.checkpoints.pretrained import find_file
from pagedcore.models.checkpoints.shipped_code import AUTO_MAP

_MODES: Final[Mapping[str, str]] = MappingProxyType({
    "pooling_mode_lasttoken": "lasttoken", "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max", "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
})
"""Flags of older files, and what newer ones call them."""
FOLDER: Final = re.compile(r"[\w-][\w.-]{0,95}", re.ASCII)
"""The name of a folder of a module, which leads nowhere else."""
MODULES: Final = "modules.json"
"""What names the modules of a directory."""
LIMITS: Final = "sentence_bert_config.json"
"""What says how long texts may be, and how they are tokenised."""
PROMPTS: Final = "config_sentence_transformers.json"
"""What has the prompts."""
_MAX_BYTES: Final = 2**20
_MAX_PROMPTS: Final = 256
_MAX_PROMPT: Final = 2**14


def read_embedding_defaults(source: str, *, trust_remote_code: bool = False) -> EmbeddingDefaults:
    """Return what a directory, or a name on the hub, says of embeddings; without such files the usual.

    ``trust_remote_code``: the code that the configuration names runs, and the self-test has compared it.
    """
    config = read_json(source, "config.json")
    if isinstance(config, dict) and config.get(AUTO_MAP) and not trust_remote_code:
        return EmbeddingDefaults(refusal=(
            f"its configuration names code that is shipped with it ({AUTO_MAP}) and does not run here; that code may "
            f"look at both sides of a token. If you know that it does not, remove {AUTO_MAP}"))
    if find_file(source, MODULES) is None:
        return EmbeddingDefaults()
    modules = read_json(source, MODULES)
    kinds, folders = modules_of(modules)
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        return EmbeddingDefaults(refusal=(
            f"its modules.json lists {show(', '.join(kinds))}; computed are Transformer, Pooling and Normalize"))
    own, prompts = read_object(source, LIMITS), read_object(source, PROMPTS)
    if own.get("do_lower_case"):
        return EmbeddingDefaults(refusal="its sentence_bert_config.json wants texts in lower case, as none are here")
    pooling = read_json(source, f"{folders[1]}/config.json") if FOLDER.fullmatch(folders[1]) else None
    if not isinstance(pooling, dict):
        # Why: a guess gives vectors that look right and are others.
        return EmbeddingDefaults(refusal=f"the config.json of its pooling in {show(folders[1])} cannot be read")
    length, chosen, known = own.get("max_seq_length"), prompts.get("default_prompt_name"), prompts_of(prompts)
    return EmbeddingDefaults(
        pooling=_pooling_of(pooling), normalize="Normalize" in kinds, prompts=known,
        default_prompt=chosen if isinstance(chosen, str) and chosen in known else None,
        pools_prompt=pooling.get("include_prompt") is not False,
        max_tokens=length if type(length) is int and length > 0 else None,
    )


def read_json(source: str, name: str) -> Any:
    """Return what a file of JSON holds; ``None`` if there is none, or it is too large, or is no JSON."""
    path = find_file(source, name)
    if path is None or path.stat().st_size > _MAX_BYTES:
        return None
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def read_object(source: str, name: str) -> dict[str, Any]:
    """Return the fields of a file of JSON, none of what is no object."""
    found = read_json(source, name)
    return found if isinstance(found, dict) else {}


def modules_of(modules: Any) -> tuple[list[str], list[str]]:
    """Return the kinds of the modules in their order, "?" for those of others, and their folders."""
    listed = [one for one in modules if isinstance(one, dict)] if isinstance(modules, list) else []
    names = [str(one.get("type")) for one in listed]
    kinds = [name.rpartition(".")[2] if name.startswith("sentence_transformers.") else "?" for name in names]
    return kinds, [str(one.get("path")) for one in listed]


def _pooling_of(config: Mapping[str, Any]) -> str:
    given = config.get("pooling_mode") or [mode for flag, mode in _MODES.items() if config.get(flag) is True]
    modes = given if isinstance(given, list) else [given]
    joined = " and ".join(map(str, modes)) or "mean"
    return "last" if joined == "lasttoken" else joined


def prompts_of(config: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the prompts of ``config_sentence_transformers.json`` by name; none if they are something else."""
    given = config.get("prompts")
    known = {name: text for name, text in given.items() if isinstance(text, str) and len(text) <= _MAX_PROMPT} if (
        isinstance(given, dict) and len(given) <= _MAX_PROMPTS) else {}
    return MappingProxyType(known)
