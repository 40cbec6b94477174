"""Calls as Qwen3-Coder writes them: ``<function=NAME>`` and ``<parameter=NAME>`` within ``<tool_call>``.

Values have lines of their own. Qwen 3.5, Nemotron 3 and Step 3.5 write them too.
"""

from __future__ import annotations

from pagedcore.tool_calls.tagged_calls import Tags
from pagedcore.tool_calls.tagged_format import TaggedFormat


class Qwen3CoderFormat(TaggedFormat):
    """The format ``qwen3_coder``."""

    tags = Tags(
        begin="<tool_call>", call="<function=", name_end=">", key="<parameter=", key_end=">", value_end="</parameter>",
        call_end="</function>", end="</tool_call>", blank="\n")
