"""Calls as MiniMax-M2 writes them: ``<invoke name="NAME">`` for each within one ``<minimax:tool_call>``."""

from __future__ import annotations

from pagedcore.tool_calls.tagged_calls import Tags
from pagedcore.tool_calls.tagged_format import TaggedFormat


class MiniMaxM2Format(TaggedFormat):
    """The format ``minimax_m2``."""

    tags = Tags(
        begin="<minimax:tool_call>", call='<invoke name="', name_end='">', key='<parameter name="', key_end='">',
        value_end="</parameter>", call_end="</invoke>", end="</minimax:tool_call>", is_block=True)
