"""What keeps a loaded model that an engine has taken over from being used by anything else.

Packed layers are copies of their weights, and cached K and V were computed with them: a weight that changes
afterwards makes a model of two halves. ``load_state_dict`` is refused at once, on every module. Other changes of the
parameters that are left are found at the next step: operations in place, an optimizer's too, and another ``data``.
Not found are writes past torch's counter of versions, as by ``parameter.data.copy_()`` or through a NumPy view, and
another parameter in a module's place.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn
from weakref import WeakSet

import torch
from torch import nn

from pagedcore.errors import ModelTakenOver

_taken: Final[WeakSet[nn.Module]] = WeakSet()


def take(model: nn.Module) -> None:
    """Note that an engine has a model, from now on or from the moment its attention is redirected."""
    _taken.add(model)


def take_whole(model: nn.Module) -> None:
    """Note that an engine has a part of a model, with which it shares parameters, and refuse to load others."""
    take(model)
    _refuse_loading(model)


def _refuse_loading(model: nn.Module) -> None:
    for module in model.modules():
        module.register_load_state_dict_pre_hook(_refuse_change)  # type: ignore[no-untyped-call]


def require_free(model: nn.Module) -> None:
    """Refuse a model that an engine has.

    Raises:
        ModelTakenOver: it is not free.
    """
    if model in _taken:
        raise ModelTakenOver("model: an engine has taken it over. Load the model once more, or share that engine.")


def version_of(tensor: torch.Tensor) -> int:
    """Return how often torch has seen a write in place."""
    # torch itself refuses to change inference tensors in place, and counts no versions of theirs.
    return 0 if tensor.is_inference() else tensor._version


class TakenWeights:
    """The parameters that a model still has after it was taken over, and how they were then."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = tuple(model.parameters())
        self._states = self._present_states()
        _refuse_loading(model)

    def require_unchanged(self) -> None:
        """Look at every parameter's version and address, which takes a fraction of a microsecond each.

        Raises:
            ModelTakenOver: one has changed.
        """
        if self._present_states() != self._states:
            _refuse_change()

    def _present_states(self) -> list[tuple[int, int]]:
        return [(version_of(one), one.data_ptr()) for one in self._parameters]


def _refuse_change(*_: Any) -> NoReturn:
    raise ModelTakenOver(
        "model: an engine has taken it over and keeps copies of its weights, so that they cannot be changed any more. "
        "Load or change a model first, and make a new engine of it."
    )
