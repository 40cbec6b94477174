"""OpenAI's HTTP interface as a part of a web application of one's own, called with OpenAI's own client.

``pagedcore serve demo`` does the same in a process of its own. Here the engine and its tenants are the application's:
it opens and closes the engine, and says whose cache a call belongs to. Needs ``pip install pagedcore[openai] openai``.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from openai import AsyncOpenAI, BadRequestError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount

from pagedcore import AsyncEngine
from pagedcore_openai import openai_app


def tenant_of(request: Request) -> str:
    """Whose cache a call uses; here of a header that a gateway sets."""
    return request.headers.get("x-tenant", "nobody")


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    """Open the engine, mount the door, and in the end let calls in flight finish."""
    async with AsyncEngine.from_pretrained("demo", num_kv_blocks=256) as engine:
        door = openai_app(engine, name="demo", salt_of=tenant_of)
        app.mount("/llm", door)
        yield
        print("calls left after the drain:", await door.drain())


async def main() -> None:
    """Ask over the application's own interface, without a port."""
    app = Starlette(routes=[Mount("/static", Starlette())], lifespan=lifespan)
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app), headers={"x-tenant": "one"})
    async with app.router.lifespan_context(app):
        client = AsyncOpenAI(base_url="http://app/llm/v1", api_key="none", http_client=http)
        print("models:", [model.id async for model in client.models.list()])
        messages = [{"role": "user", "content": "What is 2 + 3?"}]
        whole = await client.chat.completions.create(model="demo", messages=messages, temperature=0)
        print("whole:", whole.choices[0].message.content, whole.usage.total_tokens, "tokens")

        chunks = await client.chat.completions.create(model="demo", messages=messages, temperature=0, stream=True)
        print("stream:", "".join([chunk.choices[0].delta.content or "" async for chunk in chunks]))

        try:
            await client.chat.completions.create(model="demo", messages=messages, temperature=99)
        except BadRequestError as refused:
            print("refused:", refused.param, refused.message)


if __name__ == "__main__":
    asyncio.run(main())
