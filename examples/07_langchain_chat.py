"""A streaming LangChain chat with history: the whole conversation is sent with every turn.

Nothing is kept in the model object. How many of the history's tokens were still in the engine's cache is in
``usage_metadata["input_token_details"]["cache_read"]``. Needs ``pip install pagedcore[langchain]``.
"""

import asyncio
from contextlib import aclosing

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage

from pagedcore_langchain import ChatPagedCore


async def turn(chat: ChatPagedCore, history: list[BaseMessage], text: str) -> None:
    """Stream one answer, and add question and answer to the history."""
    history.append(HumanMessage(text))
    print(f"you> {text}\nmodel> ", end="")
    answer = None
    # aclosing: leaving this loop early aborts the request at once.
    async with aclosing(chat.astream(history)) as chunks:
        async for chunk in chunks:
            print(chunk.content, end="", flush=True)
            answer = chunk if answer is None else answer + chunk
    usage = answer.usage_metadata
    cached = usage["input_token_details"]["cache_read"]
    print(f"\n       [{usage['input_tokens']} tokens in, {cached} of them cached; {usage['output_tokens']} out]")
    history.append(AIMessage(answer.content))


async def main() -> None:
    """Have a conversation of three turns."""
    chat = ChatPagedCore(model="demo", max_tokens=64)
    history: list[BaseMessage] = []
    for text in ("What is 2 + 3?", "What is 9 - 5?", "What is 6 + 6?"):
        await turn(chat, history, text)
    await chat.aclose()


if __name__ == "__main__":
    asyncio.run(main())
