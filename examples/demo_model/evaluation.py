"""Accuracy of a model on questions it was not trained on, by greedy decoding.

Owns the ways a question is asked (plain, chat, after other turns, beside tools) and the report; verdicts on questions
without a form come from `pagedcore.demo_model.questions`.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from random import Random

import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from pagedcore.demo_model.questions import DemoQuestion, is_correct

from .objects import OBJECT_TASKS, schema_of
from .tasks import TASKS, Draft, Task, draw
from .tokenizer import END_OF_MESSAGE
from .tools import CALL_END, CALL_START, Tool, draw_call, draw_tools

FORMS = ("plain", "chat", "plain_later", "chat_later", "plain_follow_up", "chat_follow_up")
"""Ways to ask: alone, after three other turns, or as a short question after one of its kind."""

Figure = dict[str, int]
"""How many `questions` were asked and how many answers were `right`."""

LONGEST_ANSWER = 60
LONGEST_CALL = 100
_BATCH = 128


def accuracy(
    ask: Callable[[list[str]], list[str]],
    tokenizer: PreTrainedTokenizerFast,
    forms: Sequence[str],
    questions: int,
    seed: int,
    tasks: Mapping[str, Task] = TASKS,
) -> dict[str, dict[str, Figure]]:
    """Return the number of right answers by task, then by form, of `questions` different ones, all held out.

    `ask` continues prompts. Tasks that have fewer different questions are asked all that so many draws give.
    """
    asked = {
        (form, prompt): question
        for task in tasks.values()
        for form in forms
        if task.follow_up is not None or not form.endswith("follow_up")
        for prompt, question in _different(task, form, questions, seed, tokenizer).items()
    }
    texts = ask([prompt for _, prompt in asked])
    figures: dict[str, dict[str, Figure]] = {name: {} for name in tasks}
    for ((form, _), question), text in zip(asked.items(), texts, strict=True):
        figure = figures[question.task].setdefault(form, {"right": 0, "questions": 0})
        figure["right"] += is_correct(question, text)
        figure["questions"] += 1
    return figures


def share_right(figures: Iterable[Figure]) -> float:
    """Return the share of right answers among all questions of some figures."""
    listed = list(figures)
    return sum(figure["right"] for figure in listed) / sum(figure["questions"] for figure in listed)


def _different(
    task: Task, form: str, questions: int, seed: int, tokenizer: PreTrainedTokenizerFast
) -> dict[str, DemoQuestion]:
    """Write questions with their whole prompts until there are enough different ones, or the draws are used up."""
    written: dict[str, DemoQuestion] = {}
    for number in range(2 * questions):
        prompt, question = _ask(task, form, Random(f"{seed} {task.name} {form} {number}"), tokenizer)
        written[prompt] = question
        if len(written) == questions:
            break
    return written


@torch.inference_mode()
def answers(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[str], longest: int = LONGEST_ANSWER
) -> list[str]:
    """Continue each prompt greedily and return the new text without special tokens."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    texts = [""] * len(prompts)
    for start in range(0, len(order), _BATCH):
        indices = order[start : start + _BATCH]
        batch = tokenizer([prompts[index] for index in indices], return_tensors="pt", padding=True)
        batch = batch.to(model.device)
        output = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=longest,
            do_sample=False,
        )
        new = output[:, batch["input_ids"].shape[1] :]
        for index, text in zip(indices, tokenizer.batch_decode(new, skip_special_tokens=True), strict=True):
            texts[index] = text
    return texts


def _ask(task: Task, form: str, rng: Random, tokenizer: PreTrainedTokenizerFast) -> tuple[str, DemoQuestion]:
    """Write one held-out question of `task` in `form`, with the turns that come before it."""
    earlier: list[Draft] = []
    maker = task.make
    if form.endswith("_later"):
        earlier = [draw(rng.choice(list(TASKS.values())).make, rng, "train") for _ in range(3)]
    elif form.endswith("_follow_up"):
        earlier = [draw(task.make, rng, "train")]
        maker = task.follow_up or task.make
    draft = draw(maker, rng, "held_out")
    prompt = _plain(earlier, draft) if form.startswith("plain") else _chat(earlier, draft, tokenizer)
    return prompt, DemoQuestion(draft.prompt, draft.answer, task.name)


def _plain(earlier: list[Draft], last: Draft) -> str:
    turns = [f"{draft.prompt}\n{draft.answer}{END_OF_MESSAGE}\n" for draft in earlier]
    return "".join(turns) + last.prompt


def _chat(earlier: list[Draft], last: Draft, tokenizer: PreTrainedTokenizerFast) -> str:
    messages = []
    for draft in earlier:
        messages.append({"role": "user", "content": draft.prompt})
        messages.append({"role": "assistant", "content": draft.answer})
    messages.append({"role": "user", "content": last.prompt})
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text


@dataclass(frozen=True)
class FormedQuestion:
    """A chat whose next message has a form: a tool's call or an object of a schema.

    `prompt` is the conversation as the chat template renders it, `kind` the name under which figures are counted, and
    `structured` the form as `SamplingParams` takes it, None for a message in words.
    """

    kind: str
    prompt: str
    expected: str
    structured: dict[str, object] | None


def tool_questions(
    count: int, seed: int, tokenizer: PreTrainedTokenizerFast, kind: str = "calculator"
) -> list[FormedQuestion]:
    """Write `count` held-out questions for a tool of `kind`, each twice: before the call and after the result."""
    written: list[FormedQuestion] = []
    for number in range(count):
        rng = Random(f"{seed} {kind} {number}")
        tools = draw_tools(rng, kind)
        tool = next(tool for tool in tools if tool.kind == kind)
        draft = draw_call(tool, rng, "held_out")
        asked = [{"role": "user", "content": draft.prompt}]
        called = [*asked, {"role": "assistant", "content": draft.call}, {"role": "tool", "content": draft.result}]
        form: dict[str, object] = {"lark": call_grammar(tools)}
        for messages, expected, structured in ((asked, draft.call, form), (called, draft.answer, None)):
            prompt = tokenizer.apply_chat_template(
                messages, tools=[one.spec() for one in tools], tokenize=False, add_generation_prompt=True
            )
            named = f"{kind} {'call' if structured else 'answer'}"
            written.append(FormedQuestion(named, str(prompt), expected, structured))
    return written


def object_questions(count: int, seed: int, tokenizer: PreTrainedTokenizerFast) -> list[FormedQuestion]:
    """Write `count` held-out questions that want an object, of all such tasks in turn."""
    written: list[FormedQuestion] = []
    for number, task in zip(range(count), cycle(OBJECT_TASKS.values())):
        draft = draw(task.make, Random(f"{seed} {task.name} {number}"), "held_out")
        prompt = _chat([], draft, tokenizer)
        written.append(FormedQuestion(task.name, prompt, draft.answer, {"json_schema": schema_of(draft.answer)}))
    return written


def call_grammar(tools: Sequence[Tool]) -> str:
    """Return the grammar, in Lark, of a message that calls one of `tools`."""
    calls = {"anyOf": [tool.call_schema() for tool in tools]}
    start, end = json.dumps(CALL_START), json.dumps(CALL_END)
    return f"start: {start} call {end}\ncall: %json {json.dumps(calls)}"


def formed_accuracy(
    ask: Callable[[list[FormedQuestion]], list[str]], questions: list[FormedQuestion]
) -> dict[str, Figure]:
    """Return the number of right messages by kind; every character counts."""
    figures: dict[str, Figure] = {}
    for question, text in zip(questions, ask(questions), strict=True):
        figure = figures.setdefault(question.kind, {"right": 0, "questions": 0})
        figure["right"] += text.strip() == question.expected
        figure["questions"] += 1
    return figures
