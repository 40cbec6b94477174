"""One token of a recorded request, computed again alone, with the model: its alternatives, and other ways from there.

A row's logits are the same bits in any company, so the point alone shows what was computed in the batch. That holds
only with the same weights, kernels, versions and processor, which are compared first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from pagedcore.analysis.recorder.dumps import header_of
from pagedcore.analysis.recorder.recording import Recording
from pagedcore.analysis.replay.lives import described_in
from pagedcore.config.limits import MAX_SEED
from pagedcore.engine.engine import Engine
from pagedcore.errors import InvalidRequest, RecordingError, RecordingMismatch
from pagedcore.outputs import TokenLogprobs
from pagedcore.request_options import RequestOptions
from pagedcore.requests import validation
from pagedcore.requests.request import Request
from pagedcore.requests.request_table import SequenceSnapshot
from pagedcore.sampling_params import SamplingParams

_SETTINGS: Final = ("dtype", "block_size", "attention_backend", "linear_backend", "kv_cache_dtype", "quantization",
                    "model_backend", "max_model_len")
_LARGEST_TOP: Final = 20
_LARGEST_BLOCK: Final = 1024


@dataclass(frozen=True, slots=True)
class Point:
    """The place of one generated token in a recorded sequence."""

    token_ids: tuple[int, ...]
    """Everything before it."""
    num_prompt_tokens: int
    token_id: int | None
    """The token that was chosen; ``None``: it was not generated yet."""
    params: SamplingParams
    seed: int
    weights: tuple[int, str, str]
    """Number, label and identity of those that it was drawn with."""

    @property
    def index(self) -> int:
        """How many tokens were generated before it."""
        return len(self.token_ids) - self.num_prompt_tokens


def settings_for(recording: Recording, num_tokens: int) -> dict[str, Any]:
    """Return settings of an engine that computes as the recorded one did, with room for one sequence.

    Raises ``RecordingError`` if the header is not one of an engine.
    """
    engine = recording.header.get("engine")
    size = engine.get("block_size") if isinstance(engine, dict) else None
    if not isinstance(engine, dict) or type(size) is not int or not 1 <= size <= _LARGEST_BLOCK:
        raise RecordingError("its header names no engine")
    settings = {name: engine[name] for name in _SETTINGS if name in engine}
    return {**settings, "num_kv_blocks": -(-num_tokens // size) + 1, "max_num_seqs": 1}


def require_equal(recording: Recording, engine: Engine, point: Point | None = None) -> None:
    """Raise ``RecordingMismatch`` unless the engine computes the recorded bits of a point, or without one those of the
    last weights; ``RecordingError`` if no engine can.
    """
    header, own = recording.header, header_of(engine)
    if not header.get("is_schedule_invariant"):
        raise RecordingError("the model's results depend on the schedule, so that a point alone shows other bits")
    if (header.get("identity") if point is None else point.weights[2]) != own["identity"]:
        named = {"pagedcore": "version of pagedcore", "processor": "processor", "engine": "setting of the engine"}
        other = [text for name, text in named.items() if header.get(name) != _plain(own[name])]
        what = " and another ".join(other) or "model or version of torch"
        if point is not None and point.weights[0] and not other:
            number, label, _ = point.weights
            what = f"model than that of the weights {label!r}, number {number}, or version of torch"
        raise RecordingMismatch(f"it was made with another {what}")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def find_point(recording: Recording, request: str, index: int, completion: int = 0) -> Point:
    """Find the ``index``-th generated token, from 0, of a request's latest turn.

    Args:
        recording: made with token ids.
        request: the engine's id, or a beginning that only one request has.
        index: 0 to the number of its generated tokens; the last one was not chosen yet, or is behind the end.
        completion: of several, which one.

    Raises:
        RecordingError: no token ids were recorded, or the request or the token is not in the recording.
    """
    if not recording.has_tokens:
        raise RecordingError('it has no token ids; record with flight_recorder="tokens"')
    try:
        return _find(recording, request, index, completion)
    except RecordingError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise RecordingError(f"its requests cannot be read ({type(error).__name__})") from error


def _find(recording: Recording, request: str, index: int, completion: int) -> Point:
    number = _sequence_of(recording, request, completion)
    described, num_tokens = _latest_turn(recording, number)
    _, row = recording.rows[described["row"]]
    num_prompt = described["plain"]["num_prompt_tokens"]
    place = num_prompt + index
    if not (0 < num_prompt <= place <= num_tokens):
        raise RecordingError(f"token {index} is not in it; the request has {num_tokens - num_prompt} generated tokens")
    known, seed = row.tolist(), described["plain"]["seed"]
    if type(seed) is not int or not 0 <= seed <= MAX_SEED:
        raise RecordingError("its seed is none")
    chosen = known[place] if place < num_tokens else None
    params = _params_of(described)
    if index + 1 != described["plain"]["max_tokens"]:
        # Why: the turn ends at the point when it is computed, and did not end there.
        params = _with(params, forced_eos_token_id=None)
    return Point(tuple(known[:place]), num_prompt, chosen, params, seed, _weights_of(recording, described, place))


def _weights_of(recording: Recording, described: Mapping[str, Any], place: int) -> tuple[int, str, str]:
    """Return the weights that the token at a place was drawn with, or would be."""
    number = max([(begin, number) for begin, number in described.get("weights", ()) if begin <= place],
                 default=(0, 0))[1]
    known = dict[int, tuple[int, str, str]]()
    if all("weights" not in segment["state"] for segment in recording.segments):
        # Why: a file of an earlier version knows one version of weights only.
        known[0] = 0, "", str(recording.header.get("identity"))
    for segment in recording.segments:
        taken = [given for _, verb, given, _ in segment["events"] if verb == "weights"]
        for one, label, identity in (*([segment["state"]["weights"]] if "weights" in segment["state"] else ()), *taken):
            known[one] = int(one), str(label), str(identity)
    if number not in known:
        raise RecordingError("the weights that the token was drawn with are no longer in it")
    return known[number]


def _sequence_of(recording: Recording, request: str, completion: int) -> int:
    found: dict[str, list[int]] = {}
    for segment in recording.segments:
        named = [*segment["state"].get("requests", ()), *(one[2] for one in segment["events"] if one[1] == "request")]
        for name, numbers in named:
            if str(name).startswith(request):
                # Why the latest: a turn that continues one of several completions has further sequences.
                found[name] = numbers
    if len(found) != 1:
        raise RecordingError(f"{len(found)} requests have an id that begins like this")
    numbers = next(iter(found.values()))
    if not 0 <= completion < len(numbers):
        raise RecordingError(f"the request has {len(numbers)} completions")
    return numbers[completion]


def _latest_turn(recording: Recording, number: int) -> tuple[Mapping[str, Any], int]:
    """Return the last description of a sequence, and how many tokens it had in the end."""
    described: Mapping[str, Any] | None = None
    num_tokens = 0
    for segment in recording.segments:
        known: list[tuple[Any, Any]] = [(segment["state"]["sequences"], [])]
        for _, verb, given, _ in segment["events"]:
            known.append((given, given[-1] if verb in ("commit", "accept", "read") else []))
        for values, grown in known:
            for one in described_in(values):
                if one["plain"]["sequence_id"] == number:
                    described, num_tokens = one, one["num_tokens"]
            num_tokens += number in grown
    if described is None:
        raise RecordingError("the request's tokens are no longer in it")
    return described, num_tokens


def _params_of(described: Mapping[str, Any]) -> SamplingParams:
    kept = {name: value for name, value in described["params"].items()
            if name not in ("n", "best_of", "stop", "prompt_logprobs", "logprobs", "logprobs_mode", "max_tokens")}
    if "logits_processor" in kept:
        raise RecordingError("the request has a logits processor, which is code and in no recording")
    try:
        params = SamplingParams.from_mapping(kept)
    except (InvalidRequest, TypeError) as error:
        raise RecordingError(f"its sampling parameters are none ({type(error).__name__})") from None
    if params.beam_width > 1:
        raise RecordingError("the request searches with beams, which are not computed alone")
    return params


def compute_point(engine: Engine, point: Point, num_top: int = 10) -> TokenLogprobs:
    """Compute the logits of one point alone; return the token that is chosen, and the most likely ones.

    Log-probabilities are those of the model's own distribution. Raises as ``Engine.step``, the request's error, and
    ``InvalidRequest`` for tokens that the model does not have or has no room for.
    """
    request = _complete(engine, point, point.token_ids, 1, min(num_top, _LARGEST_TOP))
    try:
        return request.sequences[0].logprobs[-1]
    finally:
        request.remove()


def continue_point(engine: Engine, point: Point, token_id: int, num_tokens: int) -> tuple[list[int], str]:
    """Put another token at a point and generate up to so many further ones; return all of them, and their text.

    A grammar that the request has (``structured``) does not bind them, because the token may be outside of it, nor does
    its last token (``forced_eos_token_id``).

    Raises ``InvalidRequest`` if the token is not in the vocabulary or the context has no room for them.
    """
    engine.token_text(token_id)
    free = replace(point, params=_with(point.params, structured=None, forced_eos_token_id=None))
    request = _complete(engine, free, (*point.token_ids, token_id), num_tokens, None)
    try:
        token_ids = request.sequences[0].token_ids[len(point.token_ids) :]
        has_text = engine.input_processor.tokenizer is not None
        return token_ids, engine.input_processor.text_of(token_ids) if has_text else ""
    finally:
        request.remove()


def _with(params: SamplingParams, **changes: Any) -> SamplingParams:
    return SamplingParams(**{**{one.name: getattr(params, one.name) for one in fields(params)}, **changes})


def _complete(
    engine: Engine, point: Point, token_ids: tuple[int, ...], num_tokens: int, num_top: int | None
) -> Request:
    """Complete a cut-off turn by so many tokens, as a session does that was exported in the middle of one."""
    # Safety: the tokens come from a file, and kernels take them as places in memory.
    inputs = engine.input_processor
    validation.validate_prompt_ids(token_ids, inputs.vocab_size, inputs.max_model_len)
    num_before = len(token_ids) - point.num_prompt_tokens
    min_tokens = min(point.params.min_tokens, num_before + num_tokens)
    params = _with(point.params, max_tokens=num_before + num_tokens, logprobs=num_top, min_tokens=min_tokens)
    validation.check_params_for_model(params, inputs.vocab_size)
    snapshot = SequenceSnapshot(
        token_ids=token_ids, num_prompt_tokens=point.num_prompt_tokens, params=params,
        max_tokens=num_before + num_tokens, seed=point.seed, finish_reason="abort",
    )
    request = engine.requests.revive(snapshot, RequestOptions())
    engine.requests.adopt(request)
    engine.requests.complete_turn(request, inputs.constraint_of(params))
    while not request.is_done:
        engine.step()
    if request.error is not None:
        raise request.error
    return request
