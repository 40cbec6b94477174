"""What a caller may say of a request besides its prompt and its sampling parameters.

Every door takes the fields of ``RequestOptions`` as keywords (``OptionKeywords``) and passes on one object.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from types import MappingProxyType
from typing import Any, Final, TypedDict

from pagedcore.config.field_rules import ADAPTER_NAME, BOOLEAN, LABEL, PRIORITY, Check, FieldRule, number, seconds
from pagedcore.config.keywords import refuses_unknown
from pagedcore.config.limits import MAX_SALT_BYTES, MAX_TIMEOUT_S, MAX_WEIGHT
from pagedcore.errors import InvalidSalt, UnknownParameter
from pagedcore.sampling_params import NAMES as SAMPLING_NAMES

TIMEOUT: Final[FieldRule[float | None]] = seconds(0, MAX_TIMEOUT_S, above_low=True).or_none()
"""What every door accepts as the longest time to the end of a completion, in seconds; ``None``: no limit."""
WAIT: Final[FieldRule[float]] = seconds(0, MAX_TIMEOUT_S)
"""How long a call that waits for the engine may do so, in seconds."""

_TARGET_MS: Final = number(0, 1000 * MAX_TIMEOUT_S, above_low=True)
_WEIGHT: Final = number(1 / MAX_WEIGHT, MAX_WEIGHT)
_MILLISECONDS: Final = {"type": "number", "description": "Milliseconds, for the deadline policy."}


class Reader(Enum):
    """Which scheduling policies look at an option; the others refuse it."""

    PRIORITIES = "has_priorities", "priority"
    WEIGHTS = "has_tenants", "fair"
    DEADLINES = "has_deadlines", "deadline"
    TARGETS = "has_targets", "deadline"

    def __init__(self, trait: str, policy: str) -> None:
        self.trait = trait
        """The attribute of ``Policy`` that says whether it does."""
        self.policy = policy
        """The policy of pagedcore's own that does."""


@dataclass(frozen=True, slots=True)
class OptionFacts:
    """What doors, policies and recordings have to know of an option; they look at no list of names."""

    check: Check
    """Returns what is stored of a value other than the default, or raises ``InvalidRequest``."""
    schema: Mapping[str, Any] | None = None
    """How it stands in the JSON schema of a door over HTTP; ``None``: there, only the operator says it."""
    reader: Reader | None = None
    """Who looks at it; ``None``: no policy refuses it."""
    is_recorded: bool = True
    """Whether decisions may depend on it, so that recordings have it; they have no secrets and no labels."""


def _option(
    default: Any, check: Check, *, schema: Mapping[str, Any] | None = None, reader: Reader | None = None,
    is_recorded: bool = True, is_shown: bool = True,
) -> Any:
    facts = OptionFacts(check, schema, reader, is_recorded)
    return field(default=default, repr=is_shown, metadata={"facts": facts})


def _check_salt(_: str, value: object) -> object:
    _salt_bytes(value)
    return value


class CallersKeywords(TypedDict, total=False):
    """The options that a caller over HTTP may give, for type checkers; see ``RequestOptions``."""

    priority: int
    cache_salt: str | bytes | None
    request_id: str | None
    deadline_s: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    speculate: bool
    lora: str | None


class OptionKeywords(CallersKeywords, total=False):
    """The keywords of every door in Python that accepts a request, for type checkers."""

    tenant: str
    weight: float


def sampling_advice(name: str) -> str:
    """Say where a sampling parameter belongs that was given as a keyword of a call; empty for other names."""
    return f"It is a sampling parameter: params=SamplingParams({name}=...)." if name in SAMPLING_NAMES else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Who a request is for and how urgent it is.

    Raises:
        InvalidRequest: the priority is no integer from -1,000,000 to 1,000,000, the label or the tenant no printable
            text of 1 to 128 characters, the weight not from 0.001 to 1,000, or a deadline or target not above 0 and
            up to thirty days; ``InvalidSalt``: the salt is neither text nor bytes, or not 1 to 64 bytes;
            ``UnknownParameter``, which is a ``TypeError`` too: there is no option of a name.
    """

    priority: int = _option(0, PRIORITY.check, schema={"type": "integer"}, reader=Reader.PRIORITIES)
    """Higher runs first under a policy that has priorities; others refuse any but 0."""
    cache_salt: str | bytes | None = _option(None, _check_salt, is_recorded=False, is_shown=False, schema={
        "type": "string", "description": "Calls with different salts share no cached prompts: 1 to 64 bytes."})
    """Requests with different salts never share cached blocks, and neither speed nor usage of one tells what another
    asked. Give each tenant its own."""
    request_id: str | None = _option(None, LABEL.check, is_recorded=False, schema={
        "type": "string", "description": "The caller's own label, for logs."})
    """The caller's own label for logs and hooks (``RequestOutput.client_request_id``), unique among requests of one
    salt. Requests are aborted and looked up by the engine's own random id."""
    tenant: str = _option("", LABEL.check)
    """Who the service of this request is counted for, under a policy that looks at tenants; empty: all that name none.
    It gives no access: what tenants may see of each other is a matter of ``cache_salt``."""
    weight: float = _option(1.0, _WEIGHT.check, reader=Reader.WEIGHTS)
    """Share of this request's tenant beside others, under a policy with weights; others refuse any but 1."""
    deadline_s: float | None = _option(None, TIMEOUT.check, reader=Reader.DEADLINES, schema={
        "type": "number", "description": "When to end, for the deadline policy."})
    """When the completion has to end, in seconds from its acceptance, under a policy with deadlines; others refuse any.
    It ends no request that has started: for that, see ``timeout_s``."""
    ttft_ms: float | None = _option(None, _TARGET_MS.check, reader=Reader.TARGETS, schema=_MILLISECONDS)
    """The longest time to the first token that meets the caller's target, in milliseconds, under such a policy."""
    tpot_ms: float | None = _option(None, _TARGET_MS.check, reader=Reader.TARGETS, schema=_MILLISECONDS)
    """The longest mean time from token to token, likewise: while this request runs, steps compute fewer tokens of
    prompts."""
    speculate: bool = _option(True, BOOLEAN.check, is_recorded=False, schema={
        "type": "boolean", "description": "Whether tokens may be guessed ahead; the answer is the same."})
    """Whether this request's tokens may be guessed ahead, in an engine with ``speculation``; its answer is the same."""
    lora: str | None = _option(None, ADAPTER_NAME.check, is_recorded=False, schema={
        "type": "string", "description": "The name of a loaded LoRA adapter to compute with."})
    """The name of a loaded adapter that this request is computed with; ``None``: the model alone. What is loaded under
    the name when the request is accepted stays its adapter to the end."""
    salt: bytes = field(init=False, repr=False)
    """The salt as it enters cache keys; empty for requests without one."""

    def __post_init__(self) -> None:
        for name, default, check in _CHECKS:
            value = getattr(self, name)
            # Why types: True equals 1, and is refused.
            if value is not default and (type(value) is not type(default) or value != default):
                object.__setattr__(self, name, check(name, value))
        object.__setattr__(self, "salt", _salt_bytes(self.cache_salt))

    @property
    def owner(self) -> bytes:
        """Whose share of the threads that prepare requests this one takes: its tenant's, who may add salts at will, or
        that of its salt."""
        return b"tenant " + self.tenant.encode() if self.tenant else self.salt

    @property
    def has_targets(self) -> bool:
        """Whether it says by when something has to be done."""
        return self.deadline_s is not None or self.ttft_ms is not None or self.tpot_ms is not None

    def without_salt(self) -> RequestOptions:
        """Return what a policy, which may be the user's own code, may see."""
        return self if self.cache_salt is None else replace(self, cache_salt=None)


def _salt_bytes(salt: object) -> bytes:
    if salt is None:
        return b""
    given = salt.encode("utf-8", "surrogatepass") if isinstance(salt, str) else salt
    # Safety: a salt may be a secret, so the message has its type and size only.
    if not isinstance(given, bytes):
        raise InvalidSalt("cache_salt", type(salt), "text or bytes")
    if not 1 <= len(given) <= MAX_SALT_BYTES:
        raise InvalidSalt("cache_salt", salt, f"1 to {MAX_SALT_BYTES} bytes")
    return given


OPTIONS: Final[Mapping[str, OptionFacts]] = MappingProxyType(
    {one.name: one.metadata["facts"] for one in fields(RequestOptions) if one.init})
"""What is to be known of each option, in the order of the fields."""
CALLERS_OPTIONS: Final[Mapping[str, Any]] = MappingProxyType(
    {one.name: one.default for one in fields(RequestOptions) if one.init and OPTIONS[one.name].schema is not None})
"""The options that a caller over HTTP may give, with their defaults; what is left is the operator's."""
RECORDED_OPTIONS: Final = tuple(name for name, facts in OPTIONS.items() if facts.is_recorded)
"""The options that decisions may depend on."""
_NAMES: Final = tuple(OPTIONS)
_CHECKS: Final = tuple((one.name, one.default, OPTIONS[one.name].check) for one in fields(RequestOptions) if one.init)
_refuses_unknown: Final = refuses_unknown("option", sampling_advice)
# Why here: a dataclass takes its fields only, and refuses others with an error of another kind.
RequestOptions.__init__ = _refuses_unknown(RequestOptions.__init__)  # type: ignore[method-assign]
NO_OPTIONS: Final = RequestOptions()


def read_options(given: OptionKeywords, *own: str) -> RequestOptions:
    """Return the options that a door was given as keywords, beside those of its ``own`` names.

    Raises:
        UnknownParameter: a name is neither; the advice is the nearest of both.
        InvalidRequest: as ``RequestOptions``.
    """
    for name in given:
        if name not in _NAMES:
            raise UnknownParameter.named("option", name, (*own, *_NAMES), sampling_advice(name))
    return RequestOptions(**given) if given else NO_OPTIONS
