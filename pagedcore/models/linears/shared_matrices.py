"""Linear layers whose weight another module computes with by itself, as LongCat-Flash's router does.

Owns how they are found: in the source of each module's ``forward``, before anything is computed. Such layers keep their
weight, and their number format, as no packed product can take its place.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final

from torch import nn

_ASKED: Final = frozenset({"dtype", "device", "shape", "ndim", "size", "dim", "is_floating_point", "is_meta"})
"""What may be asked of a weight without computing with it."""


def read_by_others(model: nn.Module) -> frozenset[nn.Module]:
    """Return the layers inside ``model`` that are exactly linear ones and whose weight another module reads."""
    found = set[nn.Module]()
    for module in model.modules():
        own = vars(module).get("forward")
        if isinstance(own, partial) and "__wrapped__" not in vars(own):
            # Why: it is a forward of ours, which calls the layers.
            continue
        for path in _weights_read(type(module).forward):
            try:
                layer = module.get_submodule(path)
            except AttributeError:  # what torch raises where this module has no such layer
                continue
            if type(layer) is nn.Linear:
                found.add(layer)
    return frozenset(found)


@cache
def _weights_read(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Return the submodules, by their paths, whose weights a class's ``forward`` takes for more than a question."""
    forward = inspect.unwrap(forward)
    # Why first: to find and read a source takes a millisecond, and few forwards know the word.
    if not inspect.isfunction(forward) or "weight" not in forward.__code__.co_names:
        return ()
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):  # there is no source, as in a compiled module
        return ()
    asked = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in _ASKED}
    paths = (_path_of(node.value) for node in ast.walk(tree)
             if isinstance(node, ast.Attribute) and node.attr == "weight" and id(node) not in asked)
    return tuple({path for path in paths if path})


def _path_of(node: ast.expr) -> str:
    """Return "a.b" for the expression ``self.a.b``; "" for any other."""
    names = list[str]()
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return ".".join(names) if isinstance(node, ast.Name) and node.id == "self" else ""
