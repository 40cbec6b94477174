"""What ``adapter_config.json`` says: which layers an adapter of PEFT has, their ranks, and their scales.

Owns the decision which settings change what an adapter computes. Those that this project does not compute are refused
by name; a name that it does not know is refused too, unless its value says that it is off.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from pagedcore.config.limits import MAX_ADAPTER_RANK
from pagedcore.errors import InvalidAdapter, describe, describe_name

CONFIG: Final = "adapter_config.json"
_WITHOUT_EFFECT: Final = frozenset({
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "fan_in_fan_out",
    "inference_mode", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config",
})
"""Settings of training, of other settings that are refused, and of how PEFT keeps what it reads."""
_KNOWN: Final = frozenset({
    "alpha_pattern", "bias", "exclude_modules", "init_lora_weights", "layers_pattern", "layers_to_transform",
    "lora_alpha", "peft_type", "r", "rank_pattern", "target_modules", "target_parameters", "task_type", "use_rslora",
})
_KEEPS_BASE: Final = ("gaussian", "eva", "orthogonal")
"""How matrices may have been begun with: of any other way PEFT changes the model's weights too, or what is computed."""
_OFF: Final[tuple[object, ...]] = (None, False, {}, [], "")
_PATTERN: Final = re.compile(r"\^?(?:[\w.-]|\\[.d])+\$?")
"""What a pattern of a rank or scale may be: names and numbers, as an expression that repeats nothing takes no time."""
_ANYTHING: Final = r".*\."
_NAME: Final = re.compile(r"[\w.-]+")
_SHOWN: Final = re.compile(r"[\w.-]{1,160}")
_LAYER: Final = re.compile(r".*?\.[^.]*\.(\d+)\.")
_MOST_NAMES: Final = 4096
"""Names and patterns of one setting; each is compared with each layer."""
_MOST_ALPHA: Final = 2.0**20
_MOST_COMPARED: Final = 2**22
"""Patterns, times layers: they take some seconds."""


def invalid(what: str, given: object, limit: str, advice: str = "") -> InvalidAdapter:
    """Make the error of a setting or a tensor; ``given`` is described without its content."""
    return InvalidAdapter(what, given, limit, advice)


def refused(what: str, found: str, limit: str, advice: str = "") -> InvalidAdapter:
    """Make the error of what was found, in words of this project."""
    return InvalidAdapter(what, found, limit, advice, is_described=True)


def shown(name: str) -> str:
    """Return the name of a tensor or a layer as messages may have it."""
    return name if _SHOWN.fullmatch(name) else describe(name)


class AdapterConfig:
    """The settings of one adapter.

    Invariant: nothing in it takes more than linear time, for a hostile file.
    """

    def __init__(self, contents: bytes) -> None:
        """Check what a file has.

        Raises:
            InvalidAdapter: it is damaged, or its adapter computes something else than a product's low-rank update.
        """
        try:
            fields = json.loads(contents)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            raise refused(CONFIG, "no JSON object", "an object of settings")
        self._fields: Mapping[str, Any] = fields
        self._require_known()
        self._rank = _rank("r", fields.get("r", 8))
        self._alpha = _alpha("lora_alpha", fields.get("lora_alpha", 8))
        self._ranks = [(_compiled(key), _rank("rank_pattern", one))
                       for key, one in self._patterns("rank_pattern").items()]
        self._alphas = [(_compiled(key), _alpha("alpha_pattern", one))
                        for key, one in self._patterns("alpha_pattern").items()]
        self._targets, self._excluded = self._names("target_modules"), self._names("exclude_modules")
        parameters = self._names("target_parameters") or ()
        if isinstance(parameters, str):
            raise invalid("target_parameters", parameters, f"at most {_MOST_NAMES} names of parameters")
        self.parameters = parameters
        """Names, or ends of names, of parameters that are no layers' weights and have matrices."""
        if self._targets is None and not parameters:
            raise invalid("target_modules", None, "names of layers, an expression, or 'all-linear'")
        self._layers, self._before_layer = self._layer_numbers()

    def rank_of(self, name: str) -> int:
        """Return the rank of the matrices of the layer ``name``."""
        return next((rank for pattern, rank in self._ranks if pattern.match(name)), self._rank)

    def require_few_patterns(self, num_layers: int) -> None:
        """Refuse patterns of which each would be compared with each layer for too long. Raises ``InvalidAdapter``."""
        num_patterns = len(self._ranks) + len(self._alphas)
        if num_patterns * num_layers > _MOST_COMPARED:
            raise refused("rank_pattern and alpha_pattern", f"{num_patterns} patterns for {num_layers} layers",
                          f"at most {_MOST_COMPARED // num_layers} for so many")

    def scale_of(self, name: str) -> float:
        """Return what the product of both matrices is multiplied by."""
        alpha = next((alpha for pattern, alpha in self._alphas if pattern.match(name)), self._alpha)
        rank = self.rank_of(name)
        return alpha / (math.sqrt(rank) if self._fields.get("use_rslora") else rank)

    def targets(self, name: str, *, is_linear: bool) -> bool | None:
        """Say whether the layer ``name`` has matrices; ``None``: the files say.

        Why the files: an expression may take any time, and PEFT writes the matrices of all layers that match.
        """
        excluded, targets = self._excluded, self._targets or ()
        if isinstance(excluded, str) or (isinstance(targets, str) and targets.lower() != "all-linear"):
            return None
        if excluded is not None and _ends_in_one(name, excluded):
            return False
        if isinstance(targets, str):
            return is_linear
        return _ends_in_one(name, targets) and self._is_in_layers(name)

    def targets_parameter(self, name: str) -> bool:
        """Say whether a parameter that is no layer's weight has matrices, such as that of all experts of a layer."""
        return _ends_in_one(name, self.parameters)

    def _is_in_layers(self, name: str) -> bool:
        if self._layers is None:
            return True
        found = _LAYER.match(name)
        for before in self._before_layer:
            if found := re.match(rf"(?:^|.*?\.){re.escape(before)}\.(\d+)\.", name):
                break
        return found is not None and len(found[1]) < 10 and int(found[1]) in self._layers

    def _require_known(self) -> None:
        fields = self._fields
        if (kind := fields.get("peft_type")) != "LORA":
            raise invalid("peft_type", kind, "'LORA'", "Other methods of PEFT are not computed.")
        if (task := fields.get("task_type")) not in (None, "CAUSAL_LM"):
            raise invalid("task_type", task, "'CAUSAL_LM' or none")
        if (bias := fields.get("bias", "none")) != "none":
            raise invalid("bias", bias, "'none'", "Merge an adapter with biases into its model.")
        begun = fields.get("init_lora_weights", True)
        if not isinstance(begun, bool | None) and begun not in _KEEPS_BASE:
            raise invalid(
                "init_lora_weights", begun, f"true, false, or one of {', '.join(_KEEPS_BASE)}",
                "Adapters that were begun in other ways may change the model's own weights too; save it with PEFT's "
                "path_initial_model_for_weight_conversion, or merge it into its model.")  # fmt: skip
        if not isinstance(fields.get("use_rslora", False), bool | None):
            raise invalid("use_rslora", fields["use_rslora"], "true or false")
        for name, value in fields.items():
            if name not in _KNOWN and name not in _WITHOUT_EFFECT and value not in _OFF:
                raise invalid(
                    describe_name(name), value, "that it is off",
                    "What it changes is not computed. Merge the adapter into its model, with merge_and_unload of PEFT.",
                )

    def _patterns(self, name: str) -> Mapping[str, Any]:
        found = self._fields.get(name) or {}
        if not isinstance(found, dict) or len(found) > _MOST_NAMES:
            raise invalid(name, found, f"at most {_MOST_NAMES} names of layers with a number each")
        # Why without: any text may be before a name, so that this says nothing; PEFT writes it for experts.
        found = {key.removeprefix(_ANYTHING): value for key, value in found.items()}
        if not all(len(key) <= 256 and _PATTERN.fullmatch(key) for key in found):
            raise invalid(name, found, "names of layers, with no part that may repeat")
        return found

    def _names(self, name: str) -> Collection[str] | str | None:
        found = self._fields.get(name)
        if found is None or (isinstance(found, str) and found):
            return found or None
        is_list = isinstance(found, list) and len(found) <= _MOST_NAMES
        if not is_list or not all(isinstance(one, str) and one for one in found):
            raise invalid(name, found, f"an expression, or at most {_MOST_NAMES} names of layers")
        return frozenset(found) or (None if name == "exclude_modules" else found)

    def _layer_numbers(self) -> tuple[frozenset[int] | None, list[str]]:
        given, before = self._fields.get("layers_to_transform"), self._fields.get("layers_pattern") or []
        numbers = [given] if type(given) is int else given or []
        if not isinstance(numbers, list) or len(numbers) > _MOST_NAMES or any(type(one) is not int for one in numbers):
            raise invalid("layers_to_transform", given, f"at most {_MOST_NAMES} numbers of layers")
        names = [before] if isinstance(before, str) else before
        is_list = isinstance(names, list) and len(names) <= 16
        if not is_list or not all(isinstance(one, str) and _NAME.fullmatch(one) for one in names):
            raise invalid("layers_pattern", before, "names of lists of layers")
        return frozenset(numbers) or None, names


def _ends_in_one(name: str, ends: Collection[str]) -> bool:
    """Whether a layer's name is one of these, or ends in one at a dot."""
    parts = name.split(".")
    return any(".".join(parts[begin:]) in ends for begin in range(len(parts)))


def _compiled(pattern: str) -> re.Pattern[str]:
    """Return what matches the layers that a pattern means, as PEFT says."""
    return re.compile(rf"(.*\.)?({pattern})$")


def _rank(what: str, value: object) -> int:
    if type(value) is not int or not 1 <= value <= MAX_ADAPTER_RANK:
        raise invalid(what, value, f"a rank from 1 to {MAX_ADAPTER_RANK}")
    return value


def _alpha(what: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MOST_ALPHA:
        raise invalid(what, value, f"a number of magnitude {_MOST_ALPHA:g} at most")
    return float(value)
