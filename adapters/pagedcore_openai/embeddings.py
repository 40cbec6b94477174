"""``/v1/embeddings``: the vectors of texts or token ids, as numbers or in base64."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final

import numpy as np

from pagedcore import Embedding
from pagedcore.errors import InvalidRequest
from pagedcore_http.events import encode
from pagedcore_http.json_pieces import map_in_pieces
from pagedcore_openai import fields as known
from pagedcore_openai.pooled import TextsCall

_FORMATS: Final = ("float", "base64")


class EmbeddingCall(TextsCall):
    """A call for vectors."""

    form = known.EMBEDDING
    verb = "embed"
    prefix: ClassVar[str] = "embd"

    def read(self, fields: Mapping[str, Any]) -> None:
        """Read the texts, and in which form their vectors are wanted."""
        super().read(fields)
        self._asked = {name: fields[name] for name in ("pooling", "normalize", "dimensions", "prompt_name")
                       if name in fields}
        self._format = fields.get("encoding_format", "float")
        if self._format not in _FORMATS:
            raise InvalidRequest("encoding_format", self._format, f"one of {', '.join(_FORMATS)}")

    async def whole(self) -> str:
        """Embed and return the response as JSON."""
        found = await self.engine.embed(self._texts, **self._asked, **self.limits)
        write = partial(_written, is_packed=self._format == "base64")
        entries = await map_in_pieces(write, [*enumerate(found)], at_once=1)
        count = sum(one.num_prompt_tokens for one in found)
        rest = encode({"model": self.served.name, "usage": {"prompt_tokens": count, "total_tokens": count}})
        return f'{{"object":"list","data":[{",".join(entries)}],{rest[1:]}'


def _written(placed: tuple[int, Embedding], *, is_packed: bool) -> str:
    """Return one entry of a response; packed vectors are float32 with the lowest byte first, as clients read them."""
    place, one = placed
    vector: str | Sequence[float] = (
        base64.b64encode(one.vector.astype(np.dtype("<f4")).tobytes()).decode() if is_packed else one.vector.tolist())
    return encode({"object": "embedding", "index": place, "embedding": vector})
