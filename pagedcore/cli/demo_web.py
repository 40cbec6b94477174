"""``pagedcore demo --web``: the demo model behind the page of ``pagedcore serve``, slow enough to be watched."""

from __future__ import annotations

import threading
import webbrowser
from pathlib import Path
from time import sleep
from typing import Any

from pagedcore.cli import common, serve
from pagedcore.plugins.hookspecs import hookimpl
from pagedcore.requests.stats import StepStats


class Pause:
    """A plugin that waits after every step. Observers must not block an engine; this one is for watching it."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    @hookimpl
    def pagedcore_step(self, stats: StepStats) -> None:
        """Wait."""
        sleep(self._seconds)


def demo_web(
    num_requests: int, *, pause_s: float, port: int, opens: bool, config: Path | None, defaults: dict[str, Any],
    **settings: Any,
) -> None:
    """Serve the demo model and open the page, which asks ``num_requests`` questions at once, until Ctrl-C.

    Args:
        num_requests: how many questions the page asks.
        pause_s: seconds to wait after every step.
        port: to listen on; 0: any free one.
        opens: whether to open the page in the user's browser.
        config: settings in a file.
        defaults: those of the demo, where neither the file nor ``settings`` has another.
        settings: those of options; ``None`` where none was given.

    Raises:
        MissingDependency: pagedcore[openai] is not installed.
    """
    from pagedcore import EngineConfig

    given: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    if config is not None:
        given = {"config": EngineConfig.from_file(config, defaults, **given)}

    def opened(url: str) -> None:
        address = f"{url}#demo={num_requests}"
        common.error_console().print(f"the batch at work: {address} (Ctrl-C ends it)", markup=False, soft_wrap=True)
        if opens:
            # Why on a thread: a browser of the terminal runs in the foreground, and the server has to answer it.
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()

    serve.run({"demo": "demo"}, is_announced=False, opened=opened, port=port, drain_s=0.0,
              plugins=[Pause(pause_s)], **(given if config is not None else {**defaults, **given}))
