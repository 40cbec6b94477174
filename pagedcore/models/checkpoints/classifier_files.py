"""Classifiers of sequences: a decoder whose last hidden state one more matrix, ``score``, turns into classes.

Owns which of them run: those whose class in transformers has that matrix beside the decoder and nothing else. They are
loaded as the model that generates is, whose output layer nobody reads; the matrix is kept beside it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from pagedcore.errors import InvalidConfig, ModelNotSupported
from pagedcore.models.checkpoints.tensor_files import FLOATS, TensorFiles
from pagedcore.models.checkpoints.text_models import compute_buffers
from pagedcore.models.families.model_facts import HEADLESS
from pagedcore.text_head import Activation, TextHead

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SUFFIX: Final = "ForSequenceClassification"
_OTHER_HEADS: Final = ("ForMultipleChoice", "ForQuestionAnswering", "ForRewardModel", "ForTokenClassification")
"""What names of classes end with whose heads are computed nowhere here; files of some have all that generates, too."""
_SCORE: Final = "score.weight"
_TAKEN: Final = "pagedcore_score"
"""An attribute that a model here gets, with that matrix; no module of transformers has it."""
_MAX_LABEL: Final = 200


def is_classifier(architectures: Any) -> bool:
    """Whether a configuration's ``architectures`` name a classifier of sequences."""
    return isinstance(architectures, list) and any(str(name).endswith(_SUFFIX) for name in architectures)


def require_known_head(raw: Mapping[str, Any], *, is_wrapper: bool = False, is_quantised: bool = False) -> None:
    """Refuse a ``config.json`` that names a class with a head that is not computed here.

    Raises:
        ModelNotSupported: a classifier of tokens or the like; one of sequences that wraps other parts or is quantised,
            or whose name is not that of transformers' class for the architecture.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    named = raw.get("architectures")
    names = [str(one) for one in named] if isinstance(named, list) else []
    if other := next((one for one in names if one.endswith(_OTHER_HEADS)), None):
        raise _refusal(f"its head, of {other}, is none that is computed; models generate, embed or classify sequences")
    if not is_classifier(names):
        return
    own = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(str(raw.get("model_type")))
    if is_wrapper or is_quantised or names != [own]:
        what = "in a wrapper" if is_wrapper else "with quantised weights" if is_quantised else "of a class of its own"
        raise _refusal(f"it is a classifier {what}; those of {own or 'a class of transformers'} with plain weights run")


def require_generator(config: Any) -> None:
    """Refuse to write the weights of a classifier in another form. Raises ``ModelNotSupported``."""
    # Why by default: modules of ours are none of classifiers, and keep no names of classes.
    if is_classifier(vars(config).get("architectures")):
        raise _refusal("it is a classifier, whose head neither converted nor packed weights have a place for; engines "
                       "take its own files")


def take_score(model: Any, directory: Path, unexpected: list[str]) -> None:
    """Read the head of a classifier and keep it with the model, which was loaded as one that generates.

    Args:
        model: made of the files of ``directory``.
        directory: has a classifier.
        unexpected: names of tensors in its files that the model does not have.

    Raises:
        ModelNotSupported: transformers' class has more than a head beside the decoder, or the files have.
        InvalidConfig: the configuration names another number of classes than the head has.
    """
    from transformers import AutoModelForSequenceClassification

    with torch.device("meta"):
        own = AutoModelForSequenceClassification.from_config(copy.deepcopy(model.config))
    others = {name for name in own.state_dict() if not name.startswith(f"{own.base_model_prefix}.")}
    if others != {_SCORE} or (more := {*unexpected} - {_SCORE}):
        shown = min(others - {_SCORE}) if others != {_SCORE} else min(more)
        raise _refusal(f"a classifier has its head in {_SCORE} alone, and this one has {shown} too")
    files = TensorFiles(directory)
    shape = files.shape_of(_SCORE) if _SCORE in files else (0, 0)
    labels = labels_of(model.config)
    if len(shape) != 2 or shape[0] != len(labels):
        raise InvalidConfig(
            f"model: its configuration names {len(labels)} classes (id2label), and {_SCORE} in its files is of shape "
            f"{list(shape)}. Correct the configuration.")
    _keep(model, files.expect(_SCORE, (shape[0], _width_of(own)), *FLOATS))


def body_of_classifier(model: PreTrainedModel) -> PreTrainedModel:
    """Return a loaded model itself, or of a classifier one that generates with the same parameters, and its head.

    Raises:
        ModelNotSupported: it has more than a head beside the decoder.
        InvalidConfig: its configuration names another number of classes.
    """
    if not type(model).__name__.endswith(_SUFFIX):
        return model
    require_known_head({**model.config.to_dict(), "architectures": [type(model).__name__]})
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(model.config)
    tensors = model.state_dict(keep_vars=True)
    others = {name for name in tensors if not name.startswith(f"{model.base_model_prefix}.")}
    if others != {_SCORE} or len(tensors[_SCORE]) != len(labels_of(config)):
        raise _refusal(f"a classifier has one head, {_SCORE}, with a row for each class that id2label names")
    with torch.device("meta"):
        part = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    compute_buffers(part)
    for name in part.state_dict():
        if name in tensors:
            parent, _, last = name.rpartition(".")
            setattr(part.get_submodule(parent), last, tensors[name])
    part.get_output_embeddings().weight = part.get_input_embeddings().weight
    _keep(part, tensors[_SCORE].detach())
    return part


def head_of_classifier(model: Any) -> TextHead | None:
    """Return the head that was kept with a model; ``None``: it is no classifier.

    Raises:
        InvalidConfig: it has numbers that are not finite.
    """
    score = vars(model).get(_TAKEN)
    if score is None:
        return None
    labels = labels_of(model.config)
    return TextHead(weight=score.double().cpu().numpy(), labels=labels, activation=_activation_of(model.config, labels),
                    pad_token_id=model.config.get_text_config().pad_token_id)


def _activation_of(config: Any, labels: tuple[str, ...]) -> Activation:
    """Return what makes probabilities: as transformers has it, or, where no kind of problem is named, as
    sentence-transformers is told.
    """
    kind, named = config.problem_type, activation_path(vars(config)).rpartition(".")[2]
    if kind == "regression" or (kind is None and named == "Identity"):
        return "identity"
    is_sigmoid = kind == "multi_label_classification" or (kind is None and named == "Sigmoid")
    return "sigmoid" if is_sigmoid or len(labels) == 1 else "softmax"


def activation_path(config: Mapping[str, Any]) -> str:
    """Return the name of the function that a ``config.json`` of sentence-transformers has scores go through, or ""."""
    own = config.get("sentence_transformers")
    given = own.get("activation_fn") if isinstance(own, Mapping) else None
    return str(given or config.get("sbert_ce_default_activation_function") or "")


def _keep(model: Any, score: torch.Tensor) -> None:
    if not score.isfinite().all():
        raise InvalidConfig(f"model: {_SCORE} has numbers that are not finite.")
    setattr(model, _TAKEN, score)
    setattr(model.config, HEADLESS, True)


def _width_of(own: nn.Module) -> int:
    return int(own.get_submodule("score").in_features)  # type: ignore[arg-type]


def labels_of(config: Any) -> tuple[str, ...]:
    """Return the names of the classes in their order. Raises ``InvalidConfig`` if some are missing, or no text."""
    given = config.id2label
    if not isinstance(given, Mapping) or {*given} != {*range(len(given))}:
        raise InvalidConfig("model: id2label in its configuration does not name the classes 0, 1, 2 ... one by one.")
    if wrong := [one for one in given.values() if not isinstance(one, str) or len(one) > _MAX_LABEL]:
        raise InvalidConfig(f"model: a class in id2label is called {str(wrong[0])[:80]!r}, allowed is text of at most "
                            f"{_MAX_LABEL} characters.")
    return tuple(given[number] for number in range(len(given)))


def _refusal(reason: str) -> ModelNotSupported:
    return ModelNotSupported(f"model: {reason}.")
