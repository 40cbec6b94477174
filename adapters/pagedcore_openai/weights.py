"""The endpoint that gives a served model other weights, for admins, from one directory of the operator's alone."""

from __future__ import annotations

import os
import re
from http import HTTPStatus
from pathlib import Path
from typing import Any, ClassVar, Final

from starlette.requests import Request
from starlette.responses import Response

from pagedcore.errors import EngineInUse, InvalidConfig, InvalidRequest, MemoryBudgetExceeded
from pagedcore_http.events import encode
from pagedcore_http.refusals import RefusedAtTheDoor
from pagedcore_openai import fields as known
from pagedcore_openai.endpoints import JSON, Endpoint

FORM: Final = known.Form(frozenset({"model", "weights", "version", "mode", "in_place"}))
_NAME: Final = re.compile(r"[\w-][\w.-]{0,127}", re.ASCII)


class UpdateWeights(Endpoint):
    """Loads weights into a running engine, as ``AsyncEngine.new_weights``; one load at a time."""

    is_for_admins: ClassVar = True

    async def respond(self, request: Request, tenant: bytes | None) -> Response:
        """Return which weights the model has now.

        Raises:
            InvalidRequest: a field is refused, or the weights are.
            RefusedAtTheDoor: 429 while others are loaded, 400 for files that cannot be read.
        """
        given = FORM.read(await self.service.read_body(request))
        served = self.service.model_of(given, tenant)
        name = known.required(given, "weights", "a name in the directory of weights")
        place = place_of(self.service.weights_dir, name)
        way: Any = "in_place" if known.flag(given, "in_place") else "staged"
        mode = given.get("mode", "wait")
        if mode not in ("wait", "abort", "keep"):
            raise InvalidRequest("mode", mode, '"wait", "abort" or "keep"')
        await self.service.use(request, served)
        try:
            await self._load(served.engine.new_weights, place, given.get("version", place.name), mode, way)
        except EngineInUse:
            raise RefusedAtTheDoor(HTTPStatus.TOO_MANY_REQUESTS, "loads of weights", 2, "at most 1") from None
        except InvalidConfig as error:
            raise RefusedAtTheDoor(HTTPStatus.BAD_REQUEST, "weights", str(error), "weights of the model that runs",
                                   is_described=True) from None
        label, number = served.engine.weights.label, served.engine.weights.number
        return Response(encode({"model": served.name, "version": label, "number": number}), media_type=JSON)

    async def _load(self, new_weights: Any, place: Path, version: Any, mode: Any, way: Any) -> None:
        """Load, and let models sleep that nobody uses where a second copy has no room beside them."""
        shared = self.service.shared
        while True:
            try:
                async with new_weights(version, running=mode, way=way) as new:
                    await new.load(place)
                return
            except MemoryBudgetExceeded:
                if shared is None or not await shared.make_room():
                    raise


def place_of(directory: Path | None, name: Any) -> Path:
    """Return the directory or GGUF file of a name in the operator's directory. Raises ``InvalidRequest``."""
    # Safety: no name leads out of the directory, and no link in it does.
    if directory is not None and isinstance(name, str) and _NAME.fullmatch(name):
        place, parent = (Path(os.path.realpath(one)) for one in (directory / name, directory))
        if place.parent == parent and (place.is_dir() or place.suffix == ".gguf") and place.exists():
            return place
    raise InvalidRequest("weights", name, "the name of a directory, or of a GGUF file, in the directory of weights")
