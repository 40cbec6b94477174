"""Compiled kernels on disk: written whole, read only if whole, and found for the right GPU."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pagedcore.errors import InternalError, InvalidConfig, MissingDependency
from pagedcore_kernels.cuda.build import images, library, toolchain
from pagedcore_kernels.cuda.build.images import ImageStore, KernelImage
from pagedcore_kernels.cuda.build.library import KernelLibrary, runs_on
from pagedcore_kernels.cuda.build.variants import make_source, parameters_of, shipped_names
from pagedcore_kernels.cuda.build.wheel import installed_kernels, write_wheel

needs_compiler = pytest.mark.skipif(
    bool(toolchain.missing_compiler_parts()), reason="needs pagedcore[cuda] to make kernels"
)


def image(arch: str = "sm_90", cubin: bytes = b"\x7fELF\n\0code") -> KernelImage:
    return KernelImage("norm-bf16-1", arch, "entry", 256, 0, 32, toolchain.compiler_versions(), cubin)


def test_an_image_survives_the_disk(tmp_path: Path) -> None:
    """What was written is what is read, newlines in the cubin included, and only for its name and architecture."""
    store = ImageStore(tmp_path / "new")
    path = store.write(image())
    assert store.read("norm-bf16-1", "sm_90") == image()
    assert store.read("norm-bf16-1", "sm_80") is None
    assert store.read("decode", "sm_90") is None
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("damage", [
    lambda content: content[:-1], lambda content: content.replace(b"code", b"c0de"), lambda content: b"",
    lambda content: b"[]\n", lambda content: content.replace(b'"format": 1', b'"format": 2'),
    lambda content: content.replace(b'"threads": 256, ', b""),
])
def test_a_damaged_image_is_not_used(tmp_path: Path, damage: object) -> None:
    """A cut, altered, empty or foreign file counts as absent, so that the kernel is compiled again."""
    store = ImageStore(tmp_path)
    path = store.write(image())
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    assert store.read("norm-bf16-1", "sm_90") is None


def test_an_image_of_other_sources_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a kernel's source changes, what was compiled before is not found any more."""
    store = ImageStore(tmp_path)
    store.write(image())
    monkeypatch.setattr(images, "source_digest", lambda: "0" * 16)
    assert store.read("norm-bf16-1", "sm_90") is None


def imported(path: Path, package: Path) -> set[Path]:
    """The files of the package that a file imports, wherever in it."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom) and node.module]
    names = {f"{node.module}{name}" for node in nodes for name in ("", *(f".{alias.name}" for alias in node.names))}
    files = {package / (name.removeprefix("pagedcore_kernels.cuda.").replace(".", "/") + ".py") for name in names}
    return {file for file in files if file.exists()}


def test_whatever_a_kernel_is_made_of_is_part_of_its_key(tmp_path: Path) -> None:
    """A change of any file that the compiler imports gives another digest; a file that is gone is an error, and another
    Python other versions."""
    package = tmp_path / "cuda"
    shutil.copytree(Path(images.__file__).parents[1], package)
    sources, new = set[Path](), {package / "build" / "compiler.py"}
    while new:
        sources |= new
        new = {other for path in new for other in imported(path, package)} - sources
    # Why: what the tools are called and which versions they have is in the key by itself.
    sources -= {package / "build" / "toolchain.py"}
    assert len(sources) > 15
    digests = [images.digest_of(package)]
    assert digests == [images.source_digest()]
    for path in sorted(sources):
        path.write_text(path.read_text() + "# changed")
        digests.append(images.digest_of(package))
    assert len(set(digests)) == 1 + len(sources)
    (package / "shapes.py").rename(package / "elsewhere.py")
    with pytest.raises(InternalError, match=r"no source shapes\.py"):
        images.digest_of(package)
    assert toolchain.compiler_versions()["python"] == platform.python_version()


def test_the_tools_of_cuda_12_are_known_by_what_brings_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of a release before 13 say so, as a driver for that release loads them and no later ones."""
    installed = {"nvidia-cuda-nvcc-cu12": "12.9.86", "nvidia-nvjitlink-cu12": "12.9.85", "numba-cuda": "0.30.4"}

    def version(package: str) -> str:
        if package not in installed:
            raise importlib.metadata.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(toolchain, "_system_library", lambda name: None)
    found = toolchain._compiler_versions.__wrapped__()
    assert (found["nvidia-nvvm"], found["nvidia-nvjitlink"], found["llvmlite"]) == ("12.9.86", "12.9.85", "none")


def test_a_directory_that_everybody_may_write_to_is_refused(tmp_path: Path) -> None:
    """Cubins are code: they are not taken from where anybody could have put them."""
    ImageStore(tmp_path).write(image())
    os.chmod(tmp_path, 0o777)
    with pytest.raises(InvalidConfig, match="everybody may write"):
        ImageStore(tmp_path).read("norm-bf16-1", "sm_90")


def test_gpus_run_what_was_built_for_older_ones_of_their_generation(tmp_path: Path) -> None:
    """A prebuilt image for sm_80 serves sm_86, and one for sm_90 does not."""
    assert runs_on("sm_86")[:2] == ["sm_86", "sm_85"]
    ImageStore(tmp_path).write(image("sm_80"))
    assert KernelLibrary([tmp_path], tmp_path / "cache").find("norm-bf16-1", "sm_86").arch == "sm_80"


def test_kernels_are_found_where_pip_has_put_their_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel has what was written, pip takes it as whole, and a library over it finds the kernels."""
    assert installed_kernels() is None
    wheel = write_wheel(tmp_path, "1.2.3", [ImageStore(tmp_path / "built").write(image("sm_90"))])
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", tmp_path / "site"]
    subprocess.run([*install, wheel], check=True)
    monkeypatch.syspath_prepend(tmp_path / "site")
    found = installed_kernels()
    assert found is not None
    assert KernelLibrary([found], tmp_path / "cache").find("norm-bf16-1", "sm_90") == image("sm_90")
    (metadata,) = (tmp_path / "site").glob("*/METADATA")
    assert "Requires-Dist: pagedcore==1.2.3\n" in metadata.read_text()


def test_without_a_compiler_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that was not built, on a machine that cannot build it, names the extra and the command."""
    monkeypatch.setattr(library, "missing_compiler_parts", lambda: ["numba-cuda", "nvidia-nvvm"])
    message = r"numba-cuda, nvidia-nvvm.*pagedcore\[cuda\].*kernels build --arch sm_90"
    with pytest.raises(MissingDependency, match=message):
        KernelLibrary(cache=tmp_path).find("norm-bf16-1", "sm_90")


def test_a_compiler_that_cannot_be_imported_is_told_from_one_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal has the reason: installing the extra again would not help."""
    (tmp_path / "broken_tools").mkdir()
    (tmp_path / "broken_tools" / "__init__.py").touch()
    (tmp_path / "broken_tools" / "parts.py").write_text("import numpy; numpy.no_such_name")
    monkeypatch.syspath_prepend(tmp_path)
    modules = ("broken", "broken_tools.parts"), ("absent", "no_such.module")
    monkeypatch.setattr(toolchain, "_COMPILER_MODULES", modules)
    reason = r"broken \(importing it failed: AttributeError: .*no_such_name.*\), absent not found"
    with pytest.raises(MissingDependency, match=reason):
        toolchain.require_compiler()


def test_a_cache_of_other_tools_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached image is used as long as the tools are the same, and also where there are none."""
    built: list[str] = []

    def build(name: str, arch: str) -> KernelImage:
        built.append(name)
        return image()

    monkeypatch.setattr(library, "build_image", build)
    monkeypatch.setattr(library, "missing_compiler_parts", list)
    found = KernelLibrary(cache=tmp_path)
    assert found.find("norm-bf16-1", "sm_90") == found.find("norm-bf16-1", "sm_90")
    assert built == ["norm-bf16-1"]
    monkeypatch.setattr(library, "compiler_versions", lambda: {"numba-cuda": "9.9"})
    found.find("norm-bf16-1", "sm_90")
    assert built == ["norm-bf16-1", "norm-bf16-1"]
    monkeypatch.setattr(library, "missing_compiler_parts", lambda: ["numba-cuda"])
    found.find("norm-bf16-1", "sm_90")
    assert built == ["norm-bf16-1", "norm-bf16-1"]


def test_an_old_linker_is_explained() -> None:
    """nvJitLink older than NVVM is the usual trap; the error says what to install instead."""
    error = toolchain.explain_link_failure("ptxas fatal: Unsupported .version 9.4; current is 9.0", ".version 9.4\n")
    assert "PTX 9.4" in str(error)
    assert "cuda-toolkit[nvvm,nvjitlink]" in str(error)
    assert "undefined thing" in str(toolchain.explain_link_failure("error: undefined thing", ""))


@needs_compiler
@pytest.mark.parametrize("name", [
    "nothing", "decode-bf16", "decode-bf16-f64-64-64", "sample-2", "rotate-bf16-bf16-thirds"])
def test_unknown_names_are_refused(name: str) -> None:
    """A name that stands for no kernel is an InvalidConfig."""
    with pytest.raises(InvalidConfig, match="kernel"):
        make_source(name)


@pytest.mark.parametrize("arch", ["sm_75", "90", "compute_90", "sm_9", ""])
def test_unknown_architectures_are_refused(arch: str, tmp_path: Path) -> None:
    """GPUs before sm_80 and names that are none are refused by name."""
    with pytest.raises(InvalidConfig, match="arch"):
        KernelLibrary(cache=tmp_path).find("norm-bf16-1", arch)


@needs_compiler
def test_shipped_kernels_take_the_parameters_that_launches_give() -> None:
    """The letters by which a launch packs arguments are those by which the kernel was compiled; names are unique."""
    names = shipped_names((9, 0))
    assert len(names) == len(set(names))
    assert not [name for name in shipped_names((8, 0)) if "e4m3" in name]
    for name in (names[0], *names[1:4]):
        source = make_source(name)
        assert source.parameters == parameters_of(name)
        assert len(source.parameters) == source.function.__code__.co_argcount
