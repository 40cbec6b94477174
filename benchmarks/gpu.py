"""Everything there is to find out on a GPU, unattended: python benchmarks/gpu.py --out RESULTS [STAGE ...]

First, on any machine with pagedcore[cuda]:   python benchmarks/gpu.py build --kernels KERNELS
Then, where the GPU is (it needs torch of any build, NumPy, pytest and cuda-bindings, no compiler):
                                              python benchmarks/gpu.py --kernels KERNELS --out RESULTS

Each stage runs in a process of its own for at most ten minutes and writes RESULTS/STAGE.json and STAGE.md after every
row, so that whatever ends a run leaves what was known. benchmarks/h200.md says what is expected.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests"), str(ROOT / "benchmarks")]

import gpu_stages as stages  # noqa: E402
from gpu_device import CudaDevice  # noqa: E402

from pagedcore_kernels.cuda.build.images import ImageStore, source_digest  # noqa: E402

STAGES = ("correctness", "stress", "sanitizer", "decode", "prefill", "gaps", "sweeps")
STAGE_S = 600


def main(arguments: list[str] | None = None, make_gpu: Any = CudaDevice) -> int:
    """Run stages; returns 0 if each of them came to its end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stages", nargs="*", help=f"build, or any of: {', '.join(STAGES)}; all of these by default")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder for results")
    parser.add_argument("--kernels", type=Path, default=Path("build/gpu-kernels"), help="folder of compiled kernels")
    parser.add_argument("--arch", default="sm_90", help="what `build` compiles for")
    parser.add_argument("--small", action="store_true", help="as little as control flow allows")
    parser.add_argument("--here", action="store_true", help="in this process, without a limit of time")
    options = parser.parse_args(arguments)
    wanted = options.stages or list(STAGES)
    if unknown := sorted(set(wanted) - {*STAGES, "build"}):
        parser.error(f"unknown stage {', '.join(unknown)}; known: build, {', '.join(STAGES)}")
    if "build" in wanted:
        build(options.kernels, options.arch, options.small)
        wanted.remove("build")
    if not wanted:
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    run = run_here if options.here else run_apart
    done = [run(name, options, make_gpu) for name in wanted]
    summarise(options.out, wanted)
    return 0 if all(done) else 1


def build(kernels: Path, arch: str, small: bool) -> None:
    """Compile everything that the stages launch; what is there already is kept."""
    from pagedcore_kernels.cuda.build.compiler import parse_arch
    from pagedcore_kernels.cuda.build.library import build_image
    from pagedcore_kernels.cuda.build.variants import shipped_names
    from pagedcore_kernels.cuda.shapes import AttentionShape, Format

    sizes = stages.SMALL if small else stages.FULL
    decode = sizes.layer.kernel("decode")
    names = {stages.GAP_NAME, decode, sizes.layer.kernel("prefill"), *stages.gate_kernels(sizes)}
    if not small:
        names.update(shipped_names(parse_arch(arch)))
        # The demo model's, for gpu_engine.py: a head size that does not ship.
        names.update({*stages.kernels_of(AttentionShape(32, 32, Format.BF16, Format.BF16))})
    for name in sorted(names):
        _build_one(ImageStore(kernels), name, arch, build_image)
    for depth in stages.STAGE_DEPTHS:
        with stages.ring_of(depth):
            _build_one(ImageStore(kernels / f"ring-{depth}"), decode, arch, build_image)


def _build_one(store: ImageStore, name: str, arch: str, build_image: Any) -> None:
    if store.read(name, arch) is None:
        begin = time.perf_counter()
        store.write(build_image(name, arch))
        print(f"{store.directory.name}/{name}: {time.perf_counter() - begin:.1f} s", flush=True)


def run_apart(name: str, options: argparse.Namespace, make_gpu: Any) -> bool:
    """Run a stage in a process of its own: a fault of the GPU ends that process and not the next stage."""
    command = [sys.executable, __file__, name, "--here", "--out", str(options.out), "--kernels", str(options.kernels)]
    command += ["--small"] * options.small
    try:
        return subprocess.run(command, timeout=STAGE_S, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        write(options.out, name, {"stage": name, "failure": f"not done within {STAGE_S} s"}, keep_rows=True)
        return False


def run_here(name: str, options: argparse.Namespace, make_gpu: Any) -> bool:
    """Run a stage and write what it finds, an error included."""
    head: dict[str, Any] = {"stage": name, "started": time.strftime("%Y-%m-%d %H:%M:%S"), "failure": "not at its end",
                            "python": platform.python_version(), "torch": stages.torch.__version__,
                            "sources": source_digest(), "small": options.small}
    begin = time.perf_counter()

    def save(report: stages.Report) -> None:
        seconds = round(time.perf_counter() - begin, 1)
        write(options.out, name, head | {"seconds": seconds, "rows": report.rows, "notes": report.notes})

    report = stages.Report(save)
    save(report)
    try:
        with tempfile.TemporaryDirectory(prefix="pagedcore-gpu-") as folder:
            kernels = private_copy(options.kernels, Path(folder))
            gpu = make_gpu([kernels])
            head |= gpu.describe()
            measure(name, gpu, report, argparse.Namespace(**vars(options) | {"kernels": kernels}), make_gpu)
        head["failure"] = ""
    except Exception as error:
        head["failure"] = f"{type(error).__name__}: {error}"
        head["traceback"] = traceback.format_exc()[-3000:]
    save(report)
    print((options.out / f"{name}.md").read_text(), flush=True)
    return not head["failure"]


def private_copy(kernels: Path, private: Path) -> Path:
    """Copy the kernels to a folder that only this user can write, which is asked for before they are run."""
    for file in kernels.rglob("*.kernel"):
        target = private / file.relative_to(kernels)
        target.parent.mkdir(exist_ok=True, mode=0o700)
        target.write_bytes(file.read_bytes())
    return private


def measure(name: str, gpu: Any, report: stages.Report, options: argparse.Namespace, make_gpu: Any) -> None:
    """Call a stage with what it needs."""
    sizes = stages.SMALL if options.small else stages.FULL
    if name == "sanitizer":
        script = [__file__, "correctness", "--here", "--small", "--kernels", str(options.kernels),
                  "--out", str(options.out / "under-sanitizer")]
        stages.sanitizer(gpu, sizes, report, script)
    elif name == "sweeps":
        def deeper(depth: int) -> Any:
            folder = options.kernels / f"ring-{depth}"
            is_built = ImageStore(folder).read(sizes.layer.kernel("decode"), gpu.arch) is not None
            return make_gpu([folder, options.kernels]) if is_built else None

        stages.sweeps(gpu, sizes, report, deeper)
    else:
        getattr(stages, name)(gpu, sizes, report)


def write(out: Path, name: str, result: dict[str, Any], *, keep_rows: bool = False) -> None:
    """Write a stage's JSON and markdown; with ``keep_rows`` over what it had written itself."""
    path = out / f"{name}.json"
    if keep_rows and path.is_file():
        result = json.loads(path.read_text()) | result
    path.write_text(json.dumps(result, indent=1, default=str) + "\n")
    (out / f"{name}.md").write_text(markdown(result))


def markdown(result: dict[str, Any]) -> str:
    """A stage's result for people."""
    rows, notes = result.get("rows", []), result.get("notes", [])
    facts = {key: value for key, value in result.items() if key not in ("rows", "notes", "stage", "traceback")}
    lines = [f"## {result['stage']}", "", ", ".join(f"{key}: {value}" for key, value in facts.items() if value != "")]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if columns:
        lines += ["", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
        lines += ["| " + " | ".join(_cell(row.get(column, "")) for column in columns) + " |" for row in rows]
    return "\n".join([*lines, "", *(f"* {_cell(note)}" for note in notes), ""])


def _cell(value: Any) -> str:
    return str(value).replace("|", "/").replace("\n", " ")


def summarise(out: Path, wanted: list[str]) -> None:
    """Put the stages' pages together."""
    pages = [out / f"{name}.md" for name in wanted]
    (out / "summary.md").write_text("\n".join(page.read_text() for page in pages if page.is_file()))


if __name__ == "__main__":
    sys.exit(main())
