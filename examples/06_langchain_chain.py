"""A LangChain chain over 200 inputs: prompt | model | parser; the whole batch shares one engine.

Needs ``pip install pagedcore[langchain]``.
"""

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate

from pagedcore import expose
from pagedcore.demo_model.questions import demo_questions, is_correct


def main() -> None:
    """Ask 200 questions with known answers in one blocking call, and check every answer."""
    questions = demo_questions(200)
    chat = expose("langchain", model="demo", max_tokens=96)
    chain = ChatPromptTemplate.from_messages([("human", "{question}")]) | chat | StrOutputParser()
    answers = chain.batch([{"question": question.prompt} for question in questions])

    stats = chat.engine.stats()
    num_right = sum(map(is_correct, questions, answers))
    print(f"{num_right} of {len(questions)} answers right")
    print(f"{stats.num_generated_tokens} tokens in {stats.num_steps} steps, "
          f"{stats.num_rows / stats.num_steps:.0f} sequences per step")
    chat.close()


if __name__ == "__main__":
    main()
