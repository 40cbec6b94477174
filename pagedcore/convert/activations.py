"""Runs a model over the prompts of a calibration set, and shows what its modules are given.

Owns how a model is loaded for that, and which tokens stand for a set where rows are kept. Prompts are computed one by
one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from pagedcore.errors import InvalidConfig
from pagedcore.models.checkpoints.pretrained import load_config, load_pretrained

NUM_KEPT: Final = 64
"""Rows of each module that are kept: those of Llama 3 8B take 109 MB in bfloat16."""

OnProgress = Callable[[int, int], None]
Prompts = Sequence[Sequence[int]]


def format_of_weights(config: Any) -> torch.dtype:
    """Return the number format in which a model is loaded: that of its files, or float32 in the place of float16."""
    return config.dtype if config.dtype in (torch.bfloat16, torch.float32) else torch.float32


def load_model(source: str) -> Any:
    """Load the model of a directory; weights are mapped and not copied, unless their format is another than said.

    Raises:
        ModelNotSupported: it cannot run here.
        InvalidConfig: its weights cannot be loaded.
    """
    name = str(format_of_weights(load_config(source))).removeprefix("torch.")
    return load_pretrained(source, dtype=name, is_quick=True)


@contextmanager
def removed_after(hooks: Sequence[Any]) -> Iterator[None]:
    """Remove hooks of modules in the end."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def compute(model: Any, prompt: Sequence[int], wanted: torch.Tensor) -> None:
    """Compute a prompt, and the logits of the tokens at the places ``wanted``."""
    model(input_ids=torch.tensor([list(prompt)]), use_cache=False, logits_to_keep=wanted)


def require_finite(numbers: torch.Tensor, what: str) -> None:
    """Refuse a model by numbers that are not finite; ``InvalidConfig``."""
    if not numbers.isfinite().all():
        raise InvalidConfig(f"model: {what} are not finite; its files are damaged, or it needs a wider format.")


@torch.inference_mode()
def rows_seen(model: Any, modules: Iterable[str], prompts: Prompts, on_progress: OnProgress) -> dict[str, torch.Tensor]:
    """Return rows [n, in], at most 64, that modules are given at tokens spread evenly over all prompts, by name.

    Only prompts with such a token are computed, up to their last one. A module that sees other rows than those of a
    prompt's tokens, as the output layer does, gives the first of them.

    Args:
        model: as ``load_model`` returns it.
        modules: their names.
        prompts: token ids, each in the vocabulary.
        on_progress: called with the number of prompts that are done, and of all that are computed.

    Raises:
        InvalidConfig: a row is not finite.
    """
    found, tokens = defaultdict[str, list[torch.Tensor]](list), list(_tokens_of(prompts))
    places = torch.arange(0)
    num_tokens = 0

    def look(name: str, module: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        rows = given[0].detach().flatten(0, -2)
        found[name].append(rows[places] if len(rows) == num_tokens else rows[: len(places)].clone())

    hooks = [model.get_submodule(name).register_forward_pre_hook(partial(look, name)) for name in modules]
    with removed_after(hooks):
        for number, (prompt, places) in enumerate(tokens, 1):
            num_tokens = len(prompt)
            compute(model, prompt, places)
            on_progress(number, len(tokens))
    rows = {name: torch.cat(parts) for name, parts in found.items()}
    for name, kept in rows.items():
        require_finite(kept, f"the activations before {name}")
    return rows


def _tokens_of(prompts: Prompts) -> Iterator[tuple[Sequence[int], torch.Tensor]]:
    """Yield prompts, up to the last token that is picked, and the places of those that are."""
    total = sum(len(prompt) for prompt in prompts)
    count, end = min(NUM_KEPT, total), 0
    picked = (torch.arange(count) * 2 + 1) * total // (2 * count)
    for prompt in prompts:
        begin, end = end, end + len(prompt)
        places = picked[(begin <= picked) & (picked < end)] - begin
        if len(places):
            yield prompt[: int(places[-1]) + 1], places
