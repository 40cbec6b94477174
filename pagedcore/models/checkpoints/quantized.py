"""Loads a quantised checkpoint: a model whose linear layers are read from files when they are packed.

Owns which format a configuration names, and the order: read the configuration, build the modules without memory,
compare every tensor's shape with its module, then map tensors. A file per format says what its tensors mean.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from safetensors import SafetensorError
from torch import nn

from pagedcore.config.schemes import SCHEMES
from pagedcore.errors import ModelNotSupported
from pagedcore.models.attention.recurrences import kept_layers
from pagedcore.models.checkpoints.awq import AWQ
from pagedcore.models.checkpoints.bitsandbytes import BitsAndBytes
from pagedcore.models.checkpoints.compressed_tensors import CompressedTensors
from pagedcore.models.checkpoints.fp8 import FP8, FP8Files
from pagedcore.models.checkpoints.gguf import GGUF
from pagedcore.models.checkpoints.gptq import GPTQ
from pagedcore.models.checkpoints.model_path import is_gguf
from pagedcore.models.checkpoints.mxfp4 import Mxfp4
from pagedcore.models.checkpoints.pretrained import as_refusals, find_file, find_weights, load_config
from pagedcore.models.checkpoints.quick_start import NotQuick, build_tree
from pagedcore.models.checkpoints.shipped_code import tell_own_class
from pagedcore.models.checkpoints.stored_experts import NamedTensors, replace_experts
from pagedcore.models.checkpoints.tensor_files import FLOATS, TensorFiles
from pagedcore.models.checkpoints.text_models import compute_buffers
from pagedcore.models.checkpoints.weight_files import only_file, tell_adapter
from pagedcore.models.families.file_names import renaming_of
from pagedcore.models.families.supported_models import check_layers_of, check_num_layers
from pagedcore.models.linears.int8_embedding import FIELD, restore_embedding
from pagedcore.models.linears.packed_linear import can_pack
from pagedcore.models.linears.schemes import fits
from pagedcore.models.linears.stored_weight import StoredWeight, refusal

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pagedcore.models.families.llama_modules import ForCausalLM

_log = logging.getLogger("pagedcore")


class StoredFormat(Protocol):
    """How the linear layers of one checkpoint are stored."""

    @property
    def scheme(self) -> str:
        """Name of the scheme, as in ``EngineConfig.quantization``, or "gguf"."""

    def weight(self, files: Any, name: str, shape: tuple[int, int], dtype: torch.dtype) -> StoredWeight | None:
        """Return the weight of a layer by its name, or ``None`` if ``files``, a ``TensorFiles``, hold it as numbers."""


_FORMATS: Final[Mapping[str, Callable[[Mapping[str, Any]], StoredFormat]]] = {
    "compressed-tensors": CompressedTensors.of, "gptq": GPTQ.of, "awq": AWQ.of,
    "bitsandbytes": BitsAndBytes.of, "mxfp4": Mxfp4.of, "fp8": FP8.of,
}


_FILES_BESIDE: Final[Mapping[str, str]] = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files of earlier versions of AutoGPTQ and AutoAWQ, which say what later ones write in ``config.json``."""
_FIRST_FIELDS: Final = ("load_in_8bit", "load_in_4bit")
"""Fields of bitsandbytes, whose name was not written when it was the only format."""


def stored_format(source: str) -> StoredFormat | None:
    """Return how a model of a directory, of a GGUF file or of a name on the hub is stored; ``None``: it is not
    quantised.

    Raises:
        ModelNotSupported: its format is not known, or is one that cannot be computed here.
    """
    if is_gguf(source):
        return GGUF(source)
    main = _read(source, "config.json")
    if not isinstance(main, dict):
        return None  # Why: what is wrong with a configuration, its loader says.
    config, method = main.get("quantization_config"), None
    for file, name in _FILES_BESIDE.items():
        if config is None:
            config, method = _read(source, file), name
    if config is None:
        return None
    if not isinstance(config, dict):
        raise refusal(f"its quant_method is in {config!r}")
    if "quant_method" in config or config.keys().isdisjoint(_FIRST_FIELDS):
        method = config.get("quant_method", method)
    else:
        method = "bitsandbytes"
    if not isinstance(method, str) or method not in _FORMATS:
        raise refusal(f"its quant_method is {method!r}")
    return _FORMATS[method](config)


def _read(source: str, name: str) -> Any:
    """Return a JSON file of a model; ``None``: there is none, or it is damaged."""
    try:
        path = find_file(source, name)
        return None if path is None else json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def config_of(source: str, stored: StoredFormat | None, trust_remote_code: bool) -> Any:
    """Return a model's configuration as transformers has it; arguments and errors as of ``load_stored``."""
    if isinstance(stored, GGUF):
        with as_refusals(source):
            return stored.config()
    return load_config(source, trust_remote_code=trust_remote_code, is_quantised=stored is not None)


@torch.no_grad()
def load_stored(
    source: str, stored: StoredFormat, dtype: torch.dtype, *, trust_remote_code: bool, is_quick: bool = False
) -> PreTrainedModel | ForCausalLM:
    """Load a model of a directory whose linear layers have a ``StoredWeight`` where the files hold them quantised.

    Args:
        source: a directory, a GGUF file, or a name on the hub, whose snapshot is downloaded where it is not in the
            cache.
        stored: as ``stored_format`` says.
        dtype: number format of all other weights, and of rows.
        trust_remote_code: whether code shipped with the model may run.
        is_quick: build it without transformers where that computes the same.

    Raises:
        ModelNotSupported: the architecture cannot run here, or the files hold other tensors than it has.
        InvalidConfig: a file is damaged.
    """
    if not isinstance(stored, GGUF):
        source = find_weights(source, trust_remote_code)
        tell_adapter(Path(source))
    model = tree_of(source, stored, dtype, trust_remote_code, is_quick)
    with as_refusals(source):
        files = _open_files(source, stored, model, dtype)
        replace_weights(model, files, stored, dtype)
        map_tensors(model, files)
        if isinstance(files, FP8Files):
            files.require_numbers(model)
        if isinstance(stored, GGUF):
            stored.scale_angles(model)
        elif (kind := getattr(model.config, FIELD, None)) is not None:
            restore_embedding(model, kind, stored.scheme)
        if not isinstance(stored, GGUF):
            tell_own_class(Path(source), trust_remote_code)
    loaded: PreTrainedModel | ForCausalLM = model
    return loaded


def why_not_quick(source: str, stored: StoredFormat) -> str:
    """Return why ``load_stored`` leaves a model to transformers, or "" if it does not; no weight is read."""
    try:
        quick_tree(source, stored, torch.float32)
    except NotQuick as reason:
        return str(reason)
    return ""


def quick_tree(
    source: str, stored: StoredFormat | None, dtype: torch.dtype, num_tensors: int | None = None
) -> ForCausalLM:
    """Build a model's modules without transformers; arguments as of ``tree_of``.

    Raises:
        NotQuick: transformers builds others, or says more of what is wrong.
    """
    if isinstance(stored, GGUF):
        raise NotQuick("it is a GGUF file")
    try:
        num_tensors = len(TensorFiles(Path(source))) if num_tensors is None else num_tensors
    except (ModelNotSupported, SafetensorError, OSError, RuntimeError) as error:
        raise NotQuick(f"its weights could not be read ({type(error).__name__})") from error
    tree = build_tree(Path(source), dtype, num_tensors, left_out={"quantization_config", FIELD})
    if (kind := (_read(source, "config.json") or {}).get(FIELD)) is not None:
        setattr(tree.config, FIELD, kind)
    return tree


def tree_of(
    source: str, stored: StoredFormat | None, dtype: torch.dtype, trust_remote_code: bool, is_quick: bool,
    num_tensors: int | None = None,
) -> Any:
    """Return a model's modules, with buffers and without memory for its weights.

    Args:
        source: as of ``load_stored``.
        stored: how its files hold it; ``None``: as numbers.
        dtype: number format of its weights.
        trust_remote_code: whether code shipped with the model may run.
        is_quick: build it without transformers where that computes the same.
        num_tensors: how many its files have; ``None``: those of its safetensors are counted.

    Raises:
        ModelNotSupported: the architecture cannot run here, or has more layers than there are tensors.
        InvalidConfig: a file is damaged.
    """
    if is_quick:
        try:
            return quick_tree(source, stored, dtype, num_tensors)
        except NotQuick as reason:
            _log.debug("The modules of the model are those of transformers: %s.", reason)
    from transformers import AutoModelForCausalLM, GenerationConfig

    config = config_of(source, stored, trust_remote_code)
    with as_refusals(source):
        if num_tensors is not None:
            check_layers_of(num_tensors, config)
        elif not isinstance(stored, GGUF):
            check_num_layers(only_file(Path(source)), config)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
        if isinstance(stored, GGUF):
            model.generation_config.suppress_tokens = stored.suppressed or None
        elif (Path(source) / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(source, local_files_only=True)
        compute_buffers(model)
    return model


def _open_files(source: str, stored: StoredFormat, model: nn.Module, dtype: torch.dtype) -> TensorFiles | GGUF:
    if isinstance(stored, GGUF):
        return stored
    if isinstance(stored, FP8):
        return FP8Files(Path(source), renaming_of(model), stored, dtype)
    return TensorFiles(Path(source), renaming_of(model))


def files_of(
    source: str, stored: StoredFormat, model: nn.Module, dtype: torch.dtype
) -> TensorFiles | GGUF | None:
    """Return the files of a model that are on this machine, for ``replace_weights``; ``None``: there are none.

    Raises:
        ModelNotSupported: they are damaged.
    """
    is_here = isinstance(stored, GGUF) or any(Path(source).glob("*.safetensors"))
    return _open_files(source, stored, model, dtype) if is_here else None


def replace_weights(model: nn.Module, files: TensorFiles | GGUF, stored: StoredFormat, dtype: torch.dtype) -> None:
    """Put a ``StoredWeight`` in the place of every weight that files hold quantised; nothing is read.

    Raises:
        ModelNotSupported: the files hold other tensors than the model has, or there is no product for one.
    """
    def weight_of(name: str, shape: tuple[int, int], has_bias: bool = False) -> StoredWeight | None:
        if (weight := stored.weight(files, name, shape, dtype)) is not None:
            _require_product(weight, name)
            if f"{name}.bias" in files and not has_bias:
                _require_no_bias(files, f"{name}.bias", shape[0])
        return weight

    if isinstance(stored, GGUF):
        stored.require_names(model.state_dict())
    kept = kept_layers(model)
    if isinstance(stored, Mxfp4) and isinstance(files, TensorFiles):
        num_replaced = stored.replace_experts(model, files, dtype)
    elif isinstance(stored, GGUF) and stored.alternates_experts:
        num_replaced = stored.replace_experts(model, dtype)
    else:
        num_replaced = replace_experts(model, files, weight_of)
    for name, module in model.named_modules():
        if isinstance(stored, GGUF) and isinstance(module, nn.Embedding):
            stored.replace_embedding(name, module, dtype)
        if type(module) is not nn.Linear:
            continue
        weight = weight_of(name, (module.out_features, module.in_features), module.bias is not None)
        # Why: what is read by others is decoded at once, where it is numbers.
        if weight is not None and not (module in kept and weight.decode is not None):
            if module in kept:
                raise refusal(f"{name} is quantised, and its architecture reads that weight by itself")
            del module.weight
            module.weight = weight  # type: ignore[assignment]
            num_replaced += 1
    if not num_replaced and stored.scheme != "none":
        raise refusal("its files hold no linear layer in the format that its configuration names")


def _require_product(weight: StoredWeight, name: str) -> None:
    """Refuse a weight that no product here takes: these read groups of a multiple of 8 inputs."""
    if weight.decode is not None:
        return
    num_inputs, num_groups = weight.shape[1], weight.num_groups
    if not (fits(SCHEMES[weight.scheme], num_inputs, num_groups) and can_pack(weight.dtype, num_inputs)):
        raise refusal(
            f"no product here is {weight.scheme} with rows in {weight.dtype} and the {num_inputs} inputs in "
            f"{num_groups} groups of {name}"
        )


def _require_no_bias(files: TensorFiles | GGUF, name: str, size: int) -> None:
    """Refuse a bias that the architecture would ignore; AutoGPTQ writes zeros there."""
    if files.expect(name, (size,), *FLOATS).any():
        raise refusal(f"{name} is not zero, and the architecture has none")


def map_tensors(model: nn.Module, files: NamedTensors) -> None:
    """Map every parameter and buffer that is left, converted where its number format differs; tied ones stay tied.

    Raises:
        ModelNotSupported: the files lack one, or have it in another shape.
    """
    places: dict[int, list[str]] = defaultdict(list)
    tensors = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        places[id(tensor)].append(name)
    for names in places.values():
        if not tensors[names[0]].is_meta:
            continue
        old, stored = tensors[names[0]], next((name for name in names if name in files), names[0])
        new = files.expect(stored, tuple(old.shape), *FLOATS).to(old.dtype)
        new = nn.Parameter(new, requires_grad=False) if isinstance(old, nn.Parameter) else new
        for name in names:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, new)
