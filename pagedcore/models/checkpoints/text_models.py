"""The language model of a wrapper, of files that also have its other parts, or of one that is loaded.

Owns which tensors become its parameters: those of a loaded wrapper are shared with it, not copied. What the names mean,
``families/wrappers.py`` knows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pagedcore.errors import ModelNotSupported
from pagedcore.models.checkpoints.tensor_files import TensorFiles
from pagedcore.models.families import wrappers
from pagedcore.models.families.tensor_shapes import EMBEDDING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

def load_tensors(
    directory: Path, config: Any, dtype: torch.dtype, trust_remote_code: bool
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load what ``TensorFiles`` has of a directory, and how to generate, and look at no other file of it.

    Returns:
        The model, and the report of transformers on which weights were missing.

    Raises:
        ModelNotSupported: as ``TensorFiles``.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    with torch.device("meta"):
        kind = type(AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code))
    model, report = kind.from_pretrained(
        None, config=config, dtype=dtype, state_dict=TensorFiles(directory).unread(), output_loading_info=True
    )
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
    return model, report


@torch.no_grad()
def language_model_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return a loaded model itself, or of a wrapper its language model, which has the same parameters.

    Raises:
        ModelNotSupported: that is not known to compute alone what it computes in the wrapper.
    """
    if not wrappers.is_wrapper(whole := model.config.to_dict()):
        return model
    from transformers import AutoModelForCausalLM

    config = wrappers.text_config(model.config)
    with torch.device("meta"):
        part = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    compute_buffers(part)
    own_name, num_spare = wrappers.names_of_text(whole), wrappers.num_spare_rows(whole)
    tensors = {own_name(name): one for name, one in model.state_dict(keep_vars=True).items()}
    if num_spare and EMBEDDING in tensors:
        tensors[EMBEDDING] = torch.nn.Parameter(tensors[EMBEDDING][:-num_spare], requires_grad=False)
    for name in part.state_dict():
        if name not in tensors:
            raise ModelNotSupported(f"model: {type(model).__name__} has no {name} for its language model.")
        parent, _, last = name.rpartition(".")
        setattr(part.get_submodule(parent), last, tensors[name])
    part.generation_config = copy.deepcopy(model.generation_config)
    return part


def compute_buffers(model: Any) -> None:
    """Compute the buffers that no file holds as transformers does it when it loads: by initialising their modules.

    Parameters have no memory yet, so that nothing happens to them. A module is initialised by the nearest of the models
    that it is in, as there: another one may not know it.
    """
    for module, owner in _with_models(model, model):
        for name in module._non_persistent_buffers_set:
            module._buffers[name] = torch.empty_like(module._buffers[name], device="cpu")
        if module._non_persistent_buffers_set:
            owner._init_weights(module)


def _with_models(module: Any, owner: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every module in this one, and the model that initialises it."""
    from transformers import PreTrainedModel

    owner = module if isinstance(module, PreTrainedModel) else owner
    yield module, owner
    for child in module.children():
        yield from _with_models(child, owner)
