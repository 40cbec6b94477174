"""The registry, the plugin manager and the observing hooks, with plugins made up on the spot."""

from __future__ import annotations

import asyncio
import errno
import logging
import shutil
import signal
import sys
import types
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from pagedcore import AsyncEngine, SamplingParams
from pagedcore.errors import InvalidConfig, MissingDependency
from pagedcore.plugins import manager as manager_module
from pagedcore.plugins.hookspecs import hookimpl
from pagedcore.plugins.manager import EngineHooks, PluginManager, create_plugin_manager, expose
from pagedcore.plugins.registry import Registry
from support.doubles import raising, toy_answer
from support.engine_builders import assert_all_free, make_engine


class Policy:
    """A plugin that adds one scheduling policy and, with ``target``, says where it is."""

    def __init__(self, name: str = "mine", target: str = "collections:OrderedDict") -> None:
        self.name, self.target, self.__name__ = name, target, f"policy-{name}"

    @hookimpl
    def pagedcore_register(self, registry: Registry) -> None:
        registry.schedulers.add(self.name, self.target, extra="mine")


class Observer:
    """A plugin that records the calls of its hooks."""

    __name__ = "observer"

    def __init__(self) -> None:
        self.seen: list[object] = []

    @hookimpl
    def pagedcore_step(self, stats: object) -> None:
        self.seen.append(stats)

    @hookimpl
    def pagedcore_request_finished(self, request: object) -> None:
        self.seen.append(request)


class Failing:
    """A plugin whose hook raises."""

    __name__ = "failing"

    @hookimpl
    def pagedcore_step(self, stats: object) -> None:
        raise RuntimeError("observer is broken")


def installed(monkeypatch: pytest.MonkeyPatch, **plugins: object) -> None:
    """Pretend that distributions offer ``plugins`` as entry points; an exception is raised by its import."""
    found = []
    for name, plugin in plugins.items():
        module = types.ModuleType(f"made_up_{name}")
        module.plugin = plugin  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, None if plugin is None else module)  # type: ignore[arg-type]
        found.append(EntryPoint(name, f"{module.__name__}:plugin", "pagedcore"))
    monkeypatch.setattr(manager_module, "entry_points_of", lambda group: found)


def states(manager: PluginManager) -> dict[str, str]:
    return {record.name: record.state for record in manager.records}


def test_builtin_tables_list_what_comes_with_pagedcore() -> None:
    """The built-in names are in their tables without anything being imported or installed."""
    registry = create_plugin_manager(entry_points=False).registry
    assert registry.attention.names == ["numba-cpu", "numba-cuda", "reference"]
    assert registry.linears.names == ["onednn", "packed"]
    assert registry.models.names == ["transformers"]
    assert registry.schedulers.names == [
        "cache-aware", "deadline", "fair", "fcfs", "priority", "shortest-first", "static",
    ]
    assert registry.adapters.names == ["async-generator"]


def test_every_builtin_target_can_be_imported() -> None:
    """No built-in entry points to something that does not exist."""
    for table in create_plugin_manager(entry_points=False).registry.tables.values():
        for entry in table:
            assert callable(table.load(entry.name)), entry.target


def test_a_target_is_imported_on_first_use_only() -> None:
    """Registering and listing import nothing; loading does."""
    registry = create_plugin_manager([Policy(target="xml.dom.pulldom:parse")], entry_points=False).registry
    sys.modules.pop("xml.dom.pulldom", None)
    assert registry.schedulers.find("mine").target == "xml.dom.pulldom:parse"
    assert "xml.dom.pulldom" not in sys.modules
    assert callable(registry.schedulers.load("mine"))
    assert "xml.dom.pulldom" in sys.modules


def test_a_duplicate_names_both_plugins() -> None:
    """A name that is claimed twice is an error that names both claimants."""
    with pytest.raises(InvalidConfig, match=r"'fcfs'.*'builtin'.*'policy-fcfs'"):
        create_plugin_manager([Policy("fcfs")], entry_points=False)


def test_an_unknown_name_lists_the_known_ones() -> None:
    """Asking for what is not there says what is."""
    with pytest.raises(InvalidConfig, match=r"'lifo'.*fcfs, priority, shortest-first, static"):
        create_plugin_manager(entry_points=False).registry.schedulers.load("lifo")


def test_a_missing_package_names_the_extra() -> None:
    """An entry whose package is absent says which extra brings it, and counts as not available."""
    policy = Policy(target="no_such_package.x:y")
    table = create_plugin_manager([policy], entry_points=False).registry.schedulers
    with pytest.raises(MissingDependency, match=r"no_such_package.*pagedcore\[mine\]"):
        table.load("mine")
    assert not table.can_import("mine")


def test_a_missing_attribute_is_an_error_of_its_own() -> None:
    """A target whose module lacks the attribute is not mistaken for a missing package."""
    table = create_plugin_manager([Policy(target="json:nothing")], entry_points=False).registry.schedulers
    with pytest.raises(InvalidConfig, match=r"json:nothing") as caught:
        table.load("mine")
    assert not isinstance(caught.value, MissingDependency)


@pytest.mark.parametrize("target", ["", "module", ":attribute", "module:"])
def test_a_malformed_target_is_refused_when_added(target: str) -> None:
    """A target has to be a module and an attribute."""
    with pytest.raises(InvalidConfig, match=r"package\.module:attribute"):
        create_plugin_manager([Policy(target=target)], entry_points=False)


def test_what_is_installed_meanwhile_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution is there for the next engine once it is installed, and gone once it is removed."""
    monkeypatch.syspath_prepend(tmp_path)

    def names() -> list[str]:
        return [record.name for record in create_plugin_manager().records if record.distribution == "late"]

    assert names() == []
    (tmp_path / "made_up_late.py").write_text("")
    folder = tmp_path / "late-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: late\nVersion: 1\n")
    (folder / "entry_points.txt").write_text("[pagedcore]\nlate = made_up_late\n")
    assert names() == ["late"]
    assert names() == ["late"]
    shutil.rmtree(folder)
    assert names() == []


def test_a_path_that_leads_nowhere_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs put all kinds of things there, and remove the folder that they are in."""
    usual = [record.name for record in create_plugin_manager().records]
    for entry in ("no/such/folder", tmp_path, "x" * 5000):
        with monkeypatch.context() as changed:
            changed.setattr(sys, "path", [*sys.path, entry])
            assert [record.name for record in create_plugin_manager().records] == usual
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert [record.name for record in create_plugin_manager().records] == usual


def test_order_is_builtin_then_entry_points_then_explicit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plugins are met in a fixed order, whatever order the distributions are listed in."""
    installed(monkeypatch, zebra=Policy("z"), ape=Policy("a"))
    manager = create_plugin_manager([Policy("mine")])
    assert list(states(manager)) == ["builtin", "ape", "zebra", "policy-mine"]
    assert set(states(manager).values()) == {"active"}
    assert manager.registry.schedulers.find("z").plugin == "zebra"


def test_a_broken_entry_point_is_recorded_and_left_out(monkeypatch: pytest.MonkeyPatch,
                                                        caplog: pytest.LogCaptureFixture) -> None:
    """One stranger's broken import neither stops the start nor hides the others."""
    installed(monkeypatch, broken=None, whole=Policy())
    with caplog.at_level(logging.WARNING):
        manager = create_plugin_manager()
    assert (states(manager)["broken"], states(manager)["whole"]) == ("failed", "active")
    record = next(record for record in manager.records if record.name == "broken")
    assert "made_up_broken" in record.reason
    assert "broken" in caplog.text


def test_a_plugin_is_not_left_out_for_lack_of_file_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system lacks at the moment refuses the engine, which would do without the plugin for good."""
    monkeypatch.setattr(EntryPoint, "load", raising(OSError(errno.EMFILE, "Too many open files", "plugin.py")))
    with pytest.raises(InvalidConfig, match="plugin 'mine': it cannot be loaded now"):
        PluginManager().try_add(EntryPoint("mine", "mine", "pagedcore"))


def test_a_clashing_entry_point_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin whose second entry clashes has its first one taken back, and none of its hooks is called."""

    class Greedy(Observer):
        @hookimpl
        def pagedcore_register(self, registry: Registry) -> None:
            registry.schedulers.add("new", "json:loads")
            registry.schedulers.add("fcfs", "json:loads")

    installed(monkeypatch, greedy=Greedy())
    manager = create_plugin_manager()
    assert states(manager)["greedy"] == "failed"
    assert "new" not in manager.registry.schedulers
    assert manager.registry.schedulers.find("fcfs").plugin == "builtin"
    assert not EngineHooks(manager).observes_steps


def test_a_misspelt_hook_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that is never called is an error for an explicit plugin and a record for an entry point."""

    class Misspelt:
        @hookimpl
        def pagedcore_stepp(self, stats: object) -> None: ...

    with pytest.raises(InvalidConfig, match="pagedcore_stepp"):
        create_plugin_manager([Misspelt()], entry_points=False)
    installed(monkeypatch, misspelt=Misspelt(), whole=Policy())
    found = states(create_plugin_manager())
    assert (found["misspelt"], found["whole"]) == ("failed", "active")


def test_a_name_taken_twice_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second plugin of the same name is recorded as failed beside the first."""
    installed(monkeypatch, builtin=Policy())
    assert sorted(states(create_plugin_manager()).values()) == ["active", "failed"]
    with pytest.raises(InvalidConfig, match="policy-mine"):
        create_plugin_manager([Policy(), Policy()], entry_points=False)


def test_blocked_plugins_are_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A blocked entry point is listed as blocked and its code never runs."""
    installed(monkeypatch, evil=None, other=None, whole=Policy())
    monkeypatch.setenv("PAGEDCORE_DISABLE_PLUGINS", "evil, builtin")
    manager = create_plugin_manager(block=["other", "builtin"])
    assert states(manager) == {"builtin": "active", "evil": "blocked", "other": "blocked", "whole": "active"}


def test_autoload_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the keyword nor the environment variable lets an entry point be looked at."""
    installed(monkeypatch, evil=None)
    assert "evil" not in states(create_plugin_manager(entry_points=False))
    monkeypatch.setenv("PAGEDCORE_DISABLE_PLUGIN_AUTOLOAD", "1")
    assert "evil" not in states(create_plugin_manager())


def test_managers_share_nothing() -> None:
    """A plugin of one manager is unknown to the next."""
    create_plugin_manager([Policy()], entry_points=False)
    assert "mine" not in create_plugin_manager(entry_points=False).registry.schedulers


def test_observers_are_told_in_order() -> None:
    """Every observer of a hook gets exactly what the engine said."""
    observer = Observer()
    hooks = EngineHooks(create_plugin_manager([observer], entry_points=False))
    hooks.step_done("stats")  # type: ignore[arg-type]
    hooks.request_finished("output")  # type: ignore[arg-type]
    assert observer.seen == ["stats", "output"]
    assert (hooks.observes_steps, hooks.observes_requests) == (True, True)


def test_without_observers_nothing_has_to_be_put_together() -> None:
    """The built-in plugins observe nothing, so the engine may skip building statistics."""
    hooks = EngineHooks(create_plugin_manager(entry_points=False))
    assert (hooks.observes_steps, hooks.observes_requests) == (False, False)


def test_a_raising_observer_is_logged_once_and_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """Observers before and after a broken one are called every time, and the log has one record."""
    first, last = Observer(), Observer()
    last.__name__ = "last"  # type: ignore[misc]
    hooks = EngineHooks(create_plugin_manager([first, Failing(), last], entry_points=False))
    for step in range(3):
        hooks.step_done(step)  # type: ignore[arg-type]
    assert first.seen == last.seen == [0, 1, 2]
    assert len(caplog.records) == 1
    assert "failing" in caplog.text


def test_expose_hands_the_model_and_settings_to_the_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """``expose`` finds an adapter of a third party by name and returns what its factory makes."""
    module = types.ModuleType("made_up_adapter")
    module.create = lambda model, **settings: (model, settings)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_up_adapter", module)

    class Adapter:
        @hookimpl
        def pagedcore_register(self, registry: Registry) -> None:
            registry.adapters.add("made-up", "made_up_adapter:create")

    installed(monkeypatch, made_up=Adapter())
    assert expose("made-up", model="demo", seed=3) == ("demo", {"seed": 3})
    with pytest.raises(InvalidConfig, match=r"'bentobox'.*async-generator, made-up"):
        expose("bentobox", model="demo")


class Quitting:
    """A plugin whose hooks raise what ends a program or a thread."""

    __name__ = "quitting"

    def __init__(self, error: BaseException) -> None:
        self._error = error

    @hookimpl
    def pagedcore_step(self, stats: object) -> None:
        raise self._error

    @hookimpl
    def pagedcore_request_finished(self, request: object) -> None:
        raise self._error

    @hookimpl
    def pagedcore_engine_stop(self, engine: object) -> None:
        raise self._error


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit(), KeyboardInterrupt()], ids=repr)
async def test_no_observer_ends_the_engines_thread(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever it raises there is logged once; every request completes, the other observers are told, and the engine
    closes in order."""
    watching = Observer()
    engine = make_engine(plugins=[Quitting(error), watching])
    with caplog.at_level(logging.ERROR):
        async with AsyncEngine(engine) as serving:
            params = SamplingParams(max_tokens=3, ignore_eos=True)
            outputs = [await asyncio.wrap_future(serving.submit([value], params)) for value in (1, 2)]
            assert serving.health().status == "ready"
    assert [one.outputs[0].finish_reason for one in outputs] == ["length", "length"]
    assert len(watching.seen) >= 2 + 2
    assert len([record for record in caplog.records if "quitting" in record.message]) == 1


def test_system_exit_of_an_observer_ends_no_program() -> None:
    """On the main thread too: it is the observer's failure."""
    hooks = EngineHooks(create_plugin_manager([Quitting(SystemExit(3))], entry_points=False))
    hooks.step_done(None)  # type: ignore[arg-type]


def test_ctrl_c_in_an_observer_reaches_the_user() -> None:
    """On the main thread ``KeyboardInterrupt`` is raised on, what the builder left for the end is done all the same,
    and a step that was interrupted in this way is complete."""
    ended: list[int] = []
    hooks = EngineHooks(
        create_plugin_manager([Quitting(KeyboardInterrupt())], entry_points=False), at_the_end=lambda: ended.append(1)
    )
    with pytest.raises(KeyboardInterrupt):
        hooks.engine_stopped(None)  # type: ignore[arg-type]
    assert ended == [1]
    engine = make_engine(plugins=[Quitting(KeyboardInterrupt())])
    request = engine.add_request([1, 2], SamplingParams(max_tokens=2, ignore_eos=True))
    while not request.is_done:
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert list(request.output().outputs[0].token_ids) == toy_answer([1, 2], 2)
    assert engine.stats().num_computed_tokens == 2 + 1
    assert_all_free(engine)


def test_a_signal_while_a_finished_request_is_told_comes_at_the_end_of_the_step() -> None:
    """A real Ctrl-C while the engine tells of a finished request: all observers are told, then it is raised."""
    seen: list[object] = []

    class Signalling:
        """Gets Ctrl-C."""

        __name__ = "signalling"

        @hookimpl
        def pagedcore_request_finished(self, request: object) -> None:
            signal.raise_signal(signal.SIGINT)
            seen.append(request)

    watching = Observer()
    engine = make_engine(plugins=[Signalling(), watching])
    engine.add_request([1, 2], SamplingParams(max_tokens=1, ignore_eos=True))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert (len(seen), len(watching.seen)) == (1, 1)
    assert [delta.finish_reason for delta in engine.step()] == ["length"]
