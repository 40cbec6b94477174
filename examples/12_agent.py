"""An agent with LangGraph: the model calls a tool, the tool's result goes back to the model, and the model answers.

The graph is LangGraph's own: a node that asks the model, one that carries its calls out, and an edge back. What a call
looks like is the engine's business: a grammar made of the tool's schema is the reason why every call can be carried
out. Needs ``pip install pagedcore[langchain,structured] langgraph``.
"""

from typing import Annotated, Literal

from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from pydantic import Field

from pagedcore_langchain import ChatPagedCore

Expression = Annotated[str, Field(pattern=r"^[0-9]{1,3} [+-] [0-9]{1,3}$")]


@tool
def calculator(expression: Expression) -> int:
    """Add or subtract two numbers."""
    left, sign, right = expression.split()
    return int(left) + int(right) if sign == "+" else int(left) - int(right)


def choice(messages: list[BaseMessage]) -> Literal["none", "required"]:
    """Say whether a call has to be made: of a question always, so that no result is guessed."""
    return "required" if isinstance(messages[-1], HumanMessage) else "none"


def main() -> None:
    """Ask the agent, and show what it does."""
    chat = ChatPagedCore(model="demo", max_tokens=96)

    def ask(state: MessagesState) -> dict[str, list[BaseMessage]]:
        messages = state["messages"]
        bound = chat.bind_tools([calculator], tool_choice=choice(messages), parallel_tool_calls=False)
        return {"messages": [bound.invoke(messages)]}

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_node("tools", ToolNode([calculator]))
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", tools_condition)
    graph.add_edge("tools", "ask")
    agent = graph.compile()

    for question in ("What is 12 + 7?", "What is 30 - 4?"):
        for message in agent.invoke({"messages": [HumanMessage(question)]})["messages"]:
            calls = [f"{call['name']}({call['args']['expression']})" for call in getattr(message, "tool_calls", ())]
            print(f"{message.type:>6}> {message.content or 'calls ' + ', '.join(calls)}")
    chat.close()


if __name__ == "__main__":
    main()
