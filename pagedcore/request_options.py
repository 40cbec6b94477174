"""What a caller may say of a request besides its prompt and its sampling parameters.

Every door takes the fields of ``RequestOptions`` as keywords (``OptionKeywords``) and passes on one object.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final, TypedDict

from pagedcore.config.field_rules import LABEL, PRIORITY, FieldRule, number, seconds
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


class OptionKeywords(TypedDict, total=False):
    """The keywords of every door that accepts a request; see ``RequestOptions``."""

    priority: int
    cache_salt: str | bytes | None
    request_id: str | None
    tenant: str
    weight: float
    deadline_s: float | None
    ttft_ms: float | None
    tpot_ms: float | None


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

    priority: int = 0
    """Higher runs first under a policy that has priorities; others refuse any but 0."""
    cache_salt: str | bytes | None = field(default=None, repr=False)
    """Requests with different salts never share cached blocks, and neither speed nor usage of one tells what another
    asked. Give each tenant its own."""
    request_id: str | None = None
    """The caller's own label for logs and hooks (``RequestOutput.client_request_id``), unique among requests of one
    salt. Requests are aborted and looked up by the engine's own random id."""
    tenant: str = ""
    """Who the service of this request is counted for, under a policy that looks at tenants; empty: all that name none.
    It gives no access: what tenants may see of each other is a matter of ``cache_salt``."""
    weight: float = 1.0
    """Share of this request's tenant beside others, under a policy with weights; others refuse any but 1."""
    deadline_s: float | None = None
    """When the completion has to end, in seconds from its acceptance, under a policy with deadlines; others refuse any.
    It ends no request that has started: for that, see ``timeout_s``."""
    ttft_ms: float | None = None
    """The longest time to the first token that meets the caller's target, in milliseconds, under such a policy."""
    tpot_ms: float | None = None
    """The longest mean time from token to token, likewise: while this request runs, steps compute fewer tokens of
    prompts."""
    salt: bytes = field(init=False, repr=False)
    """The salt as it enters cache keys; empty for requests without one."""

    def __post_init__(self) -> None:
        if type(self.priority) is not int or self.priority:
            PRIORITY.check("priority", self.priority)
        object.__setattr__(self, "salt", _salt_bytes(self.cache_salt))
        if self.request_id is not None:
            LABEL.check("request_id", self.request_id)
        if type(self.tenant) is not str or self.tenant:
            LABEL.check("tenant", self.tenant)
        if type(self.weight) is not float or self.weight != 1.0:
            object.__setattr__(self, "weight", _WEIGHT.check("weight", self.weight))
        if self.deadline_s is not None:
            object.__setattr__(self, "deadline_s", TIMEOUT.check("deadline_s", self.deadline_s))
        for name in ("ttft_ms", "tpot_ms"):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, _TARGET_MS.check(name, given))

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


_NAMES: Final = tuple(OptionKeywords.__annotations__)
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
