"""Sessions as files: one JSON file with everything that decides the continuation, and one beside it with the KV.

Owns the format and its checks. Files are untrusted: sizes are checked before anything is read, every field before
anything is made of it, the model before the tokens, and the blocks token by token. Only what ``export`` writes is read:
every field is there, once, in the one form that it is written in. The KV file is optional: without it, or where a block
of it is wrong, the same continuation is computed again.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeVar

from pagedcore.config.field_rules import ADAPTER_NAME, BOOLEAN, PRIORITY, FieldRule, integer, matching, one_of
from pagedcore.config.limits import MAX_COUNT, MAX_LARK_BYTES, MAX_LOGPROBS, MAX_SEED, MAX_SESSION_FILE_BYTES
from pagedcore.config.strict_json import load_json
from pagedcore.errors import InvalidRequest, InvalidSessionFile, ModelMismatch
from pagedcore.outputs import TokenLogprobs
from pagedcore.protocols import ModelFingerprint
from pagedcore.requests import validation
from pagedcore.requests.input_processor import InputProcessor
from pagedcore.requests.request_table import SequenceSnapshot
from pagedcore.sampling_params import LOCAL_NAMES, SamplingParams
from pagedcore.sessions.kv_file import KVCopy, KVSpec, read_bounded, read_kv, replace_file, write_kv
from pagedcore.sessions.locked_directory import PART, sweep

_T = TypeVar("_T")

_log = logging.getLogger("pagedcore")

FORMAT: Final = "pagedcore session"
VERSION: Final = 3
_WITHOUT_WINDOWS: Final = 2
"""What a file says that has no window blocks either."""
_WITHOUT_STATE: Final = 1
"""What a file says that has no state of recurrent layers, so that earlier versions can read it."""
_KV_SUFFIX: Final = ".kv.safetensors"
_DIGEST: Final = matching(r"[0-9a-f]{64}", "a digest")
_MODEL: Final = {"architecture": matching(r"[\w.-]{1,64}", "a name"), "config": _DIGEST, "weights": _DIGEST}
_MARK: Final[dict[str, FieldRule[Any]]] = {
    "id": _DIGEST, "number": integer(1, MAX_COUNT), "label": matching(r"[\w.:-]{0,64}", "a label")}
_FORM: Final[dict[str, FieldRule[Any]]] = {
    "block_size": integer(1, MAX_COUNT), "block_bytes": integer(0, MAX_COUNT), "kv_format": _DIGEST,
    "state_bytes": integer(1, MAX_COUNT), "window_bytes": integer(1, MAX_COUNT),
}
_REASON: Final = one_of("stop", "length", "abort", "error")
_FIRST_PARAMS: Final = frozenset({
    "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "stop", "stop_token_ids", "ignore_eos", "seed", "n", "best_of", "beam_width",
    "length_penalty", "early_stopping", "logprobs", "prompt_logprobs", "structured",
})
"""Parameters that every file has. Later ones are in a file only where they are not at their default, so that files of
earlier versions can be read, and those that need nothing new can be read by earlier versions."""
_LATER_PARAMS: Final = {
    field.name: field.default for field in fields(SamplingParams) if field.name not in (*_FIRST_PARAMS, *LOCAL_NAMES)
}
_FIELDS: Final = {
    "document": {"format", "version", "checksum", "body"},
    "body": {"model", "params", "priority", "is_salted", "history", "kv"},
    "model": set(_MODEL),
    "weights": set(_MARK),
    "params": set(_FIRST_PARAMS),
    "history": {"token_ids", "num_prompt_tokens", "params", "max_tokens", "seed", "finish_reason", "logprobs"},
    "kv": {"num_tokens", "block_size", "block_bytes", "kv_format", "block_digests"},
    "adapter": {"digest", "name"},
}
_OPTIONAL: Final = {
    "params": _LATER_PARAMS.keys(), "body": {"adapter", "weights"}, "kv": {"state_bytes", "window_bytes"}}
"""Fields that a file need not have."""
_NUM_BASE_BYTES: Final = 2**16 + 12 * MAX_LARK_BYTES
"""At least what a file without tokens takes: twice the parameters, most of them biases, stop strings and a grammar, of
which JSON writes a byte as six."""
_NUM_BYTES_PER_TOKEN: Final = 80 + 46 * (MAX_LOGPROBS + 1)
"""At least what a token takes: its id, the digest of a block of its own, and each log-probability with its id."""
_MAX_LOGPROB: Final = 0.001
"""Above 0, because the logarithm of a certain token's probability is rounded."""

DescribeKV = Callable[[tuple[int, ...], int, bytes], KVSpec]
"""``(token_ids, num_tokens, adapter) -> spec`` of the KV of a sequence's first tokens, as this engine makes it."""


@dataclass(frozen=True, slots=True)
class WeightsMark:
    """Which weights an engine loaded after it was made; the default: none."""

    id: str = ""
    """Random, 64 hexadecimal digits: no two loads have the same, in whatever process."""
    number: int = 0
    """As of a ``WeightsVersion``."""
    label: str = ""

    def __str__(self) -> str:
        """Return what a message says of it."""
        return f", loaded as {self.label}#{self.number}" if self.id else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSnapshot:
    """A session at one moment."""

    model: ModelFingerprint
    params: SamplingParams | None
    """Defaults of its turns."""
    priority: int
    is_salted: bool
    """Whether it has a cache salt; the salt itself is a secret and not in the file."""
    history: SequenceSnapshot | None
    """``None`` before the first turn."""
    kv_spec: KVSpec | None = None
    kv: KVCopy | None = None
    adapter: bytes = b""
    """The digest of the adapter that it is computed with; empty: none."""
    adapter_name: str = ""
    """What that was called, for messages."""
    weights: WeightsMark = WeightsMark()
    """What its latest turn was, or would have been, computed with."""
    num_renewals: int = 0
    """As of ``Parking``, when it was read."""


def write_session(path: Path, snapshot: SessionSnapshot) -> None:
    """Write a session's files; the old file at ``path`` stays until the new one is complete.

    What exports of killed processes have left beside ``path`` is removed, here and by ``read_session``.

    Raises ``InvalidSessionFile`` if it would be too large to be read, or would need code, before anything is written;
    ``OSError``.
    """
    sweep(path.parent, PART)
    for params in (snapshot.params, snapshot.history.params if snapshot.history is not None else None):
        if params is not None and params.logits_processor is not None:
            raise InvalidSessionFile("params, logits_processor", params.logits_processor, "None: a file has no code",
                                     "Ask the next turn without one, or write the tokens yourself.")
    body = _body_of(snapshot)
    text = json.dumps({"format": FORMAT, "version": _version_of(body), "checksum": _checksum(body), "body": body})
    if len(text) > MAX_SESSION_FILE_BYTES:
        raise InvalidSessionFile("bytes", len(text), f"at most {MAX_SESSION_FILE_BYTES}",
                                 "Log-probabilities of a long completion take most of them; the next turn frees them.")
    if snapshot.kv is not None and snapshot.kv_spec is not None:
        # Why: the KV first. Until the session file is replaced too, the old one finds no block that matches its tokens,
        # and they are computed again.
        write_kv(_kv_path(path), snapshot.kv, snapshot.kv_spec)
    replace_file(path, lambda temporary: temporary.write_text(text, encoding="ascii"))
    if snapshot.kv is None:
        _kv_path(path).unlink(missing_ok=True)


def read_session(
    path: Path, model: ModelFingerprint, inputs: InputProcessor, describe_kv: DescribeKV, *,
    weights: WeightsMark = WeightsMark(), takes_others: bool = False,
) -> SessionSnapshot:
    """Read and check a session's files, for an engine with this model and these bounds; callable from any thread.

    Args:
        path: of the file.
        model: of the engine, with the weights that it has now.
        inputs: the engine's bounds.
        describe_kv: says how the engine makes KV.
        weights: which ones the engine has loaded.
        takes_others: whether a session of other weights of the same model is read, without its KV.

    Raises:
        InvalidSessionFile: it is no session file, damaged, of another version, or has values that are not accepted.
        ModelMismatch: it was made with another model.
        OSError: there is no such file, or it cannot be read.
    """
    sweep(path.parent, PART)
    body = _read_body(path, min(MAX_SESSION_FILE_BYTES, _NUM_BASE_BYTES + inputs.max_model_len * _NUM_BYTES_PER_TOKEN))
    names = _mapping(body, "model")
    made_with = ModelFingerprint(**{
        name: rule.check(f"model.{name}", names[name], InvalidSessionFile) for name, rule in _MODEL.items()
    })
    mark = _mark_of(body)
    is_same_model = (made_with.architecture, made_with.config) == (model.architecture, model.config)
    has_same_weights = made_with == model and mark.id == weights.id
    if not (has_same_weights or (is_same_model and takes_others)):
        raise ModelMismatch(f"{made_with}{mark}", f"{model}{weights}")
    history = None if body["history"] is None else _history(_mapping(body, "history"), inputs)
    params = None if body["params"] is None else _params(_mapping(body, "params"), inputs)
    priority, is_salted = _field(body, "priority", PRIORITY), _field(body, "is_salted", BOOLEAN)
    adapter, name = _adapter(_mapping(body, "adapter")) if "adapter" in body else (b"", "")
    has_kv = body["kv"] is not None and has_same_weights
    kv = _kv(path, _mapping(body, "kv"), history, describe_kv, adapter) if has_kv else None
    return SessionSnapshot(model=model, params=params, priority=priority, is_salted=is_salted, history=history, kv=kv,
                           adapter=adapter, adapter_name=name)


def _adapter(values: Mapping[str, Any]) -> tuple[bytes, str]:
    name = "" if values["name"] == "" else _field(values, "name", ADAPTER_NAME)
    return bytes.fromhex(_field(values, "digest", _DIGEST)), name


def _kv_path(path: Path) -> Path:
    return path.with_name(path.name + _KV_SUFFIX)


def _body_of(snapshot: SessionSnapshot) -> dict[str, Any]:
    spec, kv, history = snapshot.kv_spec, snapshot.kv, snapshot.history
    return {
        **({"weights": asdict(snapshot.weights)} if snapshot.weights.id else {}),
        "model": asdict(snapshot.model),
        "params": params_as_mapping(snapshot.params) if snapshot.params is not None else None,
        "priority": snapshot.priority,
        "is_salted": snapshot.is_salted,
        "history": None if history is None else {
            "token_ids": list(history.token_ids), "num_prompt_tokens": history.num_prompt_tokens,
            "params": params_as_mapping(history.params), "max_tokens": history.max_tokens, "seed": history.seed,
            "finish_reason": history.finish_reason,
            # Why: as hexadecimal text every float comes back bit for bit, infinities included.
            "logprobs": [
                [one.token_id, one.logprob.hex(), [[token_id, value.hex()] for token_id, value in one.top]]
                for one in history.logprobs
            ],
        },
        "kv": None if spec is None or kv is None else {
            "num_tokens": kv.num_tokens, **_form_of(spec), "block_digests": [key.hex() for key in spec.block_keys()],
        },
        # Why if: files without an adapter can be read by earlier versions, and those with one must not be.
        **({"adapter": {"digest": snapshot.adapter.hex(), "name": snapshot.adapter_name}} if snapshot.adapter else {}),
    }


def _form_of(spec: KVSpec) -> dict[str, Any]:
    further = {"state_bytes": spec.state_bytes, "window_bytes": spec.window_bytes}
    return {"block_size": spec.block_size, "block_bytes": spec.block_bytes, "kv_format": spec.kv_format,
            **{name: size for name, size in further.items() if size}}


def params_as_mapping(params: SamplingParams) -> dict[str, Any]:
    """Return parameters as JSON has them, without code; ``SamplingParams.from_mapping`` makes them again."""
    values = {field.name: getattr(params, field.name) for field in fields(params) if field.name not in LOCAL_NAMES}
    for name, default in _LATER_PARAMS.items():
        if values[name] == default:
            del values[name]
    if params.logit_bias is not None:
        values["logit_bias"] = {str(token_id): value for token_id, value in params.logit_bias.items()}
    if params.structured is not None:
        values["structured"] = params.structured.as_mapping()
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _canonical(values: Mapping[str, Any]) -> str:
    return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _checksum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(body).encode()).hexdigest()


def _version_of(body: Mapping[str, Any]) -> int:
    """Return the first version that knows all that is in a body."""
    kv = body["kv"] if isinstance(body["kv"], dict) else {}
    return VERSION if "window_bytes" in kv else _WITHOUT_WINDOWS if "state_bytes" in kv else _WITHOUT_STATE


def _read_body(path: Path, max_bytes: int) -> Mapping[str, Any]:
    try:
        content = read_bounded(path, max_bytes)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise InvalidSessionFile("bytes", path.stat().st_size, f"at most {max_bytes}",
                                     "It follows from the longest context of this engine's model.") from None
        raise
    try:
        document = load_json(content.decode())
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise InvalidSessionFile("format", f"{len(content)} bytes", f"JSON in UTF-8 that says {FORMAT!r}",
                                 is_described=True)
    if type(version := document.get("version")) is not int or not _WITHOUT_STATE <= version <= VERSION:
        raise InvalidSessionFile("version", version, f"{_WITHOUT_STATE} to {VERSION}")
    body = _mapping(_exactly(document, "document"), "body")
    try:
        is_whole = _checksum(body) == document["checksum"]
    except (ValueError, RecursionError):
        is_whole = False
    if not is_whole:
        raise InvalidSessionFile("checksum", document["checksum"], "the digest of its own contents",
                                 "The file was changed or damaged; export the session again.")
    if version != _version_of(body):
        raise InvalidSessionFile("version", version, f"{_version_of(body)} for what it has")
    return body


def _mark_of(body: Mapping[str, Any]) -> WeightsMark:
    if "weights" not in body:
        return WeightsMark()
    values = _mapping(body, "weights")
    return WeightsMark(**{name: rule.check(f"weights.{name}", values[name], InvalidSessionFile)
                          for name, rule in _MARK.items()})


def _field(values: Mapping[str, Any], name: str, rule: FieldRule[_T]) -> _T:
    return rule.check(name, values[name], InvalidSessionFile)


def _mapping(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = body[name]
    if not isinstance(value, dict):
        raise InvalidSessionFile(name, value, "an object")
    return _exactly(value, name)


def _exactly(values: dict[str, Any], name: str) -> dict[str, Any]:
    if values.keys() - _OPTIONAL.get(name, frozenset()) != _FIELDS[name]:
        missing = sorted(_FIELDS[name] - values.keys())
        raise InvalidSessionFile(f"{name}, fields", f"{len(values)} without {', '.join(missing) or 'the right names'}",
                                 f"exactly {', '.join(sorted(_FIELDS[name]))}", is_described=True)
    return values


def _params(values: Mapping[str, Any], inputs: InputProcessor) -> SamplingParams:
    with _refusals_of("params"):
        # Why all: what a file does not have was at its default, and no model's own takes its place.
        params = SamplingParams.from_mapping({**_LATER_PARAMS, **values})
        validation.check_params_for_model(params, inputs.vocab_size)
        validation.require_one_completion(params)
    if _canonical(params_as_mapping(params)) != _canonical(values):
        raise InvalidSessionFile("params", values, "the parameters in the form in which export writes them")
    return params


@contextmanager
def _refusals_of(what: str) -> Iterator[None]:
    """Turn the error of a field into one of the file."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidSessionFile(f"{what}, {error.what}", error.given, error.limit, is_described=True) from None


def _history(values: Mapping[str, Any], inputs: InputProcessor) -> SequenceSnapshot:
    with _refusals_of("token_ids"):
        # Why: one more than a prompt may have, because a history may fill the context; only its next turn is refused.
        token_ids = validation.validate_prompt_ids(values["token_ids"], inputs.vocab_size, inputs.max_model_len + 1)
    num_prompt_tokens = _field(values, "num_prompt_tokens", integer(1, len(token_ids)))
    params, output_ids = _params(_mapping(values, "params"), inputs), token_ids[num_prompt_tokens:]
    return SequenceSnapshot(
        token_ids=tuple(token_ids), num_prompt_tokens=num_prompt_tokens, params=params,
        max_tokens=_field(values, "max_tokens", integer(max(1, len(output_ids)), MAX_COUNT)),
        seed=_field(values, "seed", integer(0, MAX_SEED)),
        finish_reason=_field(values, "finish_reason", _REASON),
        logprobs=_logprobs(values["logprobs"], output_ids if params.logprobs is not None else [], inputs.vocab_size),
    )


def _logprobs(values: Any, token_ids: list[int], vocab_size: int) -> tuple[TokenLogprobs, ...]:
    is_token = integer(0, vocab_size - 1).accepts
    try:
        if type(values) is not list:
            raise TypeError
        return tuple(_token_logprobs(one, expected, is_token) for one, expected in zip(values, token_ids, strict=True))
    except (ValueError, TypeError, OverflowError):
        pass
    raise InvalidSessionFile(
        "logprobs", values, f"a list of [token id, log-probability, [[id, value], ...]] for {len(token_ids)} tokens of "
        f"the completion, the log-probabilities at most 0 and in hexadecimal, and at most {MAX_LOGPROBS} ids a token",
    )


def _token_logprobs(entry: Any, expected: int, is_token: Callable[[Any], bool]) -> TokenLogprobs:
    token_id, value, top = entry
    pairs = tuple((other, _logprob(text)) for other, text in top)
    is_list = type(top) is list and len(top) <= MAX_LOGPROBS
    if not (is_list and is_token(token_id) and token_id == expected and all(is_token(other) for other, _ in pairs)):
        raise ValueError
    return TokenLogprobs(token_id, _logprob(value), pairs)


def _logprob(text: Any) -> float:
    value = float.fromhex(text)
    if value.hex() != text or not value <= _MAX_LOGPROB:
        raise ValueError
    return value


def _kv(
    path: Path, values: Mapping[str, Any], history: SequenceSnapshot | None, describe_kv: DescribeKV, adapter: bytes
) -> KVCopy | None:
    """Return the KV if it is of use here; only a contradiction between digests and tokens refuses the file."""
    token_ids = history.token_ids if history is not None else ()
    num_tokens = _field(values, "num_tokens", integer(1, len(token_ids)))
    form = {name: _field(values, name, rule) for name, rule in _FORM.items() if name in values}
    spec = describe_kv(token_ids, num_tokens, adapter)
    if form == _form_of(spec.whole):
        # Why: engines before, and those with one kind of blocks, write whole ones; they are divided here.
        spec = spec.whole
    if form != _form_of(spec):
        _log.info("session file: its KV was made in another form than this engine's; it is computed again")
        return None
    if values["block_digests"] != [key.hex() for key in spec.block_keys()]:
        raise InvalidSessionFile("block_digests", values["block_digests"], "the digests of its own tokens")
    return read_kv(_kv_path(path), spec)
