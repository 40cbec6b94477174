"""Calls as GLM 4.5 and its successors write them: a name, and ``<arg_key>`` and ``<arg_value>`` for each argument.

Ling, Laguna and Spark write them too, with line breaks between the tags or without.
"""

from __future__ import annotations

from pagedcore.tool_calls.tagged_calls import Tags
from pagedcore.tool_calls.tagged_format import TaggedFormat


class GlmFormat(TaggedFormat):
    """The format ``glm``."""

    tags = Tags(
        begin="<tool_call>", key="<arg_key>", key_end="</arg_key>", value="<arg_value>", value_end="</arg_value>",
        call_end="</tool_call>", may_lack_line=True)
