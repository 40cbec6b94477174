"""An adapter that pagedcore knows nothing of: ``expose("wsgi", model="demo")`` is a WSGI application."""

from pagedcore import AsyncEngine, SamplingParams
from pagedcore.errors import InvalidRequest, PagedcoreError
from pagedcore.plugins.hookspecs import hookimpl

MAX_BYTES = 16_384


@hookimpl
def pagedcore_register(registry):
    """Add this adapter by name; ``create`` is imported when it is first used."""
    registry.adapters.add("wsgi", "pagedcore_wsgi:create", summary="POST a prompt, read the answer as it comes")


def create(model, *, max_tokens=64, **settings):
    """Build an engine and return the application; ``application.engine`` is there to be closed."""
    return Application(AsyncEngine.from_pretrained(model, **settings), SamplingParams(max_tokens=max_tokens))


class Application:
    """The WSGI callable: one thread of the server per request, one batch for all of them."""

    def __init__(self, engine, params):
        self.engine, self.params = engine, params

    def __call__(self, environ, start_response):
        """Answer the body of a POST; a client that leaves closes the generator, which aborts its request."""
        length = int(environ.get("CONTENT_LENGTH") or 0)
        if environ["REQUEST_METHOD"] != "POST" or not 0 < length <= MAX_BYTES:
            start_response("400 Bad Request", [("Content-Type", "text/plain")])
            return [b"POST a prompt of 1 to 16384 bytes\n"]
        prompt = environ["wsgi.input"].read(length).decode("utf-8", "replace")
        deltas = self.engine.generate_sync(prompt, self.params)
        try:
            first = next(deltas)  # Why: by then the engine has taken the request or said why not.
        except PagedcoreError as error:
            status = "400 Bad Request" if isinstance(error, InvalidRequest) else "503 Service Unavailable"
            start_response(status, [("Content-Type", "text/plain")])
            return [f"{error}\n".encode()]
        start_response("200 OK", [("Content-Type", "text/plain; charset=utf-8")])
        return (delta.text.encode() for part in ((first,), deltas) for delta in part)
