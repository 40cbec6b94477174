"""The command `python -m pagedcore_ptxsim`: what it prints, and which exit status says what."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pagedcore_ptxsim import LaunchError, command
from ptxsim.ptx_texts import kernel

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "ptxsim.md").read_text(encoding="utf-8")
COUNT_UP = kernel("""
    ld.param.u64 %rd1, [p0]; ld.param.u32 %r2, [p1]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2; setp.ge.u32 %p1, %r1, %r2;
    @%p1 bra END;
    st.global.u32 [%rd3], %r1;
END:
""", ["u64", "u32"])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with kernels, and the current one."""
    (tmp_path / "reverse.ptx").write_text(re.findall(r'PTX = """(.*?)"""', PAGE, flags=re.DOTALL)[0])
    (tmp_path / "count.ptx").write_text(COUNT_UP)
    (tmp_path / "texture.ptx").write_text(kernel("tex.1d.v4.f32.f32 {%f1,%f2,%f3,%f4}, [p0, {%f5}];\ncvt.x.y %r1, 1;"))
    (tmp_path / "endless.ptx").write_text(kernel("L: bra L;"))
    (tmp_path / "broken.ptx").write_text(COUNT_UP.removesuffix("}\n"))
    (tmp_path / "binary.ptx").write_bytes(b"\xff\xfe")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_shows_what_the_command_prints(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command on the page prints what stands below it."""
    (console,) = re.findall(r"```console\n(.*?)```", PAGE, flags=re.DOTALL)
    shown = re.findall(r"^\$ python -m pagedcore_ptxsim (.*)\n((?:[^$].*\n)*)", console, flags=re.MULTILINE)
    assert len(shown) == 4
    for line, output in shown:
        command.main(shlex.split(line))
        assert capsys.readouterr().out == output


def test_the_examples_of_the_readme_run(folder: Path) -> None:
    """The README's program runs as it stands, and so does every command below it."""
    readme = (ROOT / "kernels" / "pagedcore_ptxsim" / "README.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    (folder / "program.py").write_text(program)
    (folder / "kernel.ptx").write_text(re.findall(r'PTX = """(.*?)"""', program, flags=re.DOTALL)[0])
    (commands,) = re.findall(r"```console\n(.*?)```", readme, flags=re.DOTALL)
    assert len(commands.splitlines()) == 4
    for line in ["python program.py", *commands.splitlines()]:
        words = [sys.executable, *shlex.split(line)[1:]]
        subprocess.run(words, env={"PYTHONPATH": str(ROOT / "kernels")}, check=True, capture_output=True)


@pytest.mark.parametrize(("line", "status", "expected"), [
    ("count.ptx", 0, "k(.u64 p0, .u32 p1): 9 instructions"),
    ("count.ptx k u32[32] 32", 0, "[ 0  1  2 ... 29 30 31]"),
    ("count.ptx k --block 2,4,2 --grid 1,1 u32[2]=7 1", 0, "[0 7]"),
    ("count.ptx k u32[4] 0", 0, "never ran: line"),
    ("count.ptx k u32[20] 32", 1, "MemoryFault: global store of 4 bytes"),
    ("endless.ptx k --max-steps 100 0 0", 1, "Runaway"),
    ("count.ptx k --mutants u32[8] 32", 1, "MemoryFault"),
    ("count.ptx k --mutants u32[32] 32", 1, "mutants: 2, unnoticed: 1"),
    ("count.ptx k --mutants u32[32] 8", 0, "mutants: 2, unnoticed: 0"),
    ("texture.ptx", 1, "unsupported: line 12: cvt.x.y"),
    ("texture.ptx k 0 0", 1, "UnsupportedPtx: line 11: no implementation of tex"),
    ("reverse.ptx rev --block 64 --no-races u32[64]=range 64", 0, "[63 62 61 ...  2  1  0]"),
])
def test_what_is_found_is_printed(line: str, status: int, expected: str, folder: Path,
                                  capsys: pytest.CaptureFixture[str]) -> None:
    """Results and findings go to standard output; the status is 1 if there is a finding."""
    assert command.main(shlex.split(line)) == status
    printed = capsys.readouterr()
    assert expected in printed.out
    assert printed.err == ""


@pytest.mark.parametrize(("line", "expected"), [
    ("nowhere.ptx", "FileNotFoundError"), ("binary.ptx", "UnicodeDecodeError"), ("broken.ptx", "PtxSyntaxError"),
    ("count.ptx other 0 0", "LaunchError: 0 kernels match 'other'"), ("count.ptx k", "0 arguments"),
    ("count.ptx k --block 0 0 0", "block is (0,)"), ("count.ptx k u32[4]=@nowhere 4", "FileNotFoundError"),
    ("count.ptx k u32[4]=@count.ptx 4", "elements"),
])
def test_what_cannot_be_run_is_an_error(line: str, expected: str, folder: Path,
                                        capsys: pytest.CaptureFixture[str]) -> None:
    """A file, a name or arguments that do not fit give one line on standard error and status 2."""
    assert command.main(shlex.split(line)) == 2
    printed = capsys.readouterr()
    assert expected in printed.err
    assert printed.out == ""


def test_wrong_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """An option that is not known, or a grid that is no number, is refused with the usage and status 2."""
    for line in (["x.ptx", "--gird", "1"], ["x.ptx", "k", "--grid", "many"], []):
        with pytest.raises(SystemExit) as raised:
            command.main(line)
        assert raised.value.code == 2
        assert "usage: python -m pagedcore_ptxsim" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "value"), [
    ("7", 7), ("-1", -1), ("0x10", 16), ("0.5", 0.5), ("u8[3]", np.zeros(3, np.uint8)),
    ("s32[2,2]=1,-2", np.array([[1, -2], [1, -2]], np.int32)), ("u64[4]=range", np.arange(4, dtype=np.uint64)),
    ("f16[2]=1.5", np.full(2, 1.5, np.float16)), ("bf16[2]=1,-2", np.array([0x3F80, 0xC000], np.uint16)),
])
def test_arguments_are_numbers_and_arrays(text: str, value: object) -> None:
    """A number stands for itself, and an array is described by type, shape and content."""
    found = command.parse_argument(text)
    assert np.array_equal(np.asarray(found), np.asarray(value))
    assert getattr(found, "dtype", type(found)) == getattr(value, "dtype", type(value))


def test_arrays_can_be_random_or_from_a_file(tmp_path: Path) -> None:
    """A random array is the same each time; a file gives its bytes, in the array's type and shape."""
    values = np.arange(6, dtype=np.float32)
    values.tofile(tmp_path / "values")
    found = command.parse_argument(f"f32[2,3]=@{tmp_path / 'values'}")
    assert np.array_equal(np.asarray(found), values.reshape(2, 3))
    once, again = (np.asarray(command.parse_argument("f32[100]=random")) for _ in range(2))
    assert np.array_equal(once, again)
    assert once.std() > 0.5


@pytest.mark.parametrize("text", ["x", "f32[]", "f32[a]", "f33[4]", "pred[4]", "u8[4]=300", "u8[4]=1.5", "s32[4]=a",
                                  "u8[4]=-1", "f32[4]=1,", "f32[-1]", "f32[999999,999999]=random", "u8[134217729]"])
def test_wrong_arguments_are_refused(text: str) -> None:
    """What describes neither a number nor an array is refused, quoting it."""
    with pytest.raises(LaunchError, match=re.escape(text)):
        command.parse_argument(text)
