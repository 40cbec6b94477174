"""Installing: pip finds versions that agree, whichever build of torch its index has."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import threading
import tomllib
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from architecture.sources import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONSTRAINTS, CUDA = "constraints.txt", "constraints-cuda.txt"


def pins(*files: str) -> dict[str, str]:
    lines = [line for file in files for line in (ROOT / file).read_text(encoding="utf-8").splitlines()]
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def toolkit(compiler: str) -> list[str]:
    """What a release of cuda-toolkit asks for, of its parts that torch or a kernel's compiler needs."""
    parts = {"nvvm": f"nvidia-nvvm=={compiler}.*", "nvrtc": f"nvidia-cuda-nvrtc=={compiler}.*",
             "nvjitlink": f"nvidia-nvjitlink<14,>={compiler}"}
    return [f'{requirement}; extra == "{extra}"' for extra, requirement in parts.items()]


# Recorded from the wheels of the index: what they ask for beyond what other packages of the list ask for too.
TORCH_FOR_CUDA = [
    "cuda-toolkit[cublas,cudart,cufft,cufile,cupti,curand,cusolver,cusparse,nvjitlink,nvrtc,nvtx]==13.0.3",
    "cuda-bindings<14,>=13.0.3", "nvidia-cudnn-cu13==9.20.0.48", "nvidia-cusparselt-cu13==0.8.1",
    "nvidia-nccl-cu13==2.29.7", "nvidia-nvshmem-cu13==3.4.5", "triton==3.7.1",
]
RECORDED: dict[str, dict[str, list[str]]] = {
    "cuda-toolkit": {"13.0.3": toolkit("13.0.88"), "13.4.3": toolkit("13.4.92")},
    "nvidia-nvvm": {"13.0.88": [], "13.4.92": []},
    "nvidia-cuda-nvrtc": {"13.0.88": [], "13.4.92": []},
    "nvidia-nvjitlink": {"13.0.88": [], "13.5.37": []},
    "nvidia-cudnn-cu13": {"9.20.0.48": []},
    "nvidia-cusparselt-cu13": {"0.8.1": []},
    "nvidia-nccl-cu13": {"2.29.7": []},
    "nvidia-nvshmem-cu13": {"3.4.5": []},
    "triton": {"3.7.1": []},
    "numba-cuda": {"0.30.4": ["numba>=0.60.0", "cuda-bindings<14.0.0,>=12.9.1", "cuda-core<2.0.0,>=0.5.1",
                              "cuda-pathfinder<2.0.0,>=1.4.0"]},
    "cuda-bindings": {"13.4.4": ["cuda-pathfinder>=1.4.2"]},
}


def stand_in(folder: Path, name: str, version: str, requirements: list[str]) -> None:
    """Write a wheel with nothing in it but a name, a version and what it asks for."""
    stem = f"{name.replace('-', '_')}-{version}"
    extras = sorted({text.split('"')[-2] for text in requirements if "; extra ==" in text})
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    metadata += [f"Provides-Extra: {extra}" for extra in extras] + [f"Requires-Dist: {text}" for text in requirements]
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{stem}.dist-info/METADATA", "\n".join(metadata) + "\n")
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


def of_this_project() -> list[str]:
    """Everything that pyproject.toml asks for, as metadata."""
    found = list(PROJECT["dependencies"])
    for extra, requirements in PROJECT["optional-dependencies"].items():
        found += [f'{text}; extra == "{extra}"' for text in requirements]
    return found


@pytest.fixture(scope="module", params=["CUDA", "CPU"])
def index(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pip takes for its index, with one of the two builds of torch."""
    folder = tmp_path_factory.mktemp("index")
    known = RECORDED | {"torch": {pins(CONSTRAINTS)["torch"]: TORCH_FOR_CUDA if request.param == "CUDA" else []}}
    for name, versions in known.items():
        for version, requirements in versions.items():
            stand_in(folder, name, version, requirements)
    for name, version in pins(CONSTRAINTS).items():
        if name not in known:
            stand_in(folder, name, version, [])
    stand_in(folder, "pagedcore", "0.1.0", of_this_project())
    return folder


@pytest.mark.parametrize(("extras", "files"), [
    ("[cuda]", [CONSTRAINTS]), ("[test,browser,formats,interop-ray,pytest]", [CONSTRAINTS, CUDA]),
    *(pytest.param(extras, files, marks=pytest.mark.slow) for extras, files in (
        ("", [CONSTRAINTS]), ("[test]", [CONSTRAINTS, CUDA]),
        ("[browser,formats,interop-ray,pytest]", [CONSTRAINTS, CUDA]),
    )),
])
def test_every_pin_agrees_with_both_builds_of_torch(index: Path, extras: str, files: list[str]) -> None:
    """pip installs the project under its constraints from an index with torch for CUDA, and with that for CPUs."""
    constraints = [word for file in files for word in ("-c", str(ROOT / file))]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--isolated", "install", "--dry-run", "--ignore-installed", "--no-index",
         "--find-links", index, *constraints, f"pagedcore{extras}"],
        env={**os.environ, "PIP_CONFIG_FILE": os.devnull}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "pagedcore-0.1.0" in done.stdout.splitlines()[-1]


def test_every_direct_dependency_is_pinned_once() -> None:
    """What pyproject.toml names has one tested version, in one of the two files."""
    first, second = pins(CONSTRAINTS), pins(CUDA)
    named = {canonicalize_name(Requirement(text).name) for text in of_this_project()} - {"pagedcore"}
    assert named - set(first) - set(second) == set()
    assert set(first) & set(second) == set()


class BigTorch(BaseHTTPRequestHandler):
    """An index that has torch for CUDA, as far as one can see without downloading it."""

    def do_GET(self) -> None:
        wheel = f"torch-{pins(CONSTRAINTS)['torch']}-py3-none-any.whl"
        page = f'<a href="/files/{wheel}">{wheel}</a>'.encode() if self.path == "/torch/" else b""
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(page) if page else 526_600_000))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(page)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def big_index() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), BigTorch)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_the_build_of_torch_is_named_before_it_is_fetched(
    big_index: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size, the environment's, and how to take the build for CPUs; a build for CPUs is named as one."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", big_index)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    script = runpy.run_path(str(ROOT / ".ci" / "before_install.py"))
    said = script["torch_to_fetch"](sys.executable)
    assert all(words in said for words in ("with CUDA: 527 MB", "5 GB", "for CPUs", "pytorch.org"))
    stand_in(tmp_path, "torch", f"{pins(CONSTRAINTS)['torch']}+cpu", [])
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert script["torch_to_fetch"](sys.executable).endswith("+cpu, a build for CPUs.")


def test_a_python_that_is_too_old_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence with the version that is needed, the present one and what to do."""
    script = runpy.run_path(str(ROOT / ".ci" / "before_install.py"))
    assert f">={'.'.join(map(str, script['OLDEST']))}" == PROJECT["requires-python"]
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    with pytest.raises(SystemExit, match=r"needs Python 3\.11 or newer.* is 3\.10\. .*PYTHON="):
        script["main"]()
