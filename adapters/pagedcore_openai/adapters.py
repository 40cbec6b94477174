"""Adapters over HTTP: a model's name may have one behind a colon, and the admin key may load and unload them.

Names and bodies are vLLM's, ``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``. A body names a directory below
one of the operator's roots; without roots there are no such routes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, ClassVar, Final

from starlette.requests import Request
from starlette.responses import Response

from pagedcore.errors import InvalidAdapter, InvalidConfig, InvalidRequest
from pagedcore_http.events import encode
from pagedcore_http.refusals import RefusedAtTheDoor
from pagedcore_openai import fields as known
from pagedcore_openai.calls import ServedModel
from pagedcore_openai.endpoints import JSON, Endpoint

_FORM: Final = known.Form(frozenset({"lora_name", "lora_path", "load_inplace", "model"}),
                          ignored=frozenset({"base_model_name", "lora_int_id"}))


def roots_of(given: Collection[str]) -> tuple[Path, ...]:
    """Return the directories below which adapters may be. Raises ``InvalidConfig`` for one that is not there."""
    roots = tuple(Path(os.path.realpath(one)) for one in given)
    if missing := [place for place, root in enumerate(roots, start=1) if not root.is_dir()]:
        raise InvalidConfig(f"adapter_roots: number {missing[0]} is no directory.")
    return roots


def below_roots(path: object, roots: Collection[Path]) -> Path:
    """Return the directory that a body names, links followed. Raises ``InvalidAdapter`` unless it is below a root."""
    if not isinstance(path, str) or not path:
        raise InvalidAdapter("lora_path", path, "the path of a directory below an adapter root")
    for root in roots:
        # Why these functions: they raise nothing for a name that is too long or no text, or for links in a circle.
        if os.path.isdir(root / path):
            # Safety: links are followed first, so that none leads out of the root.
            place = Path(os.path.realpath(root / path))
            if place != root and place.is_relative_to(root):
                return place
    # Safety: the same for what is not there and what is elsewhere, so that nothing is told of other files.
    raise InvalidAdapter("lora_path", path, "a directory below an adapter root", "The operator names the roots.")


class ChangesAdapters(Endpoint):
    """What both endpoints have in common."""

    is_for_admins: ClassVar = True

    def read(self, body: Mapping[str, Any], tenant: bytes | None) -> tuple[dict[str, Any], ServedModel, str]:
        """Return the fields, the model, and the adapter's name."""
        fields = _FORM.read(body)
        name = known.required(fields, "lora_name", "the name of an adapter")
        if not isinstance(name, str):
            raise InvalidRequest("lora_name", name, "text")
        return fields, self.service.model_of(fields, tenant), name


class LoadAdapter(ChangesAdapters):
    """Loads an adapter."""

    async def respond(self, request: Request, tenant: bytes | None) -> Response:
        """Return what was loaded. Raises ``RefusedAtTheDoor`` for a name that is taken, without ``load_inplace``."""
        fields, served, name = self.read(await self.service.read_body(request), tenant)
        if name in served.engine.adapter_names and not known.flag(fields, "load_inplace"):
            raise RefusedAtTheDoor(HTTPStatus.BAD_REQUEST, "lora_name", "a name that is taken", "another one",
                                   "With load_inplace: true, it stands for this adapter afterwards.",
                                   is_described=True)
        path = await asyncio.to_thread(below_roots, fields.get("lora_path"), self.service.adapter_roots)
        shown = await served.engine.load_adapter(name, path)
        return Response(encode({"id": shown.name, "object": "model", "parent": served.name, "digest": shown.digest,
                                "num_bytes": shown.num_bytes}), media_type=JSON)


class UnloadAdapter(ChangesAdapters):
    """Unloads an adapter."""

    async def respond(self, request: Request, tenant: bytes | None) -> Response:
        """Return that it is gone."""
        _, served, name = self.read(await self.service.read_body(request), tenant)
        await served.engine.unload_adapter(name)
        return Response(encode({"id": name, "object": "model", "deleted": True}), media_type=JSON)
