"""What ``bentoml build`` packs besides a service's own files: pagedcore, the versions it runs with here, and its model.

A hub id is not packed; give ``bentoml.models.HuggingFaceModel`` in its place, which BentoML brings along.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from hashlib import sha256
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import attrs
from bentoml.images import Image
from packaging.requirements import Requirement

from pagedcore.errors import InvalidConfig

_NAME: Final = "pagedcore"
_EXTRA: Final = "bentoml"
_ROOT: Final = Path(__file__).resolve().parents[2]
"""The checkout that this file is part of, unless it is installed."""


@attrs.define
class PagedCoreImage(Image):
    """An environment for a service on pagedcore; ``bento_image`` makes one."""

    model: Any = None

    def freeze(self, bento_fs: Path, *args: Any, **more: Any) -> Any:
        """Put wheel, versions and model into a bento that is being built.

        Raises:
            InvalidConfig: pagedcore is installed from a place of which pip makes no wheel.
        """
        project = Path(bento_fs, "src")
        if is_directory(self.model):
            shutil.copytree(self.model, project / packed_name(self.model), dirs_exist_ok=True)
        if _NAME not in self.python_requirements:
            self.python_packages(*_requirements(project / "wheels"))
        return super().freeze(bento_fs, *args, **more)


def bento_image(model: Any = None, **options: Any) -> PagedCoreImage:
    """Return the ``image`` of a service, for ``bentoml.service(image=...)``; ``create_service`` sets it by itself.

    Versions are not locked by BentoML, which would ask an index for other builds: they are those installed here.

    Args:
        model: the service's model; a directory is packed.
        **options: of ``bentoml.images.Image``, such as ``python_version``.
    """
    return PagedCoreImage(model=model, **{"lock_python_packages": False, **options})


def packed_model(model: Any) -> Any:
    """Return the copy of a directory in the bento that is being served, or the model as it is."""
    if isinstance(model, str | os.PathLike) and (copy := Path(packed_name(model))).is_dir():
        return str(copy)
    return model


def is_directory(model: Any) -> bool:
    """Whether a model is a directory here; "demo" comes with pagedcore."""
    return isinstance(model, str | os.PathLike) and model != "demo" and Path(model).is_dir()


def packed_name(model: str | os.PathLike[str]) -> str:
    """Return the name of a directory's copy; different directories have different ones."""
    return f"pagedcore-model-{sha256(os.fspath(model).encode()).hexdigest()[:16]}"


def _requirements(wheels: Path) -> list[str]:
    source = _source()
    if source is None:
        dist = metadata.distribution(_NAME)
        return [f"{_NAME}[{_EXTRA}]=={dist.version}", *_versions(dist.requires or ())]
    wheel = _make_wheel(source, wheels)
    (dist,) = metadata.distributions(path=[str(wheel)])
    return [f"./wheels/{wheel.name}", *_versions(dist.requires or ())]


def _source() -> str | None:
    """Return what pip can make a wheel of, or ``None`` if pagedcore comes from an index."""
    if (_ROOT / "pyproject.toml").is_file():
        return str(_ROOT)
    origin = json.loads(metadata.distribution(_NAME).read_text("direct_url.json") or "null")
    if origin is None:
        return None
    vcs = origin.get("vcs_info")
    return f"{vcs['vcs']}+{origin['url']}@{vcs['commit_id']}" if vcs else str(origin["url"])


def _make_wheel(source: str, wheels: Path) -> Path:
    wheels.mkdir(parents=True, exist_ok=True)
    # Why: an isolated build would fetch what is installed already.
    isolation = ["--no-build-isolation"] if find_spec("hatchling") else []
    made = subprocess.run([sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", *isolation, "--wheel-dir",
                           str(wheels), source], capture_output=True, text=True, check=False)
    found = sorted(wheels.glob(f"{_NAME}-*.whl"))
    if made.returncode or not found:
        # Safety: pip's own words name paths; the operator sees them on the terminal.
        sys.stderr.write(made.stderr)
        raise InvalidConfig("bento: pip could not make a wheel of the pagedcore that is installed here. Install it "
                            "from a checkout, a wheel or an index.")
    return found[-1]


def _versions(requires: Iterable[str]) -> list[str]:
    """Return what a service needs besides BentoML, which adds itself, at the versions that are installed here."""
    wanted = [one for one in map(Requirement, requires) if one.marker is None or one.marker.evaluate({"extra": _EXTRA})]
    names = [one.name for one in wanted if one.name != "bentoml"]
    # Why: an index does not have the local builds that follow the plus sign.
    return [f"{name}=={metadata.version(name).partition('+')[0]}" for name in names]
