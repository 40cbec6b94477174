"""Reads what a directory says of the relevance of documents: the files of a ``CrossEncoder`` of sentence-transformers.

Owns which of it is computed here: heads of one class, and the logits of one token or the difference of two at the end
of a prompt (``LogitScore``). What cannot be is no reason to refuse the model; the record says why. As of
``sentence_files.py``, files come from strangers, and what is of another type than it should be counts as unknown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from torch import nn

from pagedcore.errors import InvalidRequest, show
from pagedcore.models.checkpoints.classifier_files import activation_path
from pagedcore.models.checkpoints.sentence_files import (
    FOLDER,
    LIMITS,
    MODULES,
    PROMPTS,
    modules_of,
    prompts_of,
    read_json,
    read_object,
)
from pagedcore.models.linears.stored_weight import StoredWeight, rows_of
from pagedcore.text_head import Activation, PairDefaults, TextHead
from pagedcore.tokenizer.template_arguments import validate_arguments

_NO_HEAD: Final = (
    "it has no head for that: its files are neither those of a classifier with one class nor name tokens whose logits "
    "say it (LogitScore in modules.json)"
)
NO_ROWS: Final = (
    "its packed weights do not show the rows of its output layer, as int4 does not; pack files that have it as numbers "
    "(convert --keep-output-layer)"
)
"""Why packed weights of some kinds rerank nothing."""
_ACTIVATIONS: Final[Mapping[str, Activation]] = {"Sigmoid": "sigmoid", "Identity": "identity"}
_MULTIPLIERS: Final = ("logit_scale", "logits_scaling")
"""Fields by which architectures multiply logits, and divide them."""
_OF_LENGTH: Final = frozenset({"truncation", "max_length", "padding", "restore_suffix"})
"""Arguments that say what to cut off and to fill up; nothing is here."""


class _Refused(Exception):
    """The message says why there is no relevance."""


def heads_of(source: str | None, model: Any, head: TextHead | None) -> tuple[TextHead | None, PairDefaults]:
    """Return what turns states of a model into numbers, and how a query and a document become a text.

    Args:
        source: a directory, or a name on the hub; ``None`` for a loaded model.
        model: before its layers are packed.
        head: of a classifier, if it is one.
    """
    try:
        kinds, folders = _modules(source)
        if head is None and kinds == ["Transformer", "LogitScore"] and source is not None:
            head = _head_of_tokens(source, folders[1], model)
        elif kinds not in ([], ["Transformer"]) or head is None:
            raise _Refused(_NO_HEAD)
        if len(head.labels) > 1:
            raise _Refused(f"its head has {len(head.labels)} classes, and relevance is one number")
        return head, _pair_defaults(source, model, has_modules=bool(kinds))
    except _Refused as reason:
        return head, PairDefaults(refusal=str(reason))


def _modules(source: str | None) -> tuple[list[str], list[str]]:
    modules = None if source is None else read_json(source, MODULES)
    return ([], []) if modules is None else modules_of(modules)


def _head_of_tokens(source: str, folder: str, model: Any) -> TextHead:
    """Return the rows of the output layer that are those of the tokens for yes and no."""
    config = read_json(source, f"{folder}/config.json") if FOLDER.fullmatch(folder) else None
    if not isinstance(config, dict):
        raise _Refused(f"the config.json of its LogitScore in {show(folder)} cannot be read")
    other = config.get("false_token_id")
    wanted = [config.get("true_token_id"), *([] if other is None else [other])]
    layer = model.get_output_embeddings()
    weight: Any = layer.weight if isinstance(layer, nn.Linear) else None
    if weight is None or weight.device.type == "meta":
        raise _Refused("the rows of its output layer are not at hand")
    if not all(type(one) is int and 0 <= one < weight.shape[0] for one in wanted):
        raise _Refused("its LogitScore names tokens that it does not have")
    if layer.bias is not None:
        raise _Refused("its output layer has a bias")
    chosen = rows_of(weight, wanted) if isinstance(weight, StoredWeight) else weight.detach()[wanted]
    if chosen is None:
        raise _Refused(NO_ROWS)
    fields = model.config.to_dict()
    cap, multiplier = fields.get("final_logit_softcapping"), _number(fields.get("logit_scale"))
    rows = chosen.double().cpu().numpy()
    return TextHead(weight=rows, multiplier=multiplier / _number(fields.get("logits_scaling")),
                    cap=_number(cap) if cap else None)


def _number(value: Any) -> float:
    is_number = type(value) in (int, float) and math.isfinite(value) and value != 0
    if value is not None and not is_number:
        raise _Refused("its configuration scales logits by no number")
    return float(value) if is_number else 1.0


def _pair_defaults(source: str | None, model: Any, *, has_modules: bool) -> PairDefaults:
    if source is None:
        return PairDefaults(activation=_activation("", vars(model.config)))
    own, of_prompts = read_object(source, LIMITS), read_object(source, PROMPTS)
    if own.get("do_lower_case"):
        raise _Refused("its sentence_bert_config.json wants texts in lower case, as none are here")
    length, known, chosen = own.get("max_seq_length"), prompts_of(of_prompts), of_prompts.get("default_prompt_name")
    ways = own.get("modality_config")
    message = ways.get("message") if isinstance(ways, dict) else None
    if isinstance(message, dict) and message.get("format") not in (None, "auto", "flat"):
        raise _Refused("its sentence_bert_config.json has contents of messages that are no text")
    return PairDefaults(
        activation=_activation(str(of_prompts.get("activation_fn") or ""), vars(model.config)),
        # Rule: where files have modules, a template is used if they say so, as those of earlier versions did not.
        uses_template=message is not None if has_modules else None,
        template_arguments=_template_arguments(own.get("processing_kwargs")), prompts=known,
        default_prompt=chosen if isinstance(chosen, str) and chosen in known else None,
        max_tokens=length if type(length) is int and length > 0 else None,
    )


def _activation(named: str, config: Mapping[str, Any]) -> Activation:
    path = named or activation_path(config)
    name = path.rpartition(".")[2]
    if path and (name not in _ACTIVATIONS or not path.startswith("torch.")):
        raise _Refused(f"its scores go through {show(path)}; computed are Sigmoid and Identity of torch")
    return _ACTIVATIONS.get(name, "sigmoid")


def _template_arguments(given: Any) -> dict[str, Any]:
    """Return what the chat template is told."""
    kinds = given if isinstance(given, dict) else {}
    arguments = kinds.get("chat_template") or {}
    texts = {name for kind in ("common", "text") if isinstance(kinds.get(kind), dict) for name in kinds[kind]}
    if not isinstance(arguments, dict) or texts - _OF_LENGTH:
        raise _Refused("its processing_kwargs say more of how pairs are tokenised than is known here")
    own = {name: value for name, value in arguments.items() if name not in _OF_LENGTH}
    adds_prompt = own.pop("add_generation_prompt", False)
    try:
        checked = validate_arguments("processing_kwargs", own)
    except InvalidRequest as error:
        raise _Refused("its chat_template in processing_kwargs has arguments that no template takes") from error
    if type(adds_prompt) is not bool:
        raise _Refused("its add_generation_prompt is neither true nor false")
    return {**checked, "add_generation_prompt": adds_prompt}
