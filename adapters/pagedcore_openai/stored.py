"""Responses that later ones may continue: in the memory of this process, so many bytes of them, each for its tenant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from pagedcore.errors import InvalidRequest
from pagedcore_http.refusals import RefusedAtTheDoor
from pagedcore_http.salts import Salt

MAX_STORED_BYTES: Final = 2**25
"""Bytes of text that the responses of one model may take; then the oldest of the tenant with most of them go."""
_OVERHEAD: Final = 512
"""Bytes that a response takes besides its text."""
_PER_MESSAGE: Final = 64

Message = Mapping[str, Any]


class ResponseNotFound(RefusedAtTheDoor):
    """There is no such response, or it is another tenant's: both look the same."""


@dataclass(frozen=True, slots=True)
class _Stored:
    owner: Salt
    messages: Sequence[Message]
    body: str
    num_bytes: int


class StoredResponses:
    """The stored responses of one model.

    Invariant: together they take at most ``max_bytes``.
    Invariant: a response is found with its own id and its tenant's salt only.
    Invariant: a tenant that stores less than another loses nothing to it.
    """

    def __init__(self, max_bytes: int = MAX_STORED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._by_id: dict[str, _Stored] = {}
        self._ids: dict[Salt, dict[str, None]] = {}
        self._held: Counter[Salt] = Counter()
        self.num_bytes = 0

    def __contains__(self, response_id: object) -> bool:
        return response_id in self._by_id

    def keep(self, response_id: str, owner: Salt, messages: Sequence[Message], body: str) -> None:
        """Store a response.

        Args:
            response_id: its id, which cannot be guessed.
            owner: the derived salt of its tenant.
            messages: the conversation with the response's own message.
            body: the response itself.
        """
        # Why all of them: messages are shared with the response before, but outlive it.
        text = sum(len(str(one.get(name) or "")) for one in messages for name in ("content", "tool_calls"))
        # Why 4: what a character may take.
        num_bytes = _OVERHEAD + _PER_MESSAGE * len(messages) + 4 * (text + len(body))
        if num_bytes > self._max_bytes:
            return
        self._by_id[response_id] = _Stored(owner, messages, body, num_bytes)
        self._ids.setdefault(owner, {})[response_id] = None
        self._held[owner] += num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            self._remove(next(iter(self._ids[max(self._held, key=self._held.__getitem__)])))

    def messages_of(self, response_id: object, owner: Salt) -> Sequence[Message]:
        """Return the conversation up to a response. Raises ``InvalidRequest``, and ``ResponseNotFound`` (400)."""
        if not isinstance(response_id, str):
            raise InvalidRequest("previous_response_id", response_id, "the id of a response")
        return self._find(HTTPStatus.BAD_REQUEST, "previous_response_id", response_id, owner).messages

    def body_of(self, response_id: str, owner: Salt) -> str:
        """Return a response. Raises ``ResponseNotFound`` (404)."""
        return self._find(HTTPStatus.NOT_FOUND, "response_id", response_id, owner).body

    def forget(self, response_id: str, owner: Salt) -> None:
        """Remove a response; those that continue it stay. Raises ``ResponseNotFound`` (404)."""
        self._find(HTTPStatus.NOT_FOUND, "response_id", response_id, owner)
        self._remove(response_id)

    def _remove(self, response_id: str) -> None:
        stored = self._by_id.pop(response_id)
        self.num_bytes -= stored.num_bytes
        self._held[stored.owner] -= stored.num_bytes
        del self._ids[stored.owner][response_id]
        if not self._ids[stored.owner]:
            del self._ids[stored.owner], self._held[stored.owner]

    def _find(self, status: HTTPStatus, what: str, response_id: str, owner: Salt) -> _Stored:
        stored = self._by_id.get(response_id)
        if stored is None or stored.owner != owner:
            raise ResponseNotFound(status, what, response_id, "the id of a response that is stored",
                                   "The oldest are removed when there are many, and all at the end of the process.")
        return stored
