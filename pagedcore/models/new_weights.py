"""Other weights for a model that an engine runs: read, checked, and made ready by the very code that loads a model.

Owns what may become the weights of a backend: a directory or a GGUF file as at the start, or tensors by their names.
Everything that can be refused is before the first write. ``engine/new_weights.py`` has the order, and what becomes of
requests.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from pagedcore.config.schemes import AUTO_INT8
from pagedcore.errors import InvalidWeights
from pagedcore.models.checkpoints.auto_int8 import apply as choose_int8
from pagedcore.models.checkpoints.ownership import version_of
from pagedcore.models.checkpoints.pretrained import as_refusals
from pagedcore.models.families.file_names import module_name
from pagedcore.models.families.llama_modules import ForCausalLM
from pagedcore.models.families.model_facts import (
    eos_token_ids,
    format_and_device,
    max_model_len,
    num_short_tokens,
)
from pagedcore.models.families.tensor_shapes import shapes_of
from pagedcore.models.linears.stored_weight import shapes_of_tensors
from pagedcore.models.origin import Origin, Succession
from pagedcore_kernels.cpu.runtime.finite import all_finite

if TYPE_CHECKING:
    from pagedcore.models.transformers_model import TransformersModel

Weights = Mapping[str, torch.Tensor] | str | os.PathLike[str]
"""Tensors by name, or where files are."""
_FORMATS: Final = (torch.float32, torch.bfloat16, torch.float16)
_MOST_NAMED: Final = 3
"""Names that a message has."""
_SAME: Final = (
    ("architecture", lambda one: one.name), ("vocabulary", lambda one: one.vocab_size),
    ("context", lambda one: one.max_model_len), ("short context", lambda one: one.num_short_tokens),
    ("end tokens", lambda one: sorted(one.eos_token_ids)), ("number format", lambda one: str(one.dtype)),
    ("KV blocks", lambda one: repr(one.layout(16))), ("products", lambda one: one.linear_name),
    ("dependence on the schedule", lambda one: one.variable_part),
)  # fmt: skip
"""What an engine has learnt from its first weights."""


def make_ready(old: TransformersModel, source: Weights) -> TransformersModel:
    """Return a backend of other weights beside the old one, which stays as it is.

    Args:
        old: what computes now.
        source: tensors by name, or a directory, a GGUF file or a name on the hub.

    Raises:
        InvalidWeights: they are not of the same model, or not finite.
        InvalidConfig, ModelNotSupported: as ``Engine.from_pretrained``.
    """
    new = _made(old, source)
    require_same_form(old, new)
    return new


def write_over(old: TransformersModel, source: Weights, before_writing: Callable[[], None]) -> TransformersModel:
    """Do the same in the old one's memory: its products are freed while the new ones are made, so that both together
    are never more than the larger one and the largest matrix.

    ``before_writing`` is called when everything was checked. Errors before that leave the old one as it is; whatever is
    raised afterwards leaves a backend that raises ``WeightsIncomplete``.
    """
    gone: Iterator[int] = iter(())
    num_packed = num_freed = 0

    def begin() -> None:
        nonlocal gone
        before_writing()
        gone = old.lose_products()
        next(gone, 0)

    def free_as_much(weight: torch.Tensor) -> None:
        nonlocal num_packed, num_freed
        num_packed += weight.nbytes
        while num_freed < num_packed and (num_bytes := next(gone, None)) is not None:
            num_freed += num_bytes

    new = _made(old, source, begin, free_as_much)
    require_same_form(old, new)
    return new


def _made(
    old: TransformersModel, source: Weights, begin: Callable[[], None] | None = None,
    on_packed: Callable[[torch.Tensor], None] | None = None,
) -> TransformersModel:
    """Return a backend of other weights; with ``begin`` everything is checked before it is called, and else numbers are
    looked at while they are packed.
    """
    origin = old.origin
    if origin is None:
        raise InvalidWeights("model", "one that was given to the engine as a backend", "one that the engine has loaded",
                             is_described=True)
    if old.text_head is not None:
        raise InvalidWeights("model", "one with a head that ranks or classifies", "one that generates",
                             is_described=True)
    # Why only these: what is quantised is read by code that knows of no such numbers.
    numbers = _Numbers(is_late=begin is None and origin.quantization == "none")
    if isinstance(source, str | os.PathLike):
        def check(model: Any) -> None:
            _require_facts(old, model)
            _require_shapes(origin, model)
            numbers.look_at(model.state_dict())
            if begin is not None:
                begin()

        new: TransformersModel = origin.load_files(source, check, Succession(old, on_packed or numbers.packed))
        read: Origin = new.origin or origin
        present = replace(origin, source=read.source, files=read.files)
    else:
        new = _of_tensors(old, origin, source, numbers, begin, on_packed or numbers.packed)
        present = replace(origin, source=None, files={})
    numbers.require_all()
    new.origin, new.text_head, new.pair_defaults = present, old.text_head, old.pair_defaults
    new.embedding_defaults = old.embedding_defaults
    return new


def _of_tensors(
    old: TransformersModel, origin: Origin, source: Any, numbers: _Numbers, begin: Callable[[], None] | None,
    on_packed: Callable[[torch.Tensor], None],
) -> TransformersModel:
    if origin.no_tensors:
        raise InvalidWeights("weights", f"tensors by name, and {origin.no_tensors}", "a directory", is_described=True)
    given = _checked(old, origin, source)
    versions = {name: version_of(tensor) for name, tensor in given.items()}
    tensors = {name: tensor.detach().to("cpu", old.dtype) for name, tensor in given.items()}
    numbers.look_at(tensors)
    model = _tree(old, tensors)
    if origin.quantization == AUTO_INT8:
        choose_int8(model)
    if begin is not None:
        begin()
    new = old.make_again(model, succession=Succession(old, on_packed, keeps_nothing=True))
    changed = [name for name, tensor in given.items() if version_of(tensor) != versions[name]]
    if changed:
        raise InvalidWeights("weights", f"{len(changed)} tensors that were written to meanwhile, {changed[0][:80]} "
                             "among them", "tensors that stay as they are until they are read", is_described=True)
    return new


def _checked(old: TransformersModel, origin: Origin, source: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that are needed, whose names, types and shapes are right; tied ones have one name."""
    if not isinstance(source, Mapping):
        raise InvalidWeights("weights", source, "tensors by name (a state_dict), or a directory")
    given, wanted = dict(source), _wanted_shapes(old, origin)
    for name, tensor in given.items():
        if not isinstance(name, str) or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise InvalidWeights("weights", tensor, "plain tensors of torch by name")
        is_plain = tensor.layout == torch.strided and not tensor.is_meta and tensor.dtype in _FORMATS
        if not is_plain:
            raise InvalidWeights(f"weights, {name[:80]}", f"{tensor.dtype}, {tensor.layout}, on {tensor.device.type}",
                                 "float32, bfloat16 or float16, with memory", is_described=True)
    given = _by_expert(given, wanted)
    missing, further = sorted(wanted.keys() - given.keys()), sorted(given.keys() - wanted.keys())
    tied = {name: given.get(origin.tied.get(name, "")) for name in further}
    further = [name for name, twin in tied.items() if twin is None or not _are_equal(given[name], twin)]
    if missing or further:
        raise InvalidWeights(
            "weights", f"{_names(missing)} missing, {_names(further)} not known", f"the {len(wanted)} names of the "
            "model that the engine runs, and tied ones only with equal numbers", is_described=True)
    for name, shape in wanted.items():
        if tuple(given[name].shape) != shape:
            raise InvalidWeights(f"weights, {name[:80]}", f"the shape {tuple(given[name].shape)}", str(shape),
                                 is_described=True)
    return {name: given[name] for name in wanted}


def _by_expert(given: dict[str, torch.Tensor], wanted: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return tensors with those of all experts of a layer, as modules of transformers have them, by single experts, as
    files do, where these names are wanted.
    """
    parts: dict[str, torch.Tensor] = {}
    for name, tensor in given.items():
        of_all, _, last = name.rpartition(".")
        halves = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(last, ())
        if not halves or tensor.ndim != 3 or f"{of_all}.0.{halves[0]}.weight" not in wanted:
            parts[name] = tensor
            continue
        for number, matrix in enumerate(tensor):
            for part, half in zip(halves, matrix.chunk(len(halves)), strict=False):
                parts[f"{of_all}.{number}.{part}.weight"] = half
    return parts


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and (one.data_ptr() == other.data_ptr() or torch.equal(one, other))


def _names(names: list[str]) -> str:
    shown = ", ".join(name[:80] for name in names[:_MOST_NAMED])
    return f"{len(names)} ({shown})" if names else "0"


def _wanted_shapes(old: TransformersModel, origin: Origin) -> dict[str, tuple[int, ...]]:
    if isinstance(old.model, ForCausalLM):
        # Why: its tree may have names of its own.
        return {module_name(name): tuple(shape) for name, shape in shapes_of(old.model.config).items()}
    return dict(origin.shapes)


def _tree(old: TransformersModel, tensors: dict[str, torch.Tensor]) -> Any:
    """Return the modules of the old model with these tensors."""
    kind, config = type(old.model), copy.deepcopy(old.model.config)
    if kind is ForCausalLM:
        tree = ForCausalLM(config, old.model.generation_config, tensors).eval()
        tree.set_attn_implementation(old.own_attention)
        return tree
    with as_refusals("the weights", "tensors could not be loaded"):
        model, report = kind.from_pretrained(
            None, config=config, dtype=old.dtype, state_dict=tensors, output_loading_info=True,
            attn_implementation=old.own_attention)
    if wrong := sorted({*report["missing_keys"], *report["unexpected_keys"]} - {"lm_head.weight"}):
        raise InvalidWeights("weights", f"{_names(wrong)} missing or not known", "the names of the model",
                             is_described=True)
    model.generation_config = old.model.generation_config
    return model


def _require_facts(old: TransformersModel, model: Any) -> None:
    """Refuse a model whose configuration says other things than an engine of the old one has learnt."""
    config = model.config
    for what, before, after in (
        ("architecture", old.name, str(config.model_type)), ("context", old.max_model_len, max_model_len(config)),
        ("short context", old.num_short_tokens, num_short_tokens(config)),
        ("end tokens", sorted(old.eos_token_ids), sorted(eos_token_ids(model))),
        ("number format", str(old.dtype), str(format_and_device(model)[0])),
    ):
        if before != after:
            raise InvalidWeights(f"weights, {what}", str(after)[:200], str(before)[:200], is_described=True)


def _require_shapes(origin: Origin, model: Any) -> None:
    shapes, known = shapes_of_tensors(model), origin.shapes
    differing = sorted(name for name in known.keys() | shapes.keys() if known.get(name) != shapes.get(name))
    if differing:
        raise InvalidWeights("weights", f"{_names(differing)} of another shape, missing or not known",
                             f"the {len(known)} tensors of the model that the engine runs",
                             is_described=True)


class _Numbers:
    """Looks at each number of new weights once: at all of them at first, or (``is_late``) at those of a matrix when it
    was packed and is in the processor's cache, and at all others in the end.
    """

    def __init__(self, *, is_late: bool) -> None:
        self._is_late = is_late
        self._left: dict[tuple[int, int], tuple[str, torch.Tensor]] = {}
        """By address and size."""

    def look_at(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Begin. Raises ``InvalidWeights`` for numbers that are not finite, as the others do."""
        # Why backwards: of the names of a tied one the first stays.
        self._left = {_place_of(tensor): (name, tensor) for name, tensor in reversed([*tensors.items()])
                      if tensor.is_floating_point() and not tensor.is_meta}
        if not self._is_late:
            self.require_all()

    def packed(self, weight: torch.Tensor) -> None:
        """Look at a matrix that was packed."""
        if (found := self._left.pop(_place_of(weight), None)) is not None:
            _require_finite(*found)

    def require_all(self) -> None:
        """Look at what is left."""
        while self._left:
            _require_finite(*self._left.popitem()[1])


def _place_of(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()


def _require_finite(name: str, tensor: torch.Tensor) -> None:
    if not all_finite(tensor):
        raise InvalidWeights(f"weights, {name[:80]}", "numbers that are not finite", "finite numbers",
                             is_described=True)


def require_same_form(old: TransformersModel, new: TransformersModel) -> None:
    """Refuse weights of a model that an engine of the old one cannot run. Raises ``InvalidWeights``."""
    for what, fact in _SAME:
        if (before := fact(old)) != (after := fact(new)):
            raise InvalidWeights(f"weights, {what}", str(after)[:200], str(before)[:200], is_described=True)
