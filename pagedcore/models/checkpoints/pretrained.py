"""Loads a causal language model's weights from a directory or the hub, with what could go wrong refused first.

Owns the order: read the configuration as plain data, refuse, then load weights from safetensors only, mapped and not
copied. Code shipped with a model runs only where the caller said so. It never changes a model; read
``transformers_model.py`` for that.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from pagedcore.errors import InvalidConfig, PagedcoreError, show
from pagedcore.execution.failures import is_out_of_memory
from pagedcore.execution.machine import this_machine
from pagedcore.models.checkpoints.classifier_files import is_classifier, require_known_head, take_score
from pagedcore.models.checkpoints.ownership import require_free
from pagedcore.models.checkpoints.quick_start import NotQuick, read_model
from pagedcore.models.checkpoints.shipped_code import AUTO_MAP, require_class, require_fit, tell_own_class
from pagedcore.models.checkpoints.tensor_files import name_of_text
from pagedcore.models.checkpoints.text_models import load_tensors
from pagedcore.models.checkpoints.weight_files import (
    has_adapter,
    indexed_names,
    require_model,
    tell_adapter,
    weight_files,
)
from pagedcore.models.families import wrappers
from pagedcore.models.families.model_facts import HEADLESS, is_named_headless
from pagedcore.models.families.supported_models import check_config, check_num_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pagedcore.models.families.llama_modules import ForCausalLM

_log = logging.getLogger("pagedcore")
_PART: Final = r"""[^\s'"<>|;/]"""
_WORD: Final = r"""[^\s'"<>|;/:,]"""
_PATH: Final = re.compile(rf"""\bhttps?://[\w.\-/]+|(?<=')/[^'\n]*(?=')|(?<=")/[^"\n]*(?=")
    |(?<![\w.])[.~]{{0,2}}/(?:{_PART}|/)+(?:(?<![.,:])(?:[ ]{_WORD}+){{1,4}}/(?:{_PART}|/)*)*(?<![.,:)])""", re.VERBOSE)
"""An address, which is kept, or a path, which is not: between quotes, or as far as blanks leave no doubt, which are a
part of it where a further slash comes after a few words."""
_LONGEST_MESSAGE: Final = 2000
HEAD: Final = "lm_head.weight"
"""The output layer, as most architectures call it."""


def load_pretrained(
    source: str | os.PathLike[str], *, dtype: str = "auto", trust_remote_code: bool = False, is_quick: bool = False,
    is_chosen: bool = True,
) -> PreTrainedModel | ForCausalLM:
    """Load a model on the CPU.

    Args:
        source: a directory, or a name on the hub if there is no such directory.
        dtype: number format of the weights; "auto" is what the machine computes fastest.
        trust_remote_code: whether code shipped with the model may run.
        is_quick: read it without transformers where that computes the same.
        is_chosen: the caller asked for ``dtype``; else the log says what becomes of the format that the weights have.

    Raises:
        ModelNotSupported: the architecture cannot run here, or the files name code that may not run and that is not
            shown to be transformers' own architecture.
        InvalidConfig: there is no such model, or it has no safetensors weights.
    """
    name, is_local = os.fspath(source), Path(source).is_dir()
    if is_local:
        tell_adapter(Path(name))
    if is_quick and is_local:
        try:
            quick = read_model(Path(name), resolve_dtype(dtype), trust_remote_code=trust_remote_code)
            tell_own_class(Path(name), trust_remote_code)
            _tell_format(quick.config.dtype, quick.dtype, is_chosen)
            return quick
        except NotQuick as reason:
            _log.debug("The model is loaded by transformers: %s.", reason)
    from transformers import AutoModelForCausalLM

    config = load_config(name, trust_remote_code=trust_remote_code)
    _tell_format(config.dtype, resolve_dtype(dtype), is_chosen)
    directory = find_weights(name, trust_remote_code)
    if not is_local:
        tell_adapter(Path(directory))
        # Why again: code that is named has to be replaced by a class that the files fit, and now they are here.
        config = load_config(directory, trust_remote_code=trust_remote_code)
    with as_refusals(name), _no_progress_bar(), _no_report_of_head(config) as report:
        check_num_layers(weight_files(Path(directory)), config)
        # Why also for an adapter: transformers would apply it where peft is installed.
        if name_of_text(Path(directory)) is not str or has_adapter(Path(directory)):
            model, found = load_tensors(Path(directory), config, resolve_dtype(dtype), trust_remote_code)
        else:
            model, found = AutoModelForCausalLM.from_pretrained(
                directory, config=config, dtype=resolve_dtype(dtype), use_safetensors=True, output_loading_info=True,
                local_files_only=is_local, trust_remote_code=trust_remote_code,
            )
        report.update(found)
        if is_classifier(config.architectures):
            take_score(model, Path(directory), sorted(report["unexpected_keys"]))
    _fill_gaps(model, sorted(report["missing_keys"]))
    tell_own_class(Path(directory), trust_remote_code)
    loaded: PreTrainedModel = model
    return loaded


@contextmanager
def _no_report_of_head(config: Any) -> Iterator[dict[str, Any]]:
    """Keep transformers from warning of an output layer, where the configuration says that there is none or another.

    Yields a mapping for what it reports; its warning is held back until that is known, and lost if there is no other.
    """
    log, held, report = logging.getLogger("transformers.modeling_utils"), list[logging.LogRecord](), dict[str, Any]()
    thread = threading.get_ident()

    def holds(record: logging.LogRecord) -> bool:
        is_report = record.thread == thread and "LOAD REPORT" in record.getMessage()
        held.extend([record] * is_report)
        return not is_report

    log.addFilter(holds)
    try:
        yield report
    finally:
        log.removeFilter(holds)
        is_other = is_classifier(config.architectures)
        # Why not of a classifier: ``take_score`` refuses what its files have besides.
        known = ("missing_keys", "unexpected_keys") if is_other else ("missing_keys",)
        others = [one for name, one in report.items() if name not in known and one]
        is_known = (is_other or is_named_headless(config)) and {*report.get("missing_keys", ())} <= {HEAD}
        if others or not is_known:
            for record in held:
                log.handle(record)


def _fill_gaps(model: Any, missing: list[str]) -> None:
    """Give a model without an output layer the embedding's; refuse one whose files lack other weights."""
    # Rule: transformers fills gaps with random numbers.
    if missing == [HEAD] and (is_named_headless(model.config) or is_classifier(model.config.architectures)):
        # Why the embedding's: it takes no memory, and nobody reads what it computes.
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
        setattr(model.config, HEADLESS, True)
    elif missing:
        raise InvalidConfig(
            f"model: {len(missing)} weights are missing from its files, {missing[0]} among them. Download it again."
        )


def load_config(
    source: str | os.PathLike[str], *, trust_remote_code: bool = False, is_quantised: bool = False
) -> Any:
    """Load a model's configuration as transformers sees it, and no weights; arguments and errors as above.

    With ``is_quantised`` its ``quantization_config`` is left out: the caller has read it.
    """
    from transformers import AutoConfig, PretrainedConfig

    name, is_local = os.fspath(source), Path(source).is_dir()
    if is_local:
        require_model(Path(name))
    with as_refusals(name, "its configuration could not be read"):
        raw = PretrainedConfig.get_config_dict(name, local_files_only=is_local)[0]
    if not isinstance(raw, dict):
        raise InvalidConfig("model: its config.json is no object of names and values.")
    # Safety: transformers would ignore the code of any architecture that it knows, and load what tensors it can.
    if is_own := bool(raw.get(AUTO_MAP)) and not trust_remote_code:
        require_class(raw)
    require_known_head(raw, is_wrapper=wrappers.is_wrapper(raw), is_quantised=is_quantised)
    if is_quantised:
        raw.pop("quantization_config", None)
    if not (is_wrapper := wrappers.is_wrapper(raw)):
        check_config(raw)
    with as_refusals(name):
        config = AutoConfig.from_pretrained(name, local_files_only=is_local, trust_remote_code=trust_remote_code)
        if is_wrapper:
            config = wrappers.text_config(config)
        if is_quantised:
            vars(config).pop("quantization_config", None)
        check_config(config.to_dict())
        _forget_choices(config)
        if not trust_remote_code:
            vars(config).pop(AUTO_MAP, None)
        if is_own and is_local:
            require_fit(Path(name), config, is_quantised=is_quantised)
    return config


def _forget_choices(config: Any) -> None:
    """Drop what a configuration says of how to compute, here and in its parts, and of where weights are.

    Safety: an implementation may be the name of a repository, whose code would be fetched and run.
    """
    config._attn_implementation = config._experts_implementation = None
    vars(config).pop("transformers_weights", None)


def find_file(source: str, name: str) -> Path | None:
    """Return where a file of a model is, in a directory or in the hub's cache; ``None`` if it is not to be had."""
    if Path(source).is_dir():
        return path if (path := Path(source) / name).is_file() else None
    from transformers.utils import cached_file

    try:
        found = cached_file(source, name)
    except OSError:  # what transformers raises for a file, a name or a hub that is not there
        return None
    return None if found is None else Path(found)


def find_weights(source: str, trust_remote_code: bool) -> str:
    """Return a directory itself, or the snapshot of a name on the hub with weights, configuration and trusted code.

    Raises:
        InvalidConfig: as ``find_directory``.
        ModelNotSupported: the index of the weights names others than safetensors files beside it.
    """
    if Path(source).is_dir():
        return source
    others = ("*.json", *(["*.py"] if trust_remote_code else []))
    directory = Path(find_directory(source, *others))
    with as_refusals(source):
        names = indexed_names(directory) or ["*.safetensors"]
    if all(any(directory.glob(name)) for name in names):
        return os.fspath(directory)
    return find_directory(source, *others, *names)


def find_directory(source: str, *patterns: str) -> str:
    """Return a directory itself, or the snapshot of a name on the hub that has the files of ``patterns``.

    Raises:
        InvalidConfig: there is no such name, or it cannot be downloaded.
    """
    if Path(source).is_dir():
        return source
    from huggingface_hub import snapshot_download

    with as_refusals(source), _no_progress_bar():
        return snapshot_download(source, allow_patterns=[*patterns], ignore_patterns=["*/*"])


@contextmanager
def as_refusals(
    name: str, what: str = "it could not be loaded", kind: type[PagedcoreError] = InvalidConfig
) -> Iterator[None]:
    """Raise what libraries raise for the files of the model called ``name`` as an error of ``kind``, without paths;
    lack of memory is ``MemoryError``.
    """
    try:
        yield
    except (PagedcoreError, MemoryError):
        raise
    except Exception as error:  # of whatever type: several libraries look at the files, each with errors of its own
        # Safety: a library's message may name paths.
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0][:_LONGEST_MESSAGE]
        shown = _PATH.sub(_without_path, _without_name(name, first_line))
        if is_out_of_memory(error):
            raise MemoryError(f"model: {what} ({shown[:300]})") from error
        raise kind(f"model: {what} ({shown[:300].removesuffix('.')}).") from error


def _without_name(name: str, message: str) -> str:
    """Return a message with "the model" in the place of its name, however it is written; a name may have blanks."""
    names = {name, os.path.normpath(name)}
    with suppress(OSError):  # the current directory may be gone
        names |= {os.path.abspath(name), os.path.realpath(name)}
    for written in sorted(names, key=len, reverse=True):
        # Why whole words: a directory may be called "a". A dot may end a sentence.
        message = re.sub(rf"(?<![\w./-]){re.escape(written)}(?![\w-]|\.\w)", "the model", message)
    return message


def _without_path(found: re.Match[str]) -> str:
    return found[0] if found[0].startswith("http") else "its files"


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _tell_format(stored: object, dtype: torch.dtype, is_chosen: bool) -> None:
    old, new = str(stored).removeprefix("torch."), str(dtype).removeprefix("torch.")
    if is_chosen or old == new or old not in ("float16", "float32", "bfloat16"):
        return
    if dtype == torch.float32:
        _log.info("dtype='auto': weights of %s are computed in float32, exactly, as this device prefers it.", old)
    else:
        _log.warning(
            "dtype='auto': weights of %s are rounded to %s, in which this device is fastest. dtype=%r keeps them.",
            old, new, old,
        )


def widen_halves(model: Any) -> None:
    """Make a model of float16 one of float32, in place: each of its numbers is one of float32 too.

    Raises:
        InvalidConfig: a weight is not finite, as numbers above 65504 are not in float16.
        ModelTakenOver: an engine has the model.
    """
    if model.dtype != torch.float16:
        return
    require_free(model)
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise InvalidConfig(
                f"dtype: weights of {name} are not finite in float16, whose largest number is 65504. Take float32, or "
                "bfloat16, unless the files have such weights."
            )
    _log.info("Weights of float16 are computed in float32 on the CPU: exactly, in twice the memory.")
    model.float()


def computing_dtype(name: str, kind: str = "cpu") -> torch.dtype:
    """Return the number format in which a device of that kind computes with weights of the format called ``name``.

    Raises:
        InvalidConfig: as ``resolve_dtype``.
    """
    dtype = resolve_dtype(name)
    return torch.float32 if kind == "cpu" and dtype == torch.float16 else dtype


def resolve_dtype(name: str) -> torch.dtype:
    """Return the number format called ``name``; "auto" is the machine's choice.

    Raises:
        InvalidConfig: torch has no floating format of that name.
    """
    dtype = getattr(torch, this_machine().default_dtype if name == "auto" else name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InvalidConfig(f"dtype: got {show(name)}, allowed is auto, float32, bfloat16 or float16.")
    return dtype
