"""Responses that later ones may continue: in the memory of this process, so many bytes of them, each for its tenant."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from pagedcore.errors import InvalidRequest
from pagedcore_http.refusals import RefusedAtTheDoor
from pagedcore_http.salts import Salt

MAX_STORED_BYTES: Final = 2**25
"""Bytes of text that the responses of one model may take; the oldest go first."""
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
    """

    def __init__(self, max_bytes: int = MAX_STORED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._by_id: OrderedDict[str, _Stored] = OrderedDict()
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
        self._by_id[response_id] = _Stored(owner, messages, body, num_bytes)
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= self._by_id.popitem(last=False)[1].num_bytes

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
        stored = self._find(HTTPStatus.NOT_FOUND, "response_id", response_id, owner)
        del self._by_id[response_id]
        self.num_bytes -= stored.num_bytes

    def _find(self, status: HTTPStatus, what: str, response_id: str, owner: Salt) -> _Stored:
        stored = self._by_id.get(response_id)
        if stored is None or stored.owner != owner:
            raise ResponseNotFound(status, what, response_id, "the id of a response that is stored",
                                   "The oldest are removed when there are many, and all at the end of the process.")
        return stored
