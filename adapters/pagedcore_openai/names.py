"""The names by which calls find models and their adapters, and which of them each API key may use.

For a key that was given names, everything else is as if it were not there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from pagedcore_openai.calls import ServedModel
from pagedcore_openai.tenants import ApiKeys, Right


class ServedNames:
    """The models of one app, by the names that calls give.

    Invariant: what a key may not use is found by none of its calls, and listed for none.
    """

    def __init__(self, models: Mapping[str, ServedModel], keys: ApiKeys | None) -> None:
        """Take models by name. Raises ``InvalidConfig`` if a key may use one that is not there."""
        self._models = models
        self._rights: Mapping[bytes, frozenset[Right]] = {} if keys is None else keys.rights(models)

    def may_use(self, tenant: bytes | None, base: str, lora: str | None = None) -> bool:
        """Whether a tenant may use a model, with an adapter if one is given."""
        rights = self._rights.get(tenant or b"")
        return rights is None or (base, lora) in rights or (base, ApiKeys.ALL) in rights

    def find(self, name: object, tenant: bytes | None, lora: object = None) -> ServedModel | None:
        """Return the model of a name: its own, "base:adapter", or that of an adapter alone; ``None``: there is none.

        ``lora`` is an adapter that a body names beside the model, which a tenant may use with it alone.
        """
        if not isinstance(name, str):
            return None
        beside = lora if isinstance(lora, str) else None
        if name in self._models and (self.may_use(tenant, name) or self.may_use(tenant, name, beside)):
            return self._models[name]
        base, _, own = name.rpartition(":")
        bases, own = ([base], own) if base in self._known(tenant) else (self._known(tenant), name)
        found = next((one for one in bases if own in self._models[one].engine.adapter_names
                      and self.may_use(tenant, one, own)), None)
        return None if found is None else replace(self._models[found], name=name, lora=own)

    def listed(self, tenant: bytes | None) -> list[tuple[ServedModel, str | None]]:
        """Return what a tenant may use, and what each is an adapter of: adapters are behind their models."""
        found = dict[str, tuple[ServedModel, str | None]]()
        plain = {base for base in self._models if self.may_use(tenant, base)}
        for base, one in self._models.items():
            if base in plain:
                found[base] = one, None
            for own in self._adapters(tenant, base):
                name = f"{base}:{own}" if own in {*plain, *found} else own
                found[name] = replace(one, name=name, lora=own), base
        return [*found.values()]

    def only(self, tenant: bytes | None) -> str | None:
        """Return the name that a call of a tenant may leave out: of its one model, or of its one adapter."""
        listed = self.listed(tenant)
        names = [one.name for one, parent in listed if parent is None] or [one.name for one, _ in listed]
        return names[0] if len(names) == 1 else None

    def base_of(self, served: ServedModel) -> str:
        """Return the name of a model without its adapter."""
        return next(name for name, one in self._models.items() if one.engine is served.engine)

    def _known(self, tenant: bytes | None) -> list[str]:
        """Return the models of which a tenant may use anything."""
        rights = self._rights.get(tenant or b"")
        return [base for base in self._models if rights is None or any(base == one for one, _ in rights)]

    def _adapters(self, tenant: bytes | None, base: str) -> Iterator[str]:
        return (own for own in self._models[base].engine.adapter_names if self.may_use(tenant, base, own))
