"""What ``bentoml build`` packs, and that it is served: with this environment and, by ``make bento``, with its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import bentoml
import httpx
import pytest

from adapters.bentoml.home import HOME
from adapters.bentoml.processes import bentoml_serve, environment
from architecture.sources import ROOT
from pagedcore.demo_model import DEMO_MODEL_DIR
from pagedcore.demo_model.questions import demo_questions, is_correct
from pagedcore.errors import InvalidConfig
from pagedcore_bentoml import PagedCoreRunner, bento_image, create_service, packing

SERVICE = ('from pathlib import Path\n\nfrom pagedcore_bentoml import create_service\n\n'
           'LLM = create_service("{model}", num_kv_blocks=64)\n')


@dataclass(frozen=True)
class Built:
    """A bento, and the folder that it was built in."""

    tag: str
    folder: Path

    @property
    def path(self) -> Path:
        """Where BentoML keeps it."""
        return Path(HOME, "bentos", *self.tag.split(":"))

    @property
    def requirements(self) -> list[str]:
        """What its environment has."""
        return (self.path / "env/python/requirements.txt").read_text(encoding="utf-8").split()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A bento of one line of code and a model directory outside of its folder, which is gone afterwards."""
    folder, model = tmp_path_factory.mktemp("service"), tmp_path_factory.mktemp("models") / "my-model"
    shutil.copytree(DEMO_MODEL_DIR, model)
    (folder / "service.py").write_text(SERVICE.format(model=model), encoding="utf-8")
    done = subprocess.run([sys.executable, "-m", "bentoml", "build", "service:LLM", "-o", "tag"], cwd=folder,
                          env=environment(), check=True, capture_output=True, text=True)
    shutil.rmtree(model)
    return Built(done.stdout.strip().splitlines()[-1].removeprefix("__tag__:"), folder)


def answers(url: str) -> bool:
    """Whether a served bento knows what the demo model knows."""
    question = demo_questions(1, seed=2)[0]
    body = {"prompt": question.prompt, "sampling": {"max_tokens": 64}}
    answer = httpx.post(f"{url}/generate", json=body, timeout=240.0).json()
    return is_correct(question, answer["outputs"][0]["text"])


@pytest.mark.slow
def test_a_bento_has_pagedcore_its_versions_and_the_model(built: Built) -> None:
    """The wheel of this checkout with every package, torch and all that pagedcore needs at the versions that are tested
    together and without names of local builds, and the directory's files."""
    wheel, *versions = built.requirements
    with zipfile.ZipFile(built.path / "src" / wheel) as packed:
        tops = {name.partition("/")[0] for name in packed.namelist() if ".dist-info" not in name}
    assert tops >= {"pagedcore", "pagedcore_kernels", "pagedcore_bentoml", "pagedcore_http"}
    pinned = dict(version.split("==") for version in versions)
    for name in ("torch", "transformers", "numba", "bentoml", "uvloop", "httptools"):
        assert pinned[name] == metadata.version(name).partition("+")[0]
    assert len(pinned) == len(versions)
    (model,) = built.path.glob("src/pagedcore-model-*")
    assert {path.name for path in model.iterdir()} == {path.name for path in DEMO_MODEL_DIR.iterdir()}


@pytest.mark.slow
def test_a_built_bento_is_served(built: Built) -> None:
    """With this environment it answers a question from the packed model, whose own directory is gone."""
    with bentoml_serve(built.tag, built.folder) as served:
        assert answers(served.url)


@pytest.mark.bento
def test_a_built_bento_is_served_by_its_own_environment(built: Built, tmp_path: Path) -> None:
    """Nothing but what its requirements name is installed, as its container does it, and nothing of this checkout is
    found; it answers a question."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "own")], check=True)
    python = tmp_path / "own/bin/python"
    requirements = built.path / "env/python/requirements.txt"
    subprocess.run([python, "-m", "pip", "install", "-q", "-r", requirements, "-c", ROOT / "constraints.txt"],
                   cwd=built.path / "src", check=True)
    own = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    found = subprocess.run([python, "-c", "import pagedcore; print(pagedcore.__file__)"], env=own, cwd=tmp_path,
                           check=True, capture_output=True, text=True)
    assert found.stdout.startswith(str(tmp_path))
    with bentoml_serve(built.tag, tmp_path, python=str(python), env=own) as served:
        assert answers(served.url)


def test_the_class_form_gets_the_image_by_name() -> None:
    """``bento_image`` is what the factory sets, and an image of the operator's own is left alone."""
    runner = type("LLM", (PagedCoreRunner,), {"model": "demo"})
    own = bentoml.images.Image()
    assert isinstance(bentoml.service(image=bento_image("demo"))(runner).image, packing.PagedCoreImage)
    assert create_service("x", service={"image": own}).image is own
    assert create_service("x").image.model == "x"


def test_a_release_is_named_and_not_packed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """pagedcore from an index is a requirement with its extra; there is no wheel."""
    monkeypatch.setattr(packing, "_source", lambda: None)
    named = packing._requirements(tmp_path / "wheels")
    assert named[0] == f"pagedcore[bentoml]=={metadata.version('pagedcore')}"
    assert any(one.startswith("torch==") for one in named)
    assert not (tmp_path / "wheels").exists()


class Installed:
    """A distribution that says where it came from."""

    def __init__(self, origin: str | None) -> None:
        self._origin = origin

    def read_text(self, name: str) -> str | None:
        """Return the record that pip writes."""
        assert name == "direct_url.json"
        return self._origin


@pytest.mark.parametrize(("origin", "source"), [
    (None, None), ('{"url": "file:///home/x/dist/p.whl", "archive_info": {}}', "file:///home/x/dist/p.whl"),
    ('{"url": "https://h/p.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}}', "git+https://h/p.git@abc"),
])
def test_where_pip_finds_what_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, origin: str | None, source: str | None
) -> None:
    """A local file or a repository is built again from there, a release is not."""
    monkeypatch.setattr(packing, "_ROOT", tmp_path)
    monkeypatch.setattr(packing.metadata, "distribution", lambda _: Installed(origin))
    assert packing._source() == source


def test_what_cannot_be_packed_is_told(tmp_path: Path) -> None:
    """A source that is gone is a typed error with pip's last line."""
    with pytest.raises(InvalidConfig, match=r"^bento: pip could not make a wheel"):
        packing._make_wheel(str(tmp_path / "gone"), tmp_path / "wheels")


def test_a_model_is_looked_for_in_the_bento_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The copy is taken if there is one where the service runs; names, objects and other directories stay."""
    monkeypatch.chdir(tmp_path)
    model: Any = tmp_path / "a"
    assert packing.packed_model(model) is model
    os.mkdir(packing.packed_name(model))
    assert packing.packed_model(model) == packing.packed_name(model) != packing.packed_name(tmp_path / "b")
    assert [packing.packed_model(one) for one in ("demo", "o/n", None, 5)] == ["demo", "o/n", None, 5]
