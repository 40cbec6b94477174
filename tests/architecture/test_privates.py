"""What a class keeps to itself is touched in its own room only: other rooms use public names."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from architecture.rooms import room_of
from architecture.sources import SOURCES, Source

DOCUMENTED = {"_replace", "_asdict", "_fields", "_make", "_exit"}
"""Public by Python's documentation: of named tuples, and ``os._exit``."""
FOREIGN = {
    *(("pagedcore.models.decoders.fused_match", name) for name in (
        "_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks")),
    *(("pagedcore.models.checkpoints.text_models", name) for name in (
        "_buffers", "_init_weights", "_non_persistent_buffers_set")),
    *(("pagedcore.models.linears.packed_linear", name) for name in (
        "_C", "_has_mkldnn", "_is_mkldnn_bf16_supported", "_linear_pointwise", "_nbytes", "_reorder_linear_weight")),
    *((f"pagedcore.models.{module}", "_attn_implementation") for module in (
        "checkpoints.pretrained", "checkpoints.quick_start", "families.llama_modules", "families.supported_models",
        "transformers_model")),
    ("pagedcore.models.attention.layers", "_cdata"),
    ("pagedcore.models.linears.float8_linear", "_scaled_mm"),
    ("pagedcore.models.checkpoints.ownership", "_version"),
    ("pagedcore.models.checkpoints.pretrained", "_experts_implementation"),
    ("pagedcore.models.checkpoints.stored_experts", "_experts_implementation"),
    ("pagedcore.tokenizer.template_budget", "_Namespace__attrs"),
    ("pagedcore_bentoml.checks", "_exception"),
    ("pagedcore_bentoml.service", "_caller_module"),
}
"""Names of torch, transformers, jinja2, BentoML and circus that have no public counterpart, and the module that touches
each. The list may only become shorter: what a module does not touch any more has to leave it."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def room_of_source(source: Source) -> str:
    return room_of(source.module) or source.package


def members_of(scope: ast.Module | ast.ClassDef) -> Iterator[str]:
    """Yield the names that the body of a module or class defines, those of slots included."""
    for node in scope.body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Assign() | ast.AnnAssign():
                for one in ast.walk(node):
                    if isinstance(one, ast.Name):
                        yield one.id
                    elif isinstance(one, ast.Constant) and isinstance(one.value, str):
                        yield one.value


def members_of_classes(tree: ast.Module) -> Iterator[str]:
    """Yield the names that the classes of a file have, in their bodies or set on themselves."""
    for scope in ast.walk(tree):
        if isinstance(scope, ast.ClassDef):
            yield from members_of(scope)
            yield from (one.attr for one in ast.walk(scope)
                        if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store) and is_own(one.value))


def is_own(node: ast.expr) -> bool:
    """Whether an expression is the object or class itself."""
    match node:
        case ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super")):
            return True
    return False


def touched(tree: ast.Module) -> Iterator[str]:
    """Yield the private names that a file touches on anything but the object itself, imported ones included."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=value, attr=name) if not is_own(value):
                yield name
            case ast.Call(func=ast.Name(id="getattr" | "setattr" | "hasattr" | "delattr"),
                          args=[value, ast.Constant(value=str(name)), *_]) if not is_own(value):
                yield name
            case ast.ImportFrom(module=module, names=names) if (module or "").startswith("pagedcore"):
                yield from (one.name for one in names)


def test_privates_are_touched_in_their_room_only() -> None:
    """Nothing is touched that the own room does not have, but the names of other libraries in the list, and all of
    these are.
    """
    own = defaultdict[str, set[str]](set)
    for source in SOURCES:
        own[room_of_source(source)] |= {*members_of(source.tree), *members_of_classes(source.tree)}
    found = {(source.module, name) for source in SOURCES for name in touched(source.tree)
             if is_private(name) and name not in DOCUMENTED | own[room_of_source(source)]}
    assert found == FOREIGN


def test_the_list_hides_none_of_ours() -> None:
    """No name in the list is one that a class of this project has."""
    ours = {name for source in SOURCES for name in members_of_classes(source.tree)}
    assert {name for _, name in FOREIGN} & ours == set()
