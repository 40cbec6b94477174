"""Where text ends and calls begin: what a model may write around them, and what a reader gets of what was cut off."""

from __future__ import annotations

import pytest

from pagedcore import Chat, SamplingParams
from support.scripted_model import TEMPLATES, scripted_engine
from tool_calls.test_chat_format import ADD, CALLS, NOW, ONE, QUESTION, SECOND, ask, calls_of

THINKING = TEMPLATES["hermes"].replace("{%- for message", "{#- </think> #}{%- for message", 1)
OPENED = THINKING.replace("assistant\\n'", "assistant\\n<think>\\n'")
OPENING = {THINKING: "", OPENED: "<think>\n"}
"""What prompts end with, so that completions lack it."""
CALL = CALLS["hermes"]


@pytest.mark.parametrize("template", ["hermes", THINKING])
@pytest.mark.parametrize("text", [
    "I write <tool_call> tags.", "<tool_call>", "The tag <tool_call>\nand </tool_call>.", "a < b", "<tool_call", "",
])
def test_a_tag_that_begins_no_call_is_text(text: str, template: str) -> None:
    """Prose may name it, at its end as well."""
    with scripted_engine(text, template) as engine:
        parsed, output = ask(engine)
        assert (output.text, parsed.content, parsed.tool_calls) == (text, text, ())


@pytest.mark.parametrize("form", CALLS)
@pytest.mark.parametrize("after", ["\n", "\n\n", " \n", "\nDone."])
@pytest.mark.parametrize("is_parallel", [True, False])
def test_after_a_call_may_come_anything(form: str, after: str, is_parallel: bool) -> None:
    """White space and text follow, and no further call is invented; further calls may follow as well."""
    with scripted_engine(CALLS[form] + after, form) as engine:
        parsed, output = ask(engine, is_parallel=is_parallel)
        assert (calls_of(parsed), output.text, output.finish_reason) == (ONE, _shown(CALLS[form] + after), "stop")
        assert parsed.content == after.strip()
    if is_parallel:
        with scripted_engine(CALLS[form] + SECOND[form] + after, form) as engine:
            parsed, _ = ask(engine)
            assert calls_of(parsed) == [*ONE, ("now", {})]


def _shown(text: str) -> str:
    return text.replace("[TOOL_CALLS]", "").replace("[ARGS]", "")


@pytest.mark.parametrize("form", CALLS)
def test_white_space_may_follow_a_call_that_was_demanded(form: str) -> None:
    """It does not begin another call."""
    with scripted_engine(CALLS[form] + "\n", form) as engine:
        parsed, output = ask(engine, choice="required")
        assert (calls_of(parsed), output.finish_reason) == (ONE, "stop")


@pytest.mark.parametrize("thought", [
    "The tag <tool_call> is used. Ok.", 'I might write <tool_call>\n{"name": "add"} or <tool_call>{"name": 1', "",
])
@pytest.mark.parametrize("rest", ["The answer.", CALL, "First " + CALL])
@pytest.mark.parametrize("template", [THINKING, OPENED])
def test_what_is_thought_of_calls_begins_none(thought: str, rest: str, template: str) -> None:
    """Calls begin after the reasoning, wherever that began."""
    script = f"<think>\n{thought}\n</think>\n\n{rest}"
    with scripted_engine(script, template) as engine:
        parsed, output = ask(engine, max_tokens=200)
        assert (output.text, parsed.reasoning) == (script.removeprefix(OPENING[template]), thought)
        assert (calls_of(parsed), parsed.content) == ((ONE if CALL in rest else []), rest.replace(CALL, "").strip())


@pytest.mark.parametrize("template", [THINKING, OPENED])
def test_reasoning_may_end_the_completion(template: str) -> None:
    """A model that stops while it thinks is not made to go on."""
    script = "<think>\nI do not know"
    with scripted_engine(script, template) as engine:
        parsed, output = ask(engine)
        assert (output.text, output.finish_reason) == (script.removeprefix(OPENING[template]), "stop")
        assert parsed.reasoning == "I do not know"


@pytest.mark.parametrize(("stop", "content"), [('": 1', ""), ("name", ""), ("add", "")])
def test_a_call_that_a_stop_text_cuts_off_is_none_that_ended(stop: str, content: str) -> None:
    """The reason is no "tool_calls", and what was begun of it is not shown as text."""
    with scripted_engine(CALL) as engine:
        prompt = Chat(QUESTION, [ADD, NOW])
        turn = engine.chat_format.turn(prompt, SamplingParams(max_tokens=120, stop=(stop,)))
        (output,) = engine.submit(prompt, turn.params).result(60).outputs
        reader = turn.reader()
        parsed = reader.read_all(output)
        assert (output.finish_reason, output.stop_reason, reader.reason(output)) == ("stop", stop, "stop")
        assert (parsed.content, [one.is_complete for one in parsed.tool_calls]) == (
            content, [False] if stop == '": 1' else [])


def test_a_call_that_is_cut_off_anywhere_leaves_no_markup() -> None:
    """With any number of tokens: content is empty from the tag on, and only a whole call gives the reason."""
    with scripted_engine("Well. " + CALL) as engine:
        prompt = Chat(QUESTION, [ADD, NOW])
        whole = engine.submit(prompt, engine.chat_format.turn(prompt, SamplingParams(max_tokens=120)).params).result(60)
        reasons = []
        for max_tokens in range(1, len(whole.outputs[0].token_ids) + 1):
            turn = engine.chat_format.turn(prompt, SamplingParams(max_tokens=max_tokens))
            reader, (output,) = turn.reader(), engine.submit(prompt, turn.params).result(60).outputs
            parsed = reader.read_all(output)
            assert "<tool_call>" not in parsed.content
            assert "name" not in parsed.content
            reasons.append(reader.reason(output))
        assert reasons == ["length"] * (len(reasons) - 1) + ["tool_calls"]


@pytest.mark.parametrize("template", [THINKING, OPENED])
@pytest.mark.parametrize(("stop", "content"), [("STOP", "Then "), ("\n", ""), ("plan", ""), ("</", "")])
def test_stop_texts_act_on_the_answer(template: str, stop: str, content: str) -> None:
    """What a model thinks is not cut, and neither is the end of it."""
    with scripted_engine("<think>\nplan STOP\nmore\n</think>Then STOP it.", template) as engine:
        parsed, output = ask(engine, (), stop=(stop,))
        assert (parsed.reasoning, parsed.content) == ("plan STOP\nmore", content or "Then STOP it.")
        assert output.stop_reason == (stop if stop in "Then STOP it." else None)


def test_stop_texts_act_where_nothing_is_thought() -> None:
    """A completion that only looks as if it began with reasoning is searched from its beginning."""
    with scripted_engine("<thin STOP", THINKING) as engine:
        assert ask(engine, (), stop=("STOP",))[0].content == "<thin "
    with scripted_engine("<th", THINKING) as engine:
        assert ask(engine, (), stop=("th",))[0].content == "<"


@pytest.mark.parametrize("template", [THINKING, OPENED])
def test_tokens_of_reasoning_are_counted(template: str) -> None:
    """With both marks, where the completion has them; a stream counts the same, and other text does not count."""
    for thought in ("plan\nmore", "I do not know"):
        is_whole = thought.startswith("plan")
        script = f"<think>\n{thought}" + ("\n</think>Then stop." if is_whole else "")
        with scripted_engine(script, template) as engine:
            turn = engine.chat_format.turn(QUESTION, SamplingParams(max_tokens=100))
            (output,) = engine.submit(QUESTION, turn.params).result(60).outputs
            own, whole, streamed = output.text, turn.reader(), turn.reader()
            whole.read_all(output)
            for delta in engine.generate_sync(QUESTION, turn.params):
                streamed.read(delta)
            end = own.index("</think>") + len("</think>") if is_whole else len(own)
            ids = engine.encode(own[:end]) if is_whole else [one for one in output.token_ids if one != 2]
            assert whole.num_reasoning_tokens == streamed.num_reasoning_tokens
            assert abs(whole.num_reasoning_tokens - len(ids)) <= 1
    with scripted_engine("<thin air", template if template is THINKING else THINKING) as engine:
        turn = engine.chat_format.turn(QUESTION, SamplingParams(max_tokens=100))
        reader = turn.reader()
        reader.read_all(engine.submit(QUESTION, turn.params).result(60).outputs[0])
        assert reader.num_reasoning_tokens == 0
