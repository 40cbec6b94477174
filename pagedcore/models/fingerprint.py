"""Which model an engine runs, in so few bytes that a file can say it, and how its KV blocks were made.

Owns what has to be equal before tokens or blocks that another process computed are of use here. It reads a few
kilobytes of every weight and changes nothing; ``session_file`` compares.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any, Final

from pagedcore.execution.machine import this_machine
from pagedcore.protocols import DescribesItself, HasFingerprint, KeepsStates, ModelBackend, ModelFingerprint

_SAMPLE: Final = 512
"""Elements that are read at the beginning, in the middle and at the end of every tensor."""
_INCIDENTAL: Final = frozenset({
    "architectures", "attention_dropout", "chunk_size_feed_forward", "dtype", "head_dim", "id2label",
    "initializer_range", "label2id", "max_window_layers", "output_attentions", "output_hidden_states",
    "output_router_logits", "pretraining_tp", "problem_type", "return_dict", "router_aux_loss_coef",
    "router_jitter_noise", "torch_dtype", "transformers_version", "use_cache",
})
"""What a configuration says about where it was stored, by whom and when, about training and about the form of results,
and what the shapes of weights say too."""


def model_fingerprint(model: Any, quantization: str = "none") -> ModelFingerprint:
    """Look at a model of transformers as it was loaded; another scheme of quantisation makes it another model."""
    config = {
        name: value for name, value in model.config.to_dict().items()
        if name not in _INCIDENTAL and not name.startswith("_") and value is not None and value is not False
    }
    if quantization != "none":
        config["quantization"] = quantization
        config["schemes"] = schemes_of(model)
    described = json.dumps(config, sort_keys=True, default=str)
    return ModelFingerprint(str(model.config.model_type), _digest([described.encode()]), _digest(_samples(model)))


def backend_fingerprint(backend: ModelBackend) -> ModelFingerprint:
    """Return what a backend says about itself, or else a digest of its type and its limits."""
    if isinstance(backend, HasFingerprint):
        return backend.fingerprint
    numbers = backend.vocab_size, backend.max_model_len, sorted(backend.eos_token_ids), backend.kv_bytes_per_token
    return ModelFingerprint(type(backend).__name__, _digest([repr(numbers).encode()]), _digest([]))


class _Undescribed:
    dtype = attention_name = linear_name = "unknown"
    device_name = ""

    def layout(self, block_size: int) -> str:
        return ""


def description_of(backend: ModelBackend) -> DescribesItself:
    """Return the backend, or "unknown" for each of the facts if it says none."""
    return backend if isinstance(backend, DescribesItself) else _Undescribed()


def kv_format(backend: ModelBackend, block_size: int, mark: str = "") -> str:
    """Name the model of a backend's KV blocks, how they are computed and laid out: a digest, 64 hexadecimal digits.

    ``mark`` tells weights that were loaded later from all others, as their fingerprint is one of samples.

    With other kernels, another processor or GPU, the same tokens may give other bits; they are computed again. But KV
    of 8 bits means the same everywhere, and is near to what would be computed here: it is taken from any device.
    """
    from pagedcore._version import __version__

    layout = description_of(backend).layout(block_size)
    parts = [
        type(backend).__name__, block_size, backend.kv_bytes_per_token, layout, __version__,
        # Safety: a signature of KV covers this digest. What the rest of a session's file says of its model anybody can
        # write there, and engines with other weights may have the same key.
        backend_fingerprint(backend),
    ]
    if not _is_of_any_device(backend, layout):
        parts += _how_it_is_computed(backend)
    if mark:
        parts.append(f"weights {mark}")
    return _digest([repr(part).encode() for part in parts])


def _is_of_any_device(backend: ModelBackend, layout: object) -> bool:
    from pagedcore_kernels.layout import ScaledKVLayout

    # Why not with states: those are in the numbers of one device's kernels.
    return isinstance(layout, ScaledKVLayout) and not (isinstance(backend, KeepsStates) and backend.state_bytes)


def _how_it_is_computed(backend: ModelBackend) -> list[object]:
    """Return what the bits of K and V depend on beside the model."""
    import torch

    from pagedcore_kernels.cpu.attention.attend_pairs import form_of_attention
    from pagedcore_kernels.cpu.matmul.packed import products_here

    facts = description_of(backend)
    return [facts.attention_name, facts.linear_name, torch.__version__, this_machine().instruction_sets,
            products_here(), form_of_attention(), facts.device_name]


def schemes_of(model: Any) -> dict[str, str]:
    """Return the scheme of each layer that was quantised before it is packed, by name; of experts, those of all."""
    from pagedcore.models.linears.stored_weight import stored_weights

    found = {name: " ".join(one.scheme for one in stored_weights(module)) for name, module in model.named_modules()}
    return {name: schemes for name, schemes in found.items() if schemes}


def _samples(model: Any) -> Iterator[bytes]:
    import torch

    from pagedcore.models.linears.stored_weight import stored_tensors

    for name, tensor in sorted((*model.state_dict().items(), *stored_tensors(model))):
        yield f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode()
        flat = tensor.detach().reshape(-1)
        for start in (0, flat.numel() // 2, max(0, flat.numel() - _SAMPLE)):
            yield flat[start : start + _SAMPLE].contiguous().view(torch.uint8).cpu().numpy().tobytes()


def _digest(parts: Iterator[bytes] | list[bytes]) -> str:
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.hexdigest()
