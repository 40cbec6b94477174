"""Turns what a user calls a model into a ``ModelBackend``, and finds the tokenizer that goes with it.

Owns the distinction between a name, a directory, a GGUF file, "demo", a loaded model and a backend of one's own.
transformers is imported only when one of the first five is given. Read ``models/checkpoints/pretrained.py`` and
``models/transformers_model.py``.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pagedcore.config.engine_config import EngineConfig
from pagedcore.config.schemes import AUTO_INT8
from pagedcore.demo_model import DEMO_MODEL_DIR
from pagedcore.errors import InternalError, InvalidConfig, ModelNotSupported, describe
from pagedcore.models.checkpoints.hub import find_on_hub
from pagedcore.models.checkpoints.model_path import gguf_in, is_gguf
from pagedcore.protocols import AttentionFactory, ChecksAhead, LinearFactory, ModelBackend, TakesKernels, Tokenizer

if TYPE_CHECKING:
    import torch

    from pagedcore.execution.devices import Device
    from pagedcore.models.blueprint import Blueprint
    from pagedcore.models.checkpoints.packed_file import PackedFile
    from pagedcore.models.checkpoints.packed_model import Wanted
    from pagedcore.models.checkpoints.quantized import StoredFormat
    from pagedcore.models.origin import Succession
    from pagedcore.models.transformers_model import TransformersModel
    from pagedcore.text_head import PairDefaults, TextHead

_log = logging.getLogger("pagedcore")

Loader = Callable[[str, str], Any]
"""``(table, name) -> implementation``: looks an entry of a plugin table up."""

_HUB_ID: Final = re.compile(r"[\w-][\w.-]{0,95}(/[\w-][\w.-]{0,95})?", re.ASCII)
DEFAULT_ATTENTION: Final = "numba-cpu"
DEFAULT_MODEL_BACKEND: Final = "transformers"


def resolve_backend(model: Any, config: EngineConfig, load: Loader) -> ModelBackend:
    """Return a backend for ``model``: itself, if it is one, or what the entry ``config.model_backend`` makes of it.

    Args:
        model: what the entry takes; for "transformers" see ``transformers_backend``.
        config: settings of the engine.
        load: returns an entry of a plugin table.

    Raises:
        InvalidConfig: there is no such entry, or it makes no backend of this.
        DeviceUnavailable: the device is not here; nothing was loaded.
    """
    from pagedcore_kernels.cpu.runtime.float_state import DefaultFloatState
    from pagedcore_kernels.cpu.runtime.threads import num_threads_of_torch

    if config.model_backend == "auto" and isinstance(model, ModelBackend):
        for name, is_given in (("device", config.device.startswith("cuda")),
                               ("kv_cache_dtype", config.kv_cache_dtype != "auto")):
            if is_given:
                raise InvalidConfig(
                    f"{name}: got {getattr(config, name)!r} for a model backend of your own, which decides itself. "
                    "Leave it."
                )
        return model
    name = DEFAULT_MODEL_BACKEND if config.model_backend == "auto" else config.model_backend
    # Why here: this makes torch start its threads, which a backend of the user's own may do without.
    with DefaultFloatState(num_threads_of_torch()):
        backend = load("models", name)(model, config, load)
    if not isinstance(backend, ModelBackend):
        raise InvalidConfig(
            f"model_backend: {name!r} made {describe(backend)}, needed is an object with the members of ModelBackend."
        )
    return backend


def transformers_backend(model: Any, config: EngineConfig, load: Loader) -> TransformersModel:
    """Return a backend for a model of transformers; the entry "transformers" of the plugin table ``models``.

    Args:
        model: "demo", a directory, a GGUF file, a hub name, or a loaded ``PreTrainedModel``, which is taken over.
        config: number format, device, block size, attention and linear backend, and trust.
        load: as for ``resolve_backend``, whose errors are raised.
    """
    return _backend(model, config, load)[0]


def portable_backend(
    source: str, config: EngineConfig, load: Loader, on_loaded: Callable[[Any], None]
) -> tuple[TransformersModel, Any]:
    """Return a backend made of a model's own files, whatever packed weights are beside them, and its tree of modules.

    Args:
        source: a directory or a GGUF file.
        config: as of ``transformers_backend``, as are ``load`` and the errors.
        load: looks an entry of a plugin table up.
        on_loaded: called with the tree before its layers are packed.
    """
    return _backend(source, config, load, use_packed=lambda: None, on_loaded=on_loaded)


def backend_of_packed(source: str, packed: PackedFile, config: EngineConfig, load: Loader) -> TransformersModel:
    """Return a backend made of packed weights that are mapped; other arguments and errors as above."""
    return _backend(source, config, load, use_packed=lambda: packed)[0]


def _backend(
    model: Any, config: EngineConfig, load: Loader, *, use_packed: Callable[[], PackedFile | None] | None = None,
    on_loaded: Callable[[Any], None] = lambda model: None, succession: Succession | None = None,
) -> tuple[TransformersModel, Any]:
    """Return a backend and its model; ``use_packed`` returns packed weights in the place of those found by a path."""
    if not (is_named := isinstance(model, str | os.PathLike)):
        _require_model(model)
    from pagedcore.execution import devices
    from pagedcore.execution.memory_pages import give_back_freed
    from pagedcore.models.checkpoints import auto_int8
    from pagedcore.models.checkpoints.ownership import require_free, take_whole
    from pagedcore.models.checkpoints.packed_model import find_packed, load_packed
    from pagedcore.models.checkpoints.pretrained import as_refusals
    from pagedcore.models.checkpoints.quantized import stored_format
    from pagedcore.models.linears.stored_weight import has_unpacked, shapes_of_tensors, tied_names
    from pagedcore.models.origin import weight_files
    from pagedcore.models.transformers_model import TransformersModel

    # Why: all that can be refused without the model is, before it is loaded.
    device = devices.find_device(config.device)
    name, attention = _attention(config, device, load, None if is_named else model)
    model = model_source(model) if is_named else model
    files = weight_files(model) if is_named else {}
    stored = stored_format(model) if is_named else None
    is_quantized = stored is not None and stored.scheme != "none"
    scheme = _quantization(config, stored if is_quantized else None)
    quantization = "none" if stored and device.kind != "cpu" and scheme == stored.scheme else scheme
    linears = _linears(config, device, load, quantization, is_quantized)
    given, source = model, model if is_named else type(model).__name__
    if use_packed is None:
        use_packed = partial(find_packed, source, _wanted(config, device)) if is_named else _no_packed
    packed = use_packed()
    with _damage_first(packed):
        model = _load(model, stored, config, device, quantization) if packed is None else load_packed(
            source, stored, packed, trust_remote_code=config.trust_remote_code)
    on_loaded(model)
    # Why now: layers of other weights are compared before they are packed, too.
    weights = shapes_of_tensors(model), tied_names(model)
    _tell_parts(model.config)
    heads = _heads(given, model)
    # Why: an architecture's own code runs here, and raises what it likes.
    with _damage_first(packed), as_refusals(source, "its architecture cannot run here", ModelNotSupported):
        if quantization == AUTO_INT8 and not is_quantized:
            require_free(model)
            auto_int8.apply(model)
        backend = TransformersModel(
            model, attention, block_size=config.block_size, is_private=is_named, attention_name=name, linears=linears,
            linear_name=config.linear_backend, quantization=quantization, kv_cache_dtype=config.kv_cache_dtype,
            device=device, when_made=packed.require_undamaged if packed is not None else lambda: None,
            succession=succession,
        )
    give_back_freed()
    found = os.path.abspath(given) if is_named else None, files
    _note_origin(backend, packed, scheme, config, load, (*weights, *found), is_quantized=is_quantized)
    _tell_of_texts(backend, given, heads, config.trust_remote_code)
    if not is_named and given is not model:
        take_whole(given)
    if stored is not None and has_unpacked(model):
        raise InternalError("a quantised layer was not packed")
    return backend, model


def _require_model(model: Any) -> None:
    # Why: a caller with a loaded model has imported transformers.
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        raise InvalidConfig(
            f'model: got {describe(model)}, allowed is "demo", a directory, a GGUF file, a hub name, a causal language '
            "model of transformers, or an object with the members of ModelBackend."
        )


def _of_files(
    config: EngineConfig, load: Loader, source: str, on_loaded: Callable[[Any], None], succession: Succession
) -> TransformersModel:
    """Return a backend of other weights; ``on_loaded`` gets the tree of modules before a layer is packed, and refuses
    it by what it raises. Other arguments and errors as above.
    """
    return _backend(source, config, load, on_loaded=on_loaded, succession=succession)[0]


def _note_origin(
    backend: TransformersModel, packed: PackedFile | None, scheme: str, config: EngineConfig, load: Loader,
    weights: tuple[Any, ...], *, is_quantized: bool,
) -> None:
    """Tell a backend how its weights were loaded, and which model packed ones are; ``weights`` are the last fields of
    an ``Origin``.
    """
    from pagedcore.models.checkpoints.packed_model import identity_of
    from pagedcore.models.origin import Origin

    if packed is not None:
        backend.fingerprint = identity_of(packed)
        scheme = scheme if is_quantized else str(packed.header["scheme"])
    # Why: files that are quantised say their scheme themselves, which may be none that a setting has.
    asked = config.quantization if is_quantized else scheme
    again = replace(config, dtype=str(backend.dtype).removeprefix("torch."), quantization=asked)
    reason = f"its files hold quantised weights ({scheme})" if is_quantized else ""
    backend.origin = Origin(scheme, partial(_of_files, again, load), reason, *weights)


def _heads(given: Any, model: Any) -> tuple[TextHead | None, PairDefaults]:
    """Return what turns states of a model into numbers, as its files say, and how pairs become texts: before products
    take the output layer's weights.
    """
    from pagedcore.models.checkpoints.classifier_files import head_of_classifier
    from pagedcore.models.checkpoints.pair_files import heads_of

    return heads_of(_source_of_files(given), model, head_of_classifier(model))


def _source_of_files(given: Any) -> str | None:
    """Return the directory, or the name on the hub, that has files beside weights; ``None``: there is none."""
    return os.fspath(given) if isinstance(given, str | os.PathLike) and not is_gguf(os.fspath(given)) else None


def _tell_of_texts(
    backend: TransformersModel, given: Any, heads: tuple[TextHead | None, PairDefaults], trust_remote_code: bool
) -> None:
    """Tell a backend what the directory that its model came from, if it did, says of texts that get no completion."""
    from pagedcore.models.checkpoints.sentence_files import read_embedding_defaults

    backend.text_head, backend.pair_defaults = heads
    if (source := _source_of_files(given)) is not None:
        known = read_embedding_defaults(source, trust_remote_code=trust_remote_code)
        backend.embedding_defaults = replace(known, generates=backend.embedding_defaults.generates)


@contextmanager
def _damage_first(packed: PackedFile | None) -> Iterator[None]:
    """Raise that the file is damaged, if it is, in the place of what its bytes lead to."""
    try:
        yield
    except Exception:
        if packed is not None:
            packed.require_undamaged()
        raise


def _no_packed() -> None:
    """There are no packed weights of a loaded model."""


def _tell_parts(config: Any) -> None:
    """Log that a wrapper's language model is computed alone, if it is one."""
    from pagedcore.models.families.wrappers import WHOLE

    if whole := getattr(config, WHOLE, None):
        _log.info("%s runs as a model of text: its language model is computed as %s, and its other parts are left out.",
                  whole, config.model_type)


def _wanted(config: EngineConfig, device: Device) -> Wanted:
    from pagedcore.models.checkpoints.packed_model import Wanted
    from pagedcore.models.checkpoints.pretrained import computing_dtype

    others = [f"device {config.device!r}"] if device.kind != "cpu" else []
    others += [f"linear_backend {config.linear_backend!r}"] if config.linear_backend != "auto" else []
    is_chosen = config.dtype != "auto"
    dtype = computing_dtype(config.dtype if is_chosen else device.default_dtype, device.kind)
    return Wanted(dtype, is_chosen, config.quantization, others[0] if others else "")


def _quantization(config: EngineConfig, stored: StoredFormat | None) -> str:
    """Return the scheme of a model, which a quantised checkpoint has of its own; int4 of one may take int8 rows.

    Raises:
        InvalidConfig: the checkpoint's is another one than that of the settings.
    """
    from pagedcore.models.linears.int8_rows import may_take_int8_rows

    wanted = config.quantization
    if stored is None or may_take_int8_rows(stored.scheme, wanted):
        return wanted
    if wanted not in ("none", stored.scheme):
        raise InvalidConfig(f"quantization: got {wanted!r} for a {stored.scheme} checkpoint. Leave it.")
    return stored.scheme


def _attention(config: EngineConfig, device: Device, load: Loader, loaded: Any) -> tuple[str, Any]:
    """Return the attention factory for a device, and its name; ``loaded`` is the model if there is one already.

    Raises:
        InvalidConfig: the device or the model cannot use it.
    """
    from pagedcore.models.layouts import layout_maker, requirements_of

    name = _attention_name(config, device.default_attention)
    attention = load("attention", name)
    if device.kind not in (kinds := requirements_of(attention).devices):
        raise InvalidConfig(
            f"attention_backend: {name!r} computes on {' and '.join(kinds)}, the model on {device.kind}. "
            f"Leave it at 'auto', or set device={kinds[0]!r}."
        )
    if config.cuda_kernels is not None:
        if not isinstance(attention, TakesKernels):
            raise InvalidConfig(
                f"cuda_kernels: got a directory, and attention_backend {name!r} takes no kernels from one. Leave it, "
                "or set device='cuda'."
            )
        attention = attention.with_kernels(Path(config.cuda_kernels))
    layout_maker(attention, config.kv_cache_dtype)
    if isinstance(attention, ChecksAhead):
        attention.check_ahead(_dtype_ahead(loaded, config, device))
    return name, attention


def _dtype_ahead(loaded: Any, config: EngineConfig, device: Device) -> torch.dtype:
    """Return the number format that weights will be in; ``loaded`` is the model if there is one already."""
    from pagedcore.models.checkpoints.pretrained import resolve_dtype
    from pagedcore.models.families.model_facts import format_and_device

    if config.dtype == "auto" and loaded is not None:
        return format_and_device(loaded)[0]
    return resolve_dtype(device.default_dtype if config.dtype == "auto" else config.dtype)


def _load(model: Any, stored: StoredFormat | None, config: EngineConfig, device: Device, quantization: str) -> Any:
    """Return a model with its weights, in a number format that the device computes in."""
    from pagedcore.models.checkpoints.classifier_files import body_of_classifier
    from pagedcore.models.checkpoints.fp8 import FP8
    from pagedcore.models.checkpoints.ownership import require_free
    from pagedcore.models.checkpoints.pretrained import computing_dtype, load_pretrained, resolve_dtype, widen_halves
    from pagedcore.models.checkpoints.quantized import load_stored
    from pagedcore.models.checkpoints.text_models import language_model_of
    from pagedcore.models.checkpoints.unloaded_weights import require_loaded
    from pagedcore.models.linears.float8_linear import why_no_float8
    from pagedcore.models.linears.int8_rows import take_int8_rows

    dtype, trust = device.default_dtype if config.dtype == "auto" else config.dtype, config.trust_remote_code
    why_decoded = f"there is no product of them on {device.kind}"
    if stored is not None:
        number_format, is_quick = computing_dtype(dtype, device.kind), device.kind == "cpu"
        if isinstance(stored, FP8):
            why_decoded = why_decoded if is_quick else why_no_float8(device.torch_device)
            # Why: what other factories do not take stays a tensor.
            stored = replace(stored, is_late=is_quick and config.linear_backend == "auto", may_stay=not why_decoded)
        model = load_stored(model, stored, number_format, trust_remote_code=trust, is_quick=is_quick)
        if device.kind != "cpu":
            _decode(model, stored, why_decoded)
        elif stored.scheme not in ("none", quantization):
            take_int8_rows(model, quantization)
        return model
    if isinstance(model, str | os.PathLike):
        model = load_pretrained(
            model, dtype=dtype, trust_remote_code=trust, is_quick=device.kind == "cpu",
            is_chosen=config.dtype != "auto",
        )
    else:
        # Why first: the conversion works in place, on the weights of the engine that has the model.
        require_free(model)
        require_loaded(model)
        model = body_of_classifier(language_model_of(model))
        if config.dtype != "auto":
            model = model.to(resolve_dtype(config.dtype))
    if device.kind == "cpu":
        widen_halves(model)
    return model


def _decode(model: Any, stored: StoredFormat, why: str) -> None:
    """Make numbers of the quantised weights of a model, for the reason ``why``; say so. If there is none, they are in
    e4m3, and those that the device multiplies stay.
    """
    from pagedcore.models.checkpoints.fp8 import FP8
    from pagedcore.models.families.model_facts import format_and_device
    from pagedcore.models.linears.decoded_weights import decode_weights
    from pagedcore.models.linears.float8_linear import keep_float8

    is_fp8, (num_kept, reasons) = isinstance(stored, FP8), (0, [why]) if why else keep_float8(model)
    if num_kept:
        _log.info("%d linear layers stay in e4m3; their rows become e4m3 too, with a scale each.", num_kept)
    decode_weights(model)
    if reasons and (is_fp8 or stored.scheme != "none"):
        _log.warning(
            "The quantised weights (%s) are decoded to %s: %s, so that they take the memory and the time of numbers.",
            "FP8" if is_fp8 else stored.scheme, str(format_and_device(model)[0]).removeprefix("torch."),
            "; ".join(reasons),
        )  # fmt: skip


def plan_backend(
    model: str | os.PathLike[str], config: EngineConfig, load_attention: Callable[[str], AttentionFactory]
) -> Blueprint:
    """Return what is known of ``model`` without its weights; errors as ``transformers_backend``."""
    from pagedcore.models.blueprint import read_blueprint

    return read_blueprint(model_source(model), load_attention(_attention_name(config, DEFAULT_ATTENTION)), config)


def load_tokenizer(model: Any, config: EngineConfig) -> Tokenizer | None:
    """Return the tokenizer the configuration names, or else the model's own; ``None`` for a model without one.

    Raises:
        InvalidConfig: a tokenizer was named and cannot be loaded.
    """
    from pagedcore.tokenizer.tokenizer import HFTokenizer

    if config.tokenizer is not None:
        return _tokenizer_of(model_source(config.tokenizer, "tokenizer"), config.trust_remote_code)
    if not isinstance(model, str | os.PathLike):
        return None
    # A backend of a third party has models that only it can find.
    is_others = config.model_backend not in ("auto", DEFAULT_MODEL_BACKEND)
    source = _source(model) if is_others else model_source(model)
    if is_gguf(source):
        return _tokenizer_of(source, config.trust_remote_code)
    if (Path(source).is_dir() or is_others) and not any(Path(source).glob("tokenizer*")):
        return _tokenizer_of_other_files(source, config.trust_remote_code)
    return HFTokenizer.from_directory(source, config.trust_remote_code)


def _tokenizer_of_other_files(source: str, trust_remote_code: bool) -> Tokenizer | None:
    """Return a tokenizer that is in none of the usual files; without one that can be read, prompts are token ids."""
    from pagedcore.tokenizer.other_files import tokenizer_file
    from pagedcore.tokenizer.tokenizer import HFTokenizer

    if not tokenizer_file(Path(source)):
        return None
    try:
        return HFTokenizer.from_directory(source, trust_remote_code)
    except InvalidConfig as reason:
        _log.warning("Prompts must be token ids. %s", reason)
        return None


def _tokenizer_of(source: str, trust_remote_code: bool) -> Tokenizer | None:
    from pagedcore.tokenizer.tokenizer import HFTokenizer

    if not is_gguf(source):
        return HFTokenizer.from_directory(source, trust_remote_code)
    from pagedcore.models.checkpoints.gguf_file import GGUFFile
    from pagedcore.tokenizer.gguf_tokenizer import gguf_tokenizer

    return gguf_tokenizer(GGUFFile(source).metadata, Path(source).parent)


def model_name(model: Any) -> str:
    """Return a short name for people: never a path beyond its last part."""
    if isinstance(model, str | os.PathLike):
        path = Path(os.fspath(model))
        return path.name if path.exists() else os.fspath(model)
    return type(model).__name__


def _source(model: str | os.PathLike[str]) -> str:
    return os.fspath(DEMO_MODEL_DIR) if model == "demo" else gguf_in(os.fspath(model))


def model_source(model: str | os.PathLike[str], what: str = "model") -> str:
    """Return the directory, the GGUF file or the hub id that a user means; refuse what can be none of them.

    A hub id is looked up on the hub; of a ``ModelName`` once.
    """
    try:
        name = _source(model)
        is_file, is_directory = Path(name).is_file(), bool(name) and Path(name).is_dir()
    except OSError as error:
        raise InvalidConfig(f"{what}: the path cannot be looked at ({error.strerror}); check the path.") from None
    if is_gguf(name) or is_directory:
        return name
    if is_file:
        raise InvalidConfig(f"{what}: got a file, needed is the directory that it is in, or a GGUF file.")
    if _HUB_ID.fullmatch(name):
        return find_on_hub(name, what)
    advice = "~ is not expanded, Path.expanduser() does it" if name.startswith("~") else "check the path"
    raise InvalidConfig(f"{what}: this is no directory, and no hub id, which looks like owner/name; {advice}.")


def _attention_name(config: EngineConfig, default: str) -> str:
    return default if config.attention_backend == "auto" else config.attention_backend


def _linears(
    config: EngineConfig, device: Device, load: Loader, quantization: str, is_stored: bool
) -> LinearFactory:
    from pagedcore.models.linears.packed_linear import FASTEST

    name = config.linear_backend
    if quantization != "none":
        return _quantized_linears(config, device, quantization, is_stored)
    if name == "auto":
        return FASTEST
    factory = load("linears", name)
    if not isinstance(factory, LinearFactory):
        raise InvalidConfig(f"linear_backend: {name!r} does not have the members of LinearFactory.")
    if device.kind != "cpu":
        raise InvalidConfig(f"linear_backend: got {name!r}, allowed on {device.kind} is 'auto'.")
    return factory


def _quantized_linears(config: EngineConfig, device: Device, quantization: str, is_stored: bool) -> LinearFactory:
    from pagedcore.models.linears.schemes import QUANTIZERS
    from pagedcore.models.linears.stored_weight import StoredLinears
    from pagedcore_kernels.cpu.features import has_fused_vectors

    for name, given, allowed in (("linear_backend", config.linear_backend, "auto"), ("device", device.kind, "cpu")):
        if given != allowed:
            raise InvalidConfig(
                f"{name}: got {given!r}, allowed with quantization={quantization!r} is {allowed!r}."
            )
    if not has_fused_vectors():
        raise InvalidConfig(
            f"quantization: {quantization!r} needs an x86 processor with AVX2. Leave it at 'none'."
        )
    # Why also for what is chosen by product: it is put in the place of the weights before these are packed.
    return StoredLinears() if is_stored or quantization not in QUANTIZERS else QUANTIZERS[quantization]
