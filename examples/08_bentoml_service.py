"""A BentoML service around an engine. Serve it with ``bentoml serve 08_bentoml_service:LLM``; run it to see it answer.

Run as a script it starts the service in this process, as BentoML does in its workers, and asks it over its own HTTP
interface, without a port. Needs ``pip install pagedcore[bentoml]``.
"""

import asyncio

import bentoml
import httpx

from pagedcore_bentoml import EventParser, PagedCoreRunner


@bentoml.service(traffic={"timeout": 300}, workers=1)
class LLM(PagedCoreRunner):
    """The demo model, with an endpoint of its own beside the four that the base class has."""

    model = "demo"
    settings = {"num_kv_blocks": 128}  # noqa: RUF012

    @bentoml.api
    async def add(self, left: int, right: int, ctx: bentoml.Context) -> str:
        """Ask for the caller, whom ``ctx`` tells: with its tenant, its priority, and until it leaves."""
        output = await self.complete(ctx, f"What is {left} + {right}?")
        return output.outputs[0].text.strip()


async def main() -> None:
    """Ask for a whole answer, a stream, something that is refused, and the service's own endpoint."""
    app = LLM.to_asgi()
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://llm") as http:
        whole = await http.post("/generate", json={"prompt": "What is 2 + 3?", "sampling": {"max_tokens": 32}})
        print("whole:", whole.json()["outputs"][0]["text"].strip())

        stream = await http.post("/stream", json={"prompt": "What is 9 - 5?"})
        events = EventParser().feed(stream.text)
        print("stream:", [event.data["text"] for event in events if not event.name], events[-1].data["usage"])

        refused = await http.post("/generate", json={"prompt": "x", "sampling": {"temperature": 99}})
        print("refused:", refused.status_code, refused.json()["error"]["message"])

        print("its own:", (await http.post("/add", json={"left": 12, "right": 30})).text)
        print("ready:", (await http.get("/readyz")).status_code)


if __name__ == "__main__":
    asyncio.run(main())
