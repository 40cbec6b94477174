"""What endpoints of a subclass get without saying so: refusals with their status, disconnects, the drain.

BentoML makes 500 of every error that is not its own, and ends a stream that failed as one that is complete.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager, nullcontext
from typing import Any, Final

import attrs
import bentoml
from bentoml.exceptions import BentoMLException
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from pagedcore.errors import PagedcoreError
from pagedcore_bentoml.tenants import current_request
from pagedcore_http.drain import OpenCalls
from pagedcore_http.event_stream import ClientGone, TextStream, run_until_disconnect
from pagedcore_http.refusals import CLIENT_CLOSED_REQUEST, Refusal, refusal_of

_ADAPTED: Final = "__pagedcore_adapted__"
_OWN: Final = "pagedcore_bentoml.own_endpoint"
_BATCHED: Final = "pagedcore_bentoml.batched"
"""Where a request's scope says what kind of endpoint of a subclass answers it."""


def is_answered(request: Request | None) -> bool:
    """Whether an endpoint of a subclass answers a call, counts it for the drain and turns errors into statuses."""
    return request is not None and _OWN in request.scope


def is_batched(request: Request) -> bool:
    """Whether a ``batchable`` endpoint answers a call together with those of other clients."""
    return _BATCHED in request.scope


@contextmanager
def counted(open_calls: OpenCalls, request: Request | None) -> Iterator[None]:
    """Count a completion as a call in flight, unless it belongs to one that is counted.

    Raises:
        NotServing: the service drains.
    """
    if is_answered(request):
        yield
        return
    with open_calls.call():
        yield


@contextmanager
def _answering(open_calls: OpenCalls, request: Request | None) -> Iterator[None]:
    with counted(open_calls, request) if request is not None else nullcontext():
        if request is not None:
            request.scope[_OWN] = True
        yield


def adapt_endpoints(cls: type, base: type) -> None:
    """Replace the endpoints of ``cls`` that are not those of ``base`` by ones that answer as those of ``base`` do."""
    kind = type(inspect.getattr_static(base, "generate"))
    for name in dir(cls):
        method = inspect.getattr_static(cls, name)
        is_own = isinstance(method, kind) and method is not inspect.getattr_static(base, name, None)
        if is_own and not hasattr(method.func, _ADAPTED):
            setattr(cls, name, _adapted(method))


def _adapted(method: Any) -> Any:
    function, changes = method.func, {}
    if method.batchable:
        made = _of_batch(function)
    elif inspect.isasyncgenfunction(function):
        made, changes = _of_stream(function), {"output_spec": _streamed(method.output_spec)}
    elif inspect.iscoroutinefunction(function):
        made = _of_whole(function, is_watched=not method.is_task)
    elif inspect.isgeneratorfunction(function):
        return method
    else:
        made = _of_thread(function)
    setattr(made, _ADAPTED, True)
    return attrs.evolve(method, func=made, **changes)


def _of_batch(function: Callable[..., Any]) -> Callable[..., Any]:
    if not inspect.iscoroutinefunction(function):
        return functools.wraps(function)(lambda self, *args, **keywords: _marked(function, self, args, keywords))

    @functools.wraps(function)
    async def batch(self: Any, *args: Any, **keywords: Any) -> Any:
        return await _marked(function, self, args, keywords)

    return batch


def _marked(function: Callable[..., Any], self: Any, args: Any, keywords: Any) -> Any:
    # Safety: BentoML runs a batch in the context of one of its calls, which is not that of the others.
    if (request := current_request()) is not None:
        request.scope[_BATCHED] = True
    return function(self, *args, **keywords)


def _of_whole(function: Callable[..., Any], is_watched: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    async def whole(self: Any, *args: Any, **keywords: Any) -> Any:
        request = current_request()
        if request is None or is_answered(request):
            return await function(self, *args, **keywords)
        try:
            with _answering(self.open_calls, request):
                work = function(self, *args, **keywords)
                # Why: a task outlives the call that has submitted it.
                return await (run_until_disconnect(request.receive, work) if is_watched else work)
        except ClientGone:
            return _answer(Response(status_code=CLIENT_CLOSED_REQUEST))
        except (PagedcoreError, HTTPException) as error:
            return _answer(refusal_of(error).response())

    return whole


def _of_thread(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def whole(self: Any, *args: Any, **keywords: Any) -> Any:
        try:
            return function(self, *args, **keywords)
        except (PagedcoreError, HTTPException) as error:
            if current_request() is None:
                raise
            return _answer(refusal_of(error).response())

    return whole


def _of_stream(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def stream(self: Any, *args: Any, **keywords: Any) -> AsyncGenerator[Any, None]:
        with _answering(self.open_calls, current_request()):
            async with aclosing(function(self, *args, **keywords)) as items:
                async for item in items:
                    yield item

    return stream


def _answer(response: Response) -> Response:
    # Why: BentoML gives a response the status of the context.
    bentoml.Context().response.status_code = response.status_code
    return response


class OwnStream(TextStream):
    """Sends what an endpoint yields."""

    def refusal_of(self, error: Exception) -> Refusal:
        """Return what is sent for an error, BentoML's own among them."""
        return refusal_of(HTTPException(error.error_code, str(error)) if isinstance(error, BentoMLException) else error)


def _streamed(spec: Any) -> Any:
    """Return the output of an endpoint that streams, sent by ``OwnStream`` unless it has a way of its own."""
    if spec.to_http_response.__func__ is not bentoml.IODescriptor.to_http_response.__func__:
        return spec

    async def to_http_response(cls: Any, items: AsyncGenerator[Any, None], serde: Any) -> Response:
        return OwnStream(_pieces(cls, items, serde), cls.mime_type())

    return type(spec.__name__, (spec,), {"__module__": spec.__module__, "__doc__": spec.__doc__,
                                         "to_http_response": classmethod(to_http_response)})


async def _pieces(spec: Any, items: AsyncGenerator[Any, None], serde: Any) -> AsyncGenerator[Any, None]:
    async with aclosing(items):
        async for item in items:
            if isinstance(item, str | bytes):
                yield item
                continue
            model = spec(item) if "root" in spec.model_fields else item
            for piece in serde.serialize_model(model).data:
                yield piece
