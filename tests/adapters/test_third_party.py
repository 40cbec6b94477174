"""A third party's package, really installed: listed, used by name, and unharmed by broken neighbours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from architecture.sources import PACKAGE_PARENTS, ROOT

EXAMPLE = ROOT / "examples" / "third_party_adapter"
POLICY = ROOT / "examples" / "third_party_policy"
BROKEN = {
    "raises": "raise RuntimeError('this import is broken')",
    "exits": "raise SystemExit(3)",
    "signature": (
        "from pagedcore.plugins.hookspecs import hookimpl\n"
        "@hookimpl\ndef pagedcore_step(counters): ..."
    ),
    "observer": (
        "from pagedcore.plugins.hookspecs import hookimpl\n"
        "@hookimpl\ndef pagedcore_engine_start(engine): raise ValueError('this hook is broken')"
    ),
}
LISTED = """
import sys
from contextlib import suppress
from pagedcore.cli.main import main

for words in ([], ["--table", "adapters"], ["--table", "schedulers"]):
    sys.argv = ["pagedcore", "plugins", *words]
    with suppress(SystemExit):
        main()
    print("-----", flush=True)
"""
DIVIDED = "print('-----')\n"
USE = """
import io
from wsgiref.util import setup_testing_defaults
from pagedcore import expose

application = expose("wsgi", model="demo", max_tokens=16)
environ = {"REQUEST_METHOD": "POST", "CONTENT_LENGTH": "14", "wsgi.input": io.BytesIO(b"What is 2 + 3?")}
setup_testing_defaults(environ)
print(b"".join(application(environ, lambda status, headers: print(status))).decode())
bad = dict(environ, CONTENT_LENGTH="99999")
print(b"".join(application(bad, lambda status, headers: print(status))).decode())
long = dict(environ, CONTENT_LENGTH="16000", **{"wsgi.input": io.BytesIO(b"word " * 3200)})
print(b"".join(application(long, lambda status, headers: print(status))).decode())
abandoned = application(dict(environ, **{"wsgi.input": io.BytesIO(b"What is 2 + 3?")}), lambda *_: None)
next(abandoned)
abandoned.close()
print("blocks", application.engine.stats().num_blocks_used)
application.engine.close()
late = dict(environ, **{"wsgi.input": io.BytesIO(b"What is 2 + 3?")})
print(b"".join(application(late, lambda status, headers: print(status))).decode())
"""
TURNS = """
from pagedcore import Engine, SamplingParams

with Engine.from_pretrained(
    "demo", scheduling_policy="round-robin", policy_options={"vip": "none"}, max_num_seqs=2, num_kv_blocks=64
) as engine:
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    requests = [engine.add_request([1, 2, 3], params, tenant=name) for name in ["blue"] * 4 + ["red"] * 2]
    while engine.has_pending_requests():
        engine.step()
    requests.sort(key=lambda one: one.output().metrics.first_scheduled_s)
    print(*(requests_.sequences[0].options.tenant for requests_ in requests))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the examples, without a network."""
    pytest.importorskip("pip")
    sources = tmp_path_factory.mktemp("source")
    for example in (EXAMPLE, POLICY):
        shutil.copytree(example, sources / example.name)
    target = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation",
         "--disable-pip-version-check", "--target", str(target), *map(str, sources.iterdir())],
        check=True, capture_output=True, timeout=120,
    )
    return target


def install_broken(site: Path) -> None:
    """Put one distribution per way of being broken into a folder, as an installer would."""
    for name, code in BROKEN.items():
        (site / f"broken_{name}.py").write_text(code, encoding="utf-8")
        metadata = site / f"broken_{name}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: broken-{name}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[pagedcore]\n{name} = broken_{name}\n")


def python(site: Path, *words: str) -> str:
    """Run an interpreter that finds this checkout and what is installed in ``site``, and return what it printed."""
    search_path = map(str, [site, *PACKAGE_PARENTS])
    env = {"PYTHONPATH": os.pathsep.join(search_path), "PATH": "", "COLUMNS": "200", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def row(listing: str, name: str) -> str:
    """The line of a listing that begins with a plugin's name."""
    (found,) = [line for line in listing.splitlines() if line.strip("│ ").startswith(f"{name} ")]
    return found


def test_the_example_is_short() -> None:
    """A whole package with an adapter or a policy, its pyproject included, has fewer than 60 lines."""
    for example in (EXAMPLE, POLICY):
        files = [path for path in example.rglob("*") if path.suffix in (".py", ".toml")]
        assert len(files) == 2
        assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) < 60


@pytest.fixture(scope="module")
def printed(site: Path) -> list[str]:
    """What one interpreter, into which the broken ones are installed too, prints: three listings, and two programs."""
    install_broken(site)
    return python(site, "-c", LISTED + USE + DIVIDED + TURNS).split("-----\n")


def test_an_installed_adapter_is_listed_and_works(printed: list[str]) -> None:
    """It is found without any configuration, answers right, refuses what is out of bounds, and frees what it took."""
    assert "active" in row(printed[0], "wsgi")
    assert "available" in row(printed[1], "wsgi")
    answered, out_of_bounds, too_long = printed[3].split("400 Bad Request\n")
    assert answered.startswith("200 OK\n")
    assert "2 + 3 = 5." in answered
    assert "16384 bytes" in out_of_bounds
    too_long, closed = too_long.split("503 Service Unavailable\n")
    assert too_long.startswith("prompt")
    assert too_long.splitlines()[-1] == "blocks 0"
    assert "closed" in closed


def test_an_installed_policy_orders_requests(printed: list[str]) -> None:
    """It is chosen by name with its options, also under ``AsyncEngine``, and its tenants take turns."""
    assert "tenants take turns" in row(printed[2], "round-robin")
    assert printed[4].split() == ["blue", "red", "blue", "red", "blue", "blue"]


def test_broken_plugins_are_reported_and_stop_nobody(printed: list[str]) -> None:
    """An import that raises or exits, a wrong signature and a raising hook leave the others and the engine at work,
    which answers in the tests before.
    """
    listing = printed[0]
    assert "failed" in row(listing, "raises")
    assert "this import is broken" in row(listing, "raises")
    assert "failed" in row(listing, "exits")
    assert "failed" in row(listing, "signature")
    assert "counters" in listing
    for name in ("builtin", "wsgi", "observer"):
        assert "active" in row(listing, name)


FORMAT = """
from pagedcore.plugins.hookspecs import hookimpl
from pagedcore.tool_calls.hermes import HermesFormat, HermesParser

class Parser(HermesParser):
    def push(self, text):
        return super().push(text.replace("<call>", "<tool_call>"))

class Format(HermesFormat):
    def recognises(self, template):
        return "<call>" in template

    def new_parser(self, names, new_id):
        return Parser(names, new_id)

@hookimpl
def pagedcore_register(registry):
    registry.tool_parsers.add("angular", "angular_format:Format", summary="calls in angles")
"""
PARSE = """
from pagedcore.plugins.manager import create_plugin_manager
table = create_plugin_manager().registry.tool_parsers
form = table.load("angular")()
print(table.names, form.new_parser({"f"}, form.new_id).push('<call>{"name": "f", "arguments": {}}'))
"""


def test_an_installed_format_of_calls_is_found(tmp_path: Path) -> None:
    """A distribution adds a format to the table, beside those that come with pagedcore."""
    (tmp_path / "angular_format.py").write_text(FORMAT, encoding="utf-8")
    metadata = tmp_path / "angular_format-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: angular-format\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[pagedcore]\nangular = angular_format\n")
    printed = python(tmp_path, "-c", PARSE)
    assert "'hermes', " in printed
    assert ", 'angular'] [ToolCallStart(index=0" in printed
