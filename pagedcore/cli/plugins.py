"""``pagedcore plugins``: what was found, in which state, and what the tables offer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table as RichTable

from pagedcore.cli.common import console

if TYPE_CHECKING:
    from pagedcore.plugins.manager import PluginManager


def plugins(
    table: Annotated[str | None, typer.Option(help="Show one table: adapters, attention, linears, models, "
                                                       "schedulers.")] = None,
) -> None:
    """List plugins and their states, or with --table the implementations that can be named."""
    from pagedcore.plugins.manager import create_plugin_manager

    manager = create_plugin_manager()
    if table is None:
        console().print(records_table(manager))
        return
    entries = manager.registry.find_table(table)
    rows = RichTable("name", "what", "plugin", "state", title=table)
    for entry in entries:
        # Why: finding out whether an entry is available imports it.
        missing = f"needs pagedcore[{entry.extra}]" if entry.extra else "cannot be imported"
        rows.add_row(entry.name, escape(entry.summary), entry.plugin,
                     "available" if entries.can_import(entry.name) else missing)
    console().print(rows)


def records_table(manager: PluginManager, title: str | None = None) -> RichTable:
    """Lay out one row per plugin that was met."""
    table = RichTable("plugin", "distribution", "version", "state", "hooks", "reason", title=title)
    for record in manager.records:
        table.add_row(record.name, record.distribution, record.version, record.state, ", ".join(record.hooks),
                      record.reason)
    return table
