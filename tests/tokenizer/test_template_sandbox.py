"""Chat templates render as transformers renders them, and one that would not end, or would fill memory, is ended."""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from pagedcore.demo_model import DEMO_MODEL_DIR
from pagedcore.errors import InvalidPrompt
from pagedcore.tokenizer import template_budget, template_sandbox
from pagedcore.tokenizer.template_budget import OverBound
from pagedcore.tokenizer.template_sandbox import render
from pagedcore.tokenizer.tokenizer import HFTokenizer
from support.text_builders import byte_level

SPECIAL = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
TOOL = {"type": "function", "function": {"name": "weather", "description": 'It\'s <b>& "é" 🙂', "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "enum": ["a", "b"]}, "days": {"type": ["integer"]}}}}}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind.\n"}, {"role": "user", "content": " hi\tthere <&> é🙂  "},
    {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [
        {"type": "function", "function": {"name": "weather", "arguments": {"city": "a", "days": 1.5, "x": None}}}]},
    {"role": "tool", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "name": "weather"},
    {"role": "user", "content": "a-b-c"},
]
DEMO = json.loads((DEMO_MODEL_DIR / "tokenizer_config.json").read_text())["chat_template"]
LANGUAGE = """
{%- macro field(name, value=1, more='') %}{{ name ~ '=' ~ value }}{{ varargs }}{{ kwargs }}{{ caller() if caller }}
{%- endmacro %}
{%- set ns = namespace(found=false, n=0, parts=[]) %}
{%- for message in messages if message.role != 'nobody' %}
  {%- if loop.first and not loop.last %}{{ loop.length }}/{{ loop.revindex }}/{{ loop.cycle('x', 'y') }}{% endif %}
  {%- if message['role'] == 'tool' %}{% continue %}{% endif %}
  {%- set ns.n = ns.n + (message.content | default('', true) | length) * 2 - 1 %}
  {%- set ns.parts = ns.parts + [message.role] %}
  {%- generation %}{{ message.role }}:{{ message.content }}{% endgeneration %}
  {%- for key, value in message.items() %}{{ key }}{{ loop.index0 }}{% if value is string %}{{ value|trim }}{% endif %}
  {%- else %}none{% endfor %}
  {%- if ns.n > 10**6 or 'zz' in (message.content or '') %}{% break %}{% endif %}
{%- endfor %}
{{ ns.parts }}{{ ns.parts|join(', ') }}{{ ns.n // 2 }}{{ ns.n % 7 }}{{ ns.n / 4 }}{{ -ns.n }}{{ 2 ** 10 }}{{ 'ab' * 3 }}
{{ '%05.1f|%s|%r' % (2.25, 'é', ['é']) }}{{ '%s'|format(1) }}{{ '{0:>6}|{x!r}'.format('a', x='b') }}
{{ messages[1].content.split()[1:] }}{{ messages[-1].content.split('-', 1) }}{{ messages[::-1][0].role }}
{{ 'a,b'.replace(',', ';') }}{{ 'x'.center(5) }}|{{ 'x'|center(5) }}|{{ 'a\tb'.expandtabs(4) }}
{{ '-'.join(['a', 'b']) }}
{{ 'A b'.lower() ~ 'a b'.title() }}{{ 'abc'.startswith(('a', 'b')) }}{{ ' a '.strip() }}{{ 'abc'|reverse }}
{{ 'x'.zfill(3) }}
{{ messages|map(attribute='role')|unique|list }}{{ messages|selectattr('role', 'equalto', 'user')|list|length }}
{{ messages|rejectattr('role', 'in', ['user', 'tool'])|map(attribute='role')|sort|join('|') }}{{ [3, 1, 2]|sort|first }}
{{ {'b': 1, 'a': {'c': (1, 2)}}|dictsort }}{{ {'b': 1}.get('b') }}{{ {'a': 1}.items()|list }}{{ dict(a=1)|tojson }}
{{ messages[1]|tojson }}{{ tools|tojson(indent=2) }}{{ tools|tojson(separators=(',', ':'), sort_keys=true) }}
{{ [1, 2, 3, 4]|batch(3, 0)|list }}{{ [1, 2, 3]|slice(2)|list }}{{ [1, 2]|sum }}{{ [[1], [2]]|sum(start=[]) }}
{{ [1, 2]|max }}
{{ 2.567|round(1) }}{{ '12'|int + 1 }}{{ 'x'|int(7) }}{{ '1.5'|float }}{{ [1, 2]|last }}{{ 'a b c'|wordcount }}
{{ 'z'|upper }}
{{ 'a\nb'|indent(2, true) }}{{ 'aaa bbb ccc'|truncate(7) }}{{ 'aaa bbb'|wordwrap(3) }}{{ '<a>'|e }}
{{ '<a>'|safe ~ '<b>' }}
{{ ('<a>'|e) + '<' }}{{ '%s'|e % '<' }}{{ ('{}'|e).format('<') }}{{ '<b>x</b>'|striptags }}{{ 'é /'|urlencode }}
{{ [{'k': 1, 'v': 2}, {'k': 1, 'v': 3}]|groupby('k') }}{{ none }}{{ undefined_name }}{{ true }}{{ 1.0 }}
{{ namespace(a=1) }}
{{ 3 is odd }}{{ 4 is divisibleby(2) }}{{ 'a' is in ['a'] }}{{ 1 is sameas 1 }}{{ {} is mapping }}{{ 2 is gt 1 }}
{{ 1 < 2 <= 2 }}
{% call field('n', 2, 3, z=4) %}body{% endcall %}{{ field('m') }}{% set block %}in {{ bos_token }}
{% endset %}{{ block }}
{% filter upper %}shout {{ eos_token }}{% endfilter %}
{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}
{%- endfor %}{% with y = 'w' %}{{ y }}{% endwith %}{{ cycler('p', 'q').next() }}{% block b %}{{ 'blk' }}
{% endblock %}{{ self.b() }}
{% raw %}{{ raw }}{% endraw %}{# note #}{{ (1, 2) in [(1, 2)] }}{{ {(1, 2): 3}[(1, 2)] }}{{ range(3)|list }}
{{ 'yes' if tools }}
{{ documents }}{{ strftime_now('%%') }}{{ 'abc'[1:] ~ 'abc'[-1] }}{{ messages[0].nothing is defined }}
{{ add_generation_prompt }}
{{ messages[2].thinking ~ messages[2].reasoning_content }}{{ messages[2].content is defined }}{{ joiner('-')() }}
"""


def theirs(template: str, messages: list[dict[str, Any]], tools: list[Any]) -> str:
    """What transformers' own method renders."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(), chat_template=template, **SPECIAL)
    return str(tokenizer.apply_chat_template(
        messages, tools=tools or None, tokenize=False, add_generation_prompt=True))


def ours(template: str, messages: list[dict[str, Any]] = CHAT, tools: list[Any] = []) -> str:  # noqa: B006
    return render(SimpleNamespace(chat_template=template, special_tokens_map=SPECIAL), messages, tools)


@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["no tools", "tools"])
@pytest.mark.parametrize("template", [DEMO, LANGUAGE], ids=["demo", "language"])
def test_a_template_renders_as_transformers_renders_it(template: str, tools: list[Any]) -> None:
    """Every filter, test, tag, global and method that templates use writes the same, byte for byte."""
    for messages in ((CHAT,) if template is LANGUAGE else (CHAT[:2], CHAT[1:2], CHAT[1:2] + CHAT[4:])):
        assert ours(template, messages, tools) == theirs(template, messages, tools)


@pytest.mark.parametrize("statement", [
    "{{ messages[0].content + 1 }}", "{{ nothing.more }}", "{{ '5' is odd }}", "{{ 'a'|round }}", "{{ 'a'|nonsense }}",
    "{% if %}", "{{ raise_exception('no') }}", "{% include 'a' %}", "{{ ''.__class__() }}", "{{ [].append(1) }}",
    "{{ namespace(_a=1) }}", "{% set n = namespace() %}{% set n._a = 1 %}", "{{ [1]|map('string')|tojson }}",
])
def test_a_template_fails_as_with_transformers(statement: str) -> None:
    """The type of an exception is the same."""
    with pytest.raises(Exception) as expected:  # noqa: PT011, whichever it is
        theirs(statement, CHAT, [])
    with pytest.raises(expected.type):
        ours(statement)


def test_templates_see_plain_values_only() -> None:
    """What is no JSON becomes what transformers makes of it: no method of the caller's objects can be called."""

    @dataclasses.dataclass
    class Part:
        text: str

    class Name(str):
        pass

    class Dumped:
        def model_dump(self) -> dict[str, Any]:
            return {"text": Name("dumped")}

    values = [Part("p"), Name("n"), Dumped(), np.bool_(False), np.float32(1.5), object(), (1, True), float("inf"),
              2**70]
    messages = [{"role": "user", "content": "x", "extra": values}]
    template = "{% for one in messages[0].extra %}{{ one }}{{ '!' if one }}{% endfor %}"
    assert ours(template, messages) == theirs(template, messages, [])


RANGE = "{% for i in range(9999) %}"
END = "{% endfor %}"
#: A value of 2^60 parts in 60 steps, of lists and of tuples.
LISTS = "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}" \
        "{% set n.y = [n.y, n.y] %}{% endfor %}"
TUPLES = LISTS.replace("[", "(").replace("]", ",)").replace("namespace(x=(1,), y=(1,))", "namespace(x=(1,), y=(1,))")
HOSTILE = {
    "steps": [
        RANGE * 2 + END * 2, RANGE + "{% for j in range(9999) if false %}{% endfor %}" + END,
        "{% macro m(n) %}{{ m(n - 1) ~ m(n - 1) if n }}{% endmacro %}{{ m(40) }}",
        RANGE + "{{ range(9999)|select('none')|first }}" + END, "{{ range(9999)|select('in', range(9999)|list)|list }}",
        "{% set l = 'a' * 999999 %}" + RANGE + "{{ 'b' in l }}" + END, "{{ lipsum(99999999) }}",
        "{{ [1]|batch(2000000000, 0)|list }}", "{{ [1]|slice(2000000000)|list }}", "{{ ([[1]] * 9999)|sum(start=[]) }}",
        *(LISTS + one for one in (
            "{{ n.x }}", "{{ n.x ~ '' }}", "{{ n.x|tojson }}", "{{ n.x|upper }}", "{{ [n.x]|join }}",
            "{{ n.x == n.y }}",
            "{{ n.x in [n.y] }}", "{{ n.x is eq n.y }}", "{{ [n.x, n.y]|sort }}", "{{ '%s' % [n.x] }}",
            "{{ '{}'.format(n.x) }}", "{{ [n.x].index(n.y) }}", "{{ raise_exception(n.x) }}",
            "{% for i in range(2) %}{{ loop.changed(n.x if i else n.y) }}{% endfor %}")),
        *(TUPLES + one for one in (
            "{{ {n.x: 1}|length }}", "{{ {}[n.x] }}", "{{ {}.get(n.x) }}", "{{ n.x in {} }}", "{{ [n.x]|unique|list }}",
            "{{ n.x is filter }}", "{{ {'a': n.x}.items() - {'a': n.y}.items() }}")),
    ],
    "bytes of memory": [
        "{{ 'a' * 2000000000 }}", "{{ 2000000000 * 'a' }}", "{{ [1] * 2000000000 }}", "{{ ('a'|safe) * 2000000000 }}",
        "{{ '%2000000000d' % 1 }}", "{{ '%*d' % (2000000000, 1) }}", "{{ '%.2000000000f' % 1.0 }}",
        "{{ '%(a(b)c)2000000000d' % {'a(b)c': 1} }}", "{{ '%2000000000d'|format(1) }}",
        "{{ '{:2000000000}'.format(1) }}",
        "{{ '{:{w}}'.format(1, w=2000000000) }}", "{{ '{a:2000000000}'.format_map({'a': 1}) }}",
        "{{ ('{:2000000000}'|attr('format'))(1) }}", "{{ [1]|tojson(indent=2000000000) }}",
        "{{ [1]|tojson(indent='a' * 9999999) }}", "{{ range(99)|list|tojson(separators=('a' * 999999, ':')) }}",
        "{{ 'a'.center(2000000000) }}", "{{ 'a'.ljust(2000000000) }}", "{{ 'a'.zfill(2000000000) }}",
        "{{ ('a'|safe).rjust(2000000000) }}", "{{ 'a'|center(2000000000) }}", "{{ '\t'.expandtabs(2000000000) }}",
        "{% for f in ['a']|map(attribute='center') %}{{ f(2000000000) }}{% endfor %}",
        "{{ 'a'|indent(2000000000, true) }}",
        "{{ ('a' * 9999).replace('a', 'b' * 9999) }}", "{{ ('a' * 9999)|replace('', 'b' * 9999) }}",
        "{{ ('b' * 9999).join('a' * 9999) }}", "{{ range(9999)|join('b' * 9999) }}", "{{ ('日' * 999999)|list }}",
        "{{ ('a ' * 999999).split() }}", "{{ ('é' * 999999)|urlencode }}", "{{ strftime_now('%Y' * 99999) }}",
        *(f"{{% set n = namespace(x={start}) %}}{RANGE}{{% set n.x = n.x {operator} n.x %}}{END}"
          for start, operator in (("'a'", "+"), ("'a'", "~"), ("[1]", "+"))),
        *(f"{{% set n = namespace(l=[]) %}}{{% set s = 'a' * 999999 %}}{RANGE}{{% set n.l = [n.l, {kept}] %}}{END}"
          for kept in ("s + 'b'", "s[1:]", "s|upper", "s.lower()", "s ~ 'b'", "s|replace('a', 'c')", "'%s.' % s")),
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% else %}" + "a" * 999 + "{% endif %}{% endmacro %}"
        "{{ m(14) }}",
    ],
    "bits of a number": [
        "{{ 2 ** 9999999999 }}", "{{ 10 ** 99999 }}",
        "{% set n = namespace(x=2) %}" + RANGE + "{% set n.x = n.x * n.x %}" + END, "{{ ('f' * 1024)|int(0, 32) }}",
    ],
    "levels of a value": [
        "{% set n = namespace(x=(1,)) %}" + RANGE + "{% set n.x = (n.x,) %}" + END + "{{ {n.x: 1} }}",
        "{% set n = namespace(x=[1]) %}" + RANGE + "{% set n.x = [n.x] %}" + END + "{{ n.x }}",
        "{% set n = namespace() %}{% set n.a = n %}{{ n }}",
    ],
    "characters of text": [RANGE + "a" * 9999 + END],
    "characters of its own": ["a" * (2**17 + 1)],
    "characters of an argument": [
        "{{ 'a'.strip('ab' * 9999) }}", "{{ 'a'|trim('ab' * 9999) }}", "{{ ('9' * 9999)|int }}",
        "{{ [1]|map(attribute='a.' * 9999)|list }}", "{{ [1]|sum(attribute='a.' * 9999) }}",
    ],
    "characters for such a filter": [
        f"{{{{ ('<!---->' * 99999)|{name} }}}}" for name in ("striptags", "urlize", "wordwrap(1)", "pprint")
    ],
}


class GrowingProcess:
    """A process that gives no memory back: what other tests left free would hide what a template takes."""

    rss = 0

    def memory_info(self) -> GrowingProcess:
        GrowingProcess.rss += 2**24
        return self


@pytest.mark.parametrize(("what", "template"), [(what, one) for what, all_ in HOSTILE.items() for one in all_])
def test_a_template_over_a_bound_is_ended(what: str, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the bound. Nothing of the size in question is made: that would take seconds, or all memory."""
    if what == "steps":
        monkeypatch.setattr(template_budget, "MAX_TEMPLATE_STEPS", 2**18)
    monkeypatch.setattr(template_budget, "MAX_TEMPLATE_BYTES", 2**24)
    monkeypatch.setattr(template_budget, "Process", GrowingProcess)
    monkeypatch.setattr(template_sandbox, "MAX_RENDERED_LENGTH", 2**22)
    with pytest.raises(OverBound, match=f"than [0-9]+ {what}[.]"):
        ours(template)


@pytest.mark.parametrize("template", [
    "{{ 'a'.encode('punycode') }}", "{{ (5).to_bytes(2000000000, 'big') }}", "{{ 'a'.translate({}) }}",
    "{{ ('a'|safe).striptags() }}", "{% autoescape true %}{{ '<' }}{% endautoescape %}",
    "{% for g in [[1]|map('string')] %}{{ g.close() }}{% endfor %}",
])
def test_methods_without_a_bound_are_not_to_be_had(template: str) -> None:
    """Of the interpreter's types templates have the methods whose work is known."""
    with pytest.raises(Exception, match=r"unsafe|cannot escape"):
        ours(template)


@pytest.mark.parametrize("template", [
    "{{ '%2000000000d' is even }}", "{{ ['%2000000000d']|select('divisibleby', 3)|list }}",
    "{{ 'a'|round(9, 'ceil') }}",
    "{{ 1|round(999999999, 'ceil') }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
])
def test_other_misuse_fails_at_once(template: str) -> None:
    """Text in the place of a number, and recursion without an end, are ordinary exceptions."""
    with pytest.raises((TypeError, RecursionError)):
        ours(template)


def test_a_template_without_time_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is looked at while a template runs, and processor time of other threads does not count."""
    monkeypatch.setattr(template_budget, "MAX_TEMPLATE_S", 0.0)
    with pytest.raises(OverBound, match=r"than 0\.0 seconds of processor time"):
        ours(RANGE + END)
    monkeypatch.setattr(template_budget, "thread_time", lambda: 0.0)
    monkeypatch.setattr(template_budget, "MAX_TEMPLATE_S", 1e-9)
    assert ours(RANGE + END) == ""


def test_a_text_that_is_written_piece_by_piece_may_be_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was made and is gone again does not count for ever: adding to a text makes it many times over."""
    monkeypatch.setattr(template_budget, "MAX_TEMPLATE_BYTES", 2**24)
    template = "{% set n = namespace(x='') %}" + RANGE + "{% set n.x = n.x + 'ab' * 9 %}" + END + "{{ n.x|length }}"
    assert ours(template) == str(9999 * 18)


def test_a_long_chat_has_more_steps_than_a_short_one() -> None:
    """A loop that is quadratic in the messages is rendered for a long chat, and ended for a short one."""
    loop = RANGE + "{% for j in range(99) %}{% endfor %}" + END
    with pytest.raises(OverBound, match=r"than 10[0-9]{5} steps"):
        ours(loop, CHAT[:2])
    assert ours(loop, [{"role": "user", "content": "word\n" * 9999}]) == ours(loop, CHAT[:2] * 300) == ""


def test_renderings_on_several_threads_have_a_budget_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is ended takes nothing from those beside it."""
    monkeypatch.setattr(template_budget, "MAX_TEMPLATE_STEPS", 2**16)

    def outcome(number: int) -> str:
        try:
            return ours(RANGE + END if number % 2 else RANGE * 2 + END * 2 + "{{ messages|length }}")
        except OverBound:
            return "ended"

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(outcome, range(16))) == ["ended", ""] * 8


def test_a_request_is_refused_and_the_next_one_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal is typed and says the bound, nothing of the conversation, and what to do; tools are no exception."""
    monkeypatch.setattr(template_budget, "MAX_TEMPLATE_STEPS", 2**16)
    fast = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<|im_end|>")
    fast.chat_template = "{% if tools or messages[0].content == 'secret' %}" + RANGE * 2 + END * 2 + "{% endif %}ok"
    tokenizer = HFTokenizer(fast)
    with pytest.raises(InvalidPrompt, match=r"within its bounds\. It takes more than 65536 steps\. Shorten") as caught:
        tokenizer.encode_chat([{"role": "user", "content": "secret"}])
    assert "secret" not in str(caught.value)
    assert caught.value.__context__ is None
    with pytest.raises(InvalidPrompt, match="steps"):
        assert tokenizer.knows_tools
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "ok"


def test_a_tokenizer_with_a_method_of_its_own_renders_by_it() -> None:
    """One that is no template in Jinja is asked."""

    class Own(PreTrainedTokenizerFast):
        def apply_chat_template(self, *args: Any, **options: Any) -> Any:
            return "own"

    fast = Own(tokenizer_object=byte_level())
    fast.chat_template = "template"
    assert HFTokenizer(fast).render_chat([{"role": "user", "content": "hi"}]) == "own"
