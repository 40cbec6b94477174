"""What messages and tools may say besides what is read: the names for chats and for the items of responses.

A conversation that began at another provider has that provider's notes in it. They are about the message and not a part
of the prompt, so they are accepted without effect; a name that is in no table is refused, because it may be one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pagedcore_openai.errors import FieldNotSupported, is_field

READ: Final = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
"""What a chat template gets."""
WITHOUT_EFFECT: Final = frozenset({
    "annotations", "artifact", "cache_control", "citations", "created", "created_at", "encrypted_content",
    "extra_content", "finish_reason", "id", "index", "is_error", "logprobs", "metadata", "model", "object", "parsed",
    "phase", "prompt_cache_breakpoint", "provider", "provider_specific_fields", "reasoning_details",
    "reasoning_opaque", "reasoning_text", "response_metadata", "signature", "status", "stop_reason", "thinking",
    "thinking_blocks", "thought_signature", "timestamp", "token_ids", "type", "usage",
})
"""Notes of providers and clients, whatever their value."""
OF_TOOLS: Final = frozenset({
    "allowed_callers", "annotations", "cache_control", "defer_loading", "eager_input_streaming", "output_schema",
    "title",
})
"""Notes beside a tool's function, or in it: where it is cached, when it is loaded, who else may call it."""
_EMPTY: Final[tuple[Any, ...]] = (None, [], "", {})
_REASONING_PARTS: Final = ("thinking", "redacted_thinking", "reasoning", "reasoning_text")
_ADVICE: Final = {
    "audio": "Models here read text only; give the audio's transcript as content.",
    "refusal": "Give its text as content.",
    "images": "Models here read text only.",
}


def read_message(where: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a chat template gets; ``where`` is the place of the message in the body.

    Raises:
        FieldNotSupported: a name that is in no table and has something to say, or audio or a refusal.
    """
    if isinstance(reasoning := given.get("reasoning"), str):
        # Why: a response has it under both names, and clients send back what they got.
        given = {"reasoning_content": reasoning, **given}
    for name, value in given.items():
        if name not in READ and name not in WITHOUT_EFFECT and name != "reasoning" and value not in _EMPTY:
            # Safety: text that is no name of a field may be anything, and is not repeated.
            raise FieldNotSupported(f"{where}.{name}" if is_field(name) else where, value, ", ".join(READ),
                                    _ADVICE.get(name, "Leave it out."))
    message = {name: given[name] for name in READ if given.get(name) not in (None, [])}
    if isinstance(parts := message.get("content"), list) and message.get("role") == "assistant":
        message["content"] = [part for part in parts if not _is_reasoning(part)]
    return message


def _is_reasoning(part: Any) -> bool:
    """Whether a part of an assistant's content is earlier reasoning, which templates leave out."""
    return isinstance(part, dict) and part.get("type") in _REASONING_PARTS
