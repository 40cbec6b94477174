"""Laws of the generators behind the demo model's questions, and of the questions that are shipped."""

import ast
import json
import operator
from fractions import Fraction
from random import Random
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from examples.demo_model.conversations import IGNORED, ConversationSource
from examples.demo_model.facts import CAPITALS, DAYS, MONTH_DAYS, OTHER_NAMES
from examples.demo_model.objects import OBJECT_TASKS, schema_of
from examples.demo_model.shipped_questions import NUM_ROUNDS, as_json, draw_questions
from examples.demo_model.tasks import TASKS, draw, is_held_out
from examples.demo_model.tools import KINDS, Tool, ToolDraft, call_text, draw_call, draw_tools, tools_message
from examples.demo_model.words import WORDS
from pagedcore.demo_model import DEMO_MODEL_DIR
from pagedcore.demo_model.questions import CHECKED_TASKS, Split, demo_questions


def test_the_shipped_questions_are_those_of_the_generators() -> None:
    """The data file is what the generators write, to the byte, and seed 0 gives its questions in their order."""
    assert (DEMO_MODEL_DIR / "questions.json").read_text(encoding="utf-8") == as_json()
    for split, num_rounds in NUM_ROUNDS.items():
        drawn = draw_questions(num_rounds, split)
        assert demo_questions(len(drawn), split=split) == drawn


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_shipped_splits_hold_only_their_side(split: Split) -> None:
    """A shipped held-out question was never trained, and a trained one is not held out; small talk is on both sides."""
    other: Split = "train" if split == "held_out" else "held_out"
    other_side = {question.prompt for question in draw_questions(60, other) if question.task != "talk"}
    own = demo_questions(NUM_ROUNDS[split] * len(CHECKED_TASKS), split=split)
    assert not other_side & {question.prompt for question in own}


def test_checked_tasks_are_all_but_the_large_sums() -> None:
    """The package's list of tasks is the generators', less the sums of three digits that the model gets wrong."""
    assert list(CHECKED_TASKS) == [name for name in TASKS if not name.endswith("_three_digits")]


@pytest.mark.parametrize("name", [*TASKS, *OBJECT_TASKS])
def test_train_and_held_out_never_share_a_key(name: str) -> None:
    """A question drawn for one split is not in the other, and both splits have questions."""
    task = (TASKS | OBJECT_TASKS)[name]
    for maker in filter(None, (task.make, task.follow_up)):
        rng = Random(1)
        trained = {draw(maker, rng, "train").key for _ in range(200)} - {None}
        kept_out = {draw(maker, rng, "held_out").key for _ in range(200)} - {None}
        assert not trained & kept_out
        assert all(key is not None and is_held_out(key) for key in kept_out)


def test_mirrored_addition_is_in_the_same_split() -> None:
    """Training on 45 + 27 while keeping 27 + 45 out would give the answer away."""
    rng = Random(2)
    keys = {draw(TASKS["add"].make, rng).key for _ in range(2000)}
    pairs = [key.split("+") for key in keys if key]
    assert all(int(low) <= int(high) for low, high in pairs)


@pytest.mark.parametrize("name", ["add", "subtract", "add_three_digits", "subtract_three_digits"])
def test_sums_are_right(name: str) -> None:
    """The answer of every sum agrees with integer arithmetic."""
    rng = Random(3)
    for _ in range(300):
        left, right = draw(TASKS[name].make, rng).answer.rstrip(".").split(" = ")
        a, op, b = left.split()
        assert int(right) == (int(a) + int(b) if op == "+" else int(a) - int(b))


def test_word_answers_are_right() -> None:
    """Sorting, reversing and spelling agree with what Python says about the words in the prompt."""
    rng = Random(4)
    for _ in range(200):
        given = _listed(draw(TASKS["sort"].make, rng).prompt)
        again = _listed(draw(TASKS["sort"].make, rng).answer)
        assert set(given) <= set(WORDS)
        assert again == sorted(again)
        assert draw(TASKS["spell"].make, rng).answer.replace(" ", "") in WORDS
        assert draw(TASKS["spell_backwards"].make, rng).answer.replace(" ", "")[::-1] in WORDS


def test_tables_are_whole() -> None:
    """There are 195 countries with 195 different capitals, 7 days, 12 months, and sorted words."""
    assert (len(CAPITALS), len(set(CAPITALS.values())), len(DAYS), len(MONTH_DAYS)) == (195, 195, 7, 12)
    assert set(OTHER_NAMES) <= set(CAPITALS)
    assert list(WORDS) == sorted(set(WORDS))


@pytest.mark.parametrize("name", OBJECT_TASKS)
def test_objects_are_right_and_spaced_as_json_dumps(name: str) -> None:
    """An answer is the text that `json.dumps` gives, with true values, and names the keys that the question names."""
    rng = Random(5)
    for _ in range(300):
        draft = draw(OBJECT_TASKS[name].make, rng)
        fields = json.loads(draft.answer)
        assert draft.answer == json.dumps(fields)
        assert _is_true(name, draft.prompt, fields), draft
        keys = draft.prompt.partition(" with ")[2].rstrip(".").replace(" and ", ", ")
        assert not keys.replace("JSON", "") or keys in ("JSON", ", ".join(fields)), draft


def _is_true(task: str, prompt: str, fields: dict[str, Any]) -> bool:
    """Whether an object's values are true, by Python's own arithmetic, the table of capitals and the question."""
    if task == "json_add":
        (total,) = (value for key, value in fields.items() if key not in ("a", "b"))
        return bool(total == fields["a"] + fields["b"])
    if task == "json_capital":
        return any(CAPITALS.get(the + fields["country"]) == fields["capital"] for the in ("", "the "))
    if task == "json_word":
        return fields["reversed"] == fields["word"][::-1] and fields["word"] in WORDS
    if task == "json_person":
        return all(str(value) in prompt for value in fields.values())
    low, high = fields["numbers"][0], fields["numbers"][-1]
    return fields["numbers"] == list(range(low, high + 1)) and f"{low} to {high}" in prompt


def test_a_schema_names_the_properties_in_the_answer_s_order() -> None:
    """The schema of an answer admits its keys in their order with the types of its values, and no others."""
    schema = schema_of('{"name": "Anna", "age": 3, "numbers": [1, 2]}')
    assert list(schema["properties"]) == schema["required"] == ["name", "age", "numbers"]
    assert [one["type"] for one in schema["properties"].values()] == ["string", "integer", "array"]
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize("kind", KINDS)
def test_calls_are_json_for_the_listed_tool(kind: str) -> None:
    """A call names its tool, fills each argument with a value of the question, and its answer has the result."""
    rng = Random(6)
    for _ in range(200):
        tool, draft = _drawn(kind, rng)
        call = json.loads(draft.call.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
        assert draft.call == call_text(tool.name, call["arguments"])
        assert list(call["arguments"]) == [name for name, _ in tool.arguments]
        types = {"integer": int, "string": str}
        assert all(isinstance(call["arguments"][name], types[written]) for name, written in tool.arguments)
        assert (json.loads(draft.result)["result"] if draft.result.startswith("{") else draft.result) in draft.answer


def test_calculations_are_right_and_their_numbers_stand_in_the_question() -> None:
    """What the calculator returns agrees with Python to four places, for every sign."""
    rng, signs = Random(7), set()
    for _ in range(400):
        _, draft = _drawn("calculator", rng)
        expression, result = draft.answer.removesuffix(".").split(" = ")
        assert float(result) == pytest.approx(float(_evaluated(ast.parse(expression, mode="eval").body)), abs=5e-5)
        assert all(number in draft.prompt for number in expression.split()[::2])
        signs |= set(expression) & set("+-*/")
    assert signs == set("+-*/")


def _evaluated(node: ast.expr) -> Fraction:
    """The exact value of an expression as Python's own parser reads it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return Fraction(node.value)
    assert isinstance(node, ast.BinOp)
    by_sign = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
    value: Fraction = by_sign[type(node.op)](_evaluated(node.left), _evaluated(node.right))
    return value


def test_a_tool_list_has_different_names_and_what_is_needed() -> None:
    """Each list has one to three tools of different names, and the needed kinds."""
    rng = Random(8)
    for _ in range(200):
        tools = draw_tools(rng, "calculator")
        names = [tool.name for tool in tools]
        assert 1 <= len(names) <= 3
        assert len(set(names)) == len(names)
        assert [tool.kind for tool in tools].count("calculator") == 1


def test_tools_stand_in_the_rows_as_the_chat_template_writes_them() -> None:
    """The list of tools that training shows is to the letter what `apply_chat_template(tools=...)` renders."""
    tokenizer, rng = PreTrainedTokenizerFast.from_pretrained(DEMO_MODEL_DIR), Random(9)
    for system in ("", "You are a test."):
        tools = draw_tools(rng, "calculator", "any")
        messages = [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": "U"}]
        text = tokenizer.apply_chat_template(messages, tools=[tool.spec() for tool in tools], tokenize=False)
        listed = f"<|im_start|>system\n{tools_message(tools, system)}<|im_end|>\n"
        assert text == f"{listed}<|im_start|>user\nU<|im_end|>\n"


def test_rows_with_tools_learn_calls_and_answers_only() -> None:
    """Of a conversation with tools exactly the assistant's messages are learned, each with its end, in full rows."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(DEMO_MODEL_DIR)
    source = ConversationSource(tokenizer, dict.fromkeys([*TASKS, *OBJECT_TASKS], 1.0), seed=1)
    calls = 0
    for ids, targets in zip(*source.batch(40, 384, tools=1.0), strict=True):
        text = tokenizer.decode(ids).split("<|endoftext|>")[0]
        said = [part.partition("<|im_end|>")[0] for part in text.split("<|im_start|>assistant\n")[1:]]
        learned = tokenizer.decode([token for token in targets.tolist() if token != IGNORED])
        if text.startswith("<|im_start|>system") and "# Tools" in text:
            assert learned == "".join(f"{reply}<|im_end|>" for reply in said)
            calls += learned.count("<tool_call>")
    assert calls > 40


def _drawn(kind: str, rng: Random) -> tuple[Tool, ToolDraft]:
    tool = next(tool for tool in draw_tools(rng, kind) if tool.kind == kind)
    return tool, draw_call(tool, rng, again=rng.random() < 0.2)


def _listed(text: str) -> list[str]:
    """Words of the comma-separated list at the end of a prompt or an answer."""
    parts = text.rstrip(".").split(", ")
    return [parts[0].split()[-1], *parts[1:]]
