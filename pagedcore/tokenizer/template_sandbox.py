"""Renders chat templates as transformers does, in a sandbox in which a rendering ends.

Owns the environment: the tree of a template gets counters in its loops and macros and checks around what Python would
otherwise compute at once; operators, filters, tests, calls and output go through the environment. Filters, globals and
tags are those of transformers (``transformers/utils/chat_template_utils.py``), and so is what a template sees. Which
filter is bounded how, ``template_operations.py`` says; ``template_budget.py`` has the counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import cache, lru_cache
from io import StringIO
from types import BuiltinMethodType
from typing import Any, Final

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from pagedcore.config.limits import MAX_RENDERED_LENGTH, MAX_TEMPLATE_LENGTH
from pagedcore.tokenizer import template_operations as operations
from pagedcore.tokenizer.disguise import seeing
from pagedcore.tokenizer.plain_values import plain
from pagedcore.tokenizer.template_arguments import NO_ARGUMENTS
from pagedcore.tokenizer.template_budget import OverBound, budget, is_plain, items, made, measure, new_budget, text

_NAMES_OF_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
"""Names under which a message's reasoning is passed; templates read the first."""
_REASONING: Final = frozenset(_NAMES_OF_REASONING)


def render(
    tokenizer: Any, messages: list[dict[str, Any]], tools: list[Any], arguments: Mapping[str, Any] = NO_ARGUMENTS,
) -> str:
    """Render messages with a tokenizer's template, up to where the assistant's completion begins unless an argument
    says otherwise.

    Args:
        tokenizer: has ``chat_template`` and ``special_tokens_map`` as those of transformers.
        messages: as callers of transformers' ``apply_chat_template`` give them, and as that shows them to a template.
        tools: JSON schemas of functions.
        arguments: further variables of the template; those that it has from elsewhere stay what they are.

    Raises:
        OverBound: the template takes more than one rendering may.
        Exception: whatever a template raises.
    """
    source = tokenizer.chat_template
    if not isinstance(source, str):
        source = tokenizer.get_chat_template(None, tools or None)
    if len(source) > MAX_TEMPLATE_LENGTH:
        raise OverBound("characters of its own", MAX_TEMPLATE_LENGTH)
    variables = {
        "add_generation_prompt": True, **plain(dict(arguments)), **plain(dict(tokenizer.special_tokens_map)),
        "messages": [_shown(plain(message)) for message in messages],
        "tools": plain(tools) if tools else None, "documents": None,
    }
    with new_budget(variables):
        template, written, room = _compile(source), StringIO(), MAX_RENDERED_LENGTH
        for piece in template.root_render_func(template.new_context(variables)):
            if (room := room - written.write(piece)) < 0:
                raise OverBound("characters of text", MAX_RENDERED_LENGTH)
        return written.getvalue()


def require_template(source: str) -> None:
    """Compile a template. Raises what jinja2 and the sandbox raise for a text that is none."""
    _compile(source)


@lru_cache(maxsize=16)
def variables_read(source: str) -> frozenset[str]:
    """Return the names that a template reads and does not set itself; none if it is too long or is no template."""
    if len(source) > MAX_TEMPLATE_LENGTH:
        return frozenset()
    environment = _environment()
    try:
        return frozenset(find_undeclared_variables(environment.parse(source))) - environment.globals.keys()
    except (TemplateError, RecursionError):
        return frozenset()


def _shown(message: dict[str, Any]) -> dict[str, Any]:
    """Return what a template sees of a message: no member that is None, and reasoning under two names."""
    if None in message.values():
        message = {key: value for key, value in message.items() if value is not None}
    if _REASONING.isdisjoint(message):
        return message
    found = next(message[name] for name in _NAMES_OF_REASONING if name in message)
    return {"thinking": found, **message, "reasoning_content": found}


@lru_cache(maxsize=16)
def _compile(source: str) -> Template:
    environment = _environment()
    tree = _Counters().visit(environment.parse(source))
    tree.set_environment(environment)
    return environment.from_string(tree)


class _Counters(NodeTransformer):
    """Puts counters and checks into the tree of a template."""

    def _counted(self, node: Any) -> nodes.Node:
        """Count what is done in each turn of a loop, or each call of a macro, by the nodes that it may visit."""
        count = sum(1 for _ in node.find_all(nodes.Node))
        self.generic_visit(node)
        if isinstance(node, nodes.For) and node.test is not None:
            node.test = _filter(node.test, "steps", nodes.Const(count))
        step = _filter(nodes.Const(None, lineno=node.lineno), "steps", nodes.Const(count))
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        return node  # type: ignore[no-any-return]

    visit_Template = visit_For = visit_Macro = visit_CallBlock = visit_Block = _counted

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """Measure what is compared, for which the interpreter recurses."""
        self.generic_visit(node)
        node.expr = _unless_constant(node.expr, "operand")
        for one in node.ops:
            one.expr = _unless_constant(one.expr, "holder" if one.op in ("in", "notin") else "operand")
        return node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        """Measure keys, of which the interpreter recurses to compute a hash."""
        self.generic_visit(node)
        for pair in node.items:
            pair.key = _unless_constant(pair.key, "key")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """Count text that is put together."""
        self.generic_visit(node)
        return _filter(nodes.Tuple(node.nodes, "load", lineno=node.lineno), "joined")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        """Count slices, which are made without the environment."""
        self.generic_visit(node)
        return _filter(node, "made") if isinstance(node.arg, nodes.Slice) else node

    def visit_ScopedEvalContextModifier(self, node: nodes.Node) -> nodes.Node:
        """Refuse ``autoescape``: text would grow when it is written, where nothing bounds it."""
        raise SecurityError("a chat template cannot escape what it writes")


def _filter(node: Any, name: str, *arguments: nodes.Expr) -> nodes.Filter:
    # Why the space: a template cannot write such a name.
    return nodes.Filter(node, f"pagedcore {name}", [*arguments], [], None, None, lineno=node.lineno)


def _unless_constant(node: nodes.Expr, name: str) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _filter(node, name)


class _Generation(Extension):
    """The tag of transformers around what an assistant writes, which changes nothing here."""

    tags = {"generation"}  # noqa: RUF012, jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: Callable[[], str]) -> str:
        return caller()


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox in which no single operation makes, or goes through, more than the budget has left."""

    intercepted_binops = frozenset(operations.OPERATORS)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=text,
        )
        self.filters.update(operations.FILTERS)
        self.tests.update(operations.TESTS)
        self.globals.update(
            dict=_Dict(), lipsum=operations.lipsum, namespace=_Namespace, raise_exception=_raise,
            strftime_now=_strftime_now,
        )

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Join what a macro or a block has written."""
        return operations.joined(tuple(pieces))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute ``left operator right``."""
        return operations.OPERATORS[operator](left, right)

    def call(self, context: Any, callee: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call what a template calls."""
        if isinstance(callee, Macro):
            return super().call(context, callee, *args, **kwargs)
        owner = getattr(callee, "__self__", None)
        if isinstance(owner, str):
            args = operations.check_method(owner, callee.__name__, args, kwargs)
            callee = seeing(callee)
        else:
            for one in (owner, *args, *kwargs.values()):
                if not is_plain(one):
                    budget().take(16 * measure(one).parts)
        return made(super().call(context, callee, *args, **kwargs))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return ``obj[argument]``."""
        if isinstance(argument, tuple):
            measure(argument)
        return super().getitem(obj, argument)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may have an attribute: of the interpreter's types, the methods that are bounded."""
        if (isinstance(value, BuiltinMethodType) or isinstance(obj, str)) and attr not in operations.methods_of(obj):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return what stands for ``str.format`` and ``str.format_map``."""
        if super().wrap_str_format(value) is None:
            return None
        own = value.__self__
        formatter = (operations.EscapeFormatter(self, escape=own.escape) if isinstance(own, Markup)
                     else operations.Formatter(self))

        def bounded(*args: Any, **kwargs: Any) -> str:
            if value.__name__ == "format_map":
                (kwargs,), args = args, ()
            return made(type(own)(formatter.vformat(own, args, kwargs)))  # type: ignore[no-any-return]

        return bounded


@cache
def _environment() -> _Environment:
    return _Environment()


class _Dict:
    """What ``dict`` is in a template."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*map(items, args), **kwargs)

    def fromkeys(self, keys: Any, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(items(keys), *args)


class _Namespace(Namespace):
    # Why without names: a template may call an attribute "self".
    def __init__(*args: Any, **kwargs: Any) -> None:
        own, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _require_public(name)
        Namespace.__init__(own, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)


def _require_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError("a chat template cannot store attributes that begin with an underscore")


def _raise(message: Any) -> None:
    raise TemplateError(text(message))


def _strftime_now(form: str) -> str:
    # Why counted: the system's function is tried with up to 256 bytes for each character.
    budget().require(256 * len(form))
    return datetime.now().strftime(form)
