"""Calls as Seed-OSS writes them: those of Qwen3-Coder within ``<seed:tool_call>``, values without line breaks."""

from __future__ import annotations

from pagedcore.tool_calls.tagged_calls import Tags
from pagedcore.tool_calls.tagged_format import TaggedFormat


class SeedOssFormat(TaggedFormat):
    """The format ``seed_oss``."""

    tags = Tags(
        begin="<seed:tool_call>", call="<function=", name_end=">", key="<parameter=", key_end=">",
        value_end="</parameter>", call_end="</function>", end="</seed:tool_call>")
