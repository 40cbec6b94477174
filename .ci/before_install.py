"""Said before anything is installed: whether this Python is new enough, and which torch pip is about to fetch.

``python3 .ci/before_install.py`` checks the Python that runs it, which may be any; with the path of an environment's
Python it then asks that environment's pip. Nothing is downloaded; at a terminal there are 5 s to stop.
"""

import subprocess
import sys
import time

OLDEST = (3, 11)
CUDA_BUILD = 400e6  # bytes of a wheel; builds for CPUs have 200 MB at most
ASK_PIP = """
from pip._internal.commands import create_command
from pip._vendor.packaging.specifiers import SpecifierSet

install = create_command("install")
options, _ = install.parse_args(["-q", "torch"])
with install.main_context():
    session = install.get_default_session(options)
    found = install._build_package_finder(options, session).find_best_candidate("torch", SpecifierSet("=={version}"))
    link = found.best_candidate.link
    size = 0 if link.is_file else session.head(link.url_without_fragment).headers.get("content-length", 0)
    print(found.best_candidate.version, size)
"""
CUDA = """
pip will fetch torch {version} with CUDA: {size:.0f} MB, and with it 2 GB of NVIDIA's libraries. The environment
will take 5 GB of disk. pagedcore computes on CPUs with the build for CPUs too, in an environment of 1.5 GB: to take
it, stop here, install torch=={version} into the environment from PyTorch's index for CPUs (the selector on
pytorch.org has the command; the environment's pip is {python} -m pip), and repeat this command.
"""


def main(python=None):
    """Exit with a sentence on a Python that is too old; else say which torch ``python``'s pip will fetch."""
    if sys.version_info < OLDEST:
        sys.exit("pagedcore needs Python %d.%d or newer, and %s is %d.%d. Name another: make demo PYTHON=python3.13"
                 % (OLDEST + (sys.executable,) + tuple(sys.version_info[:2])))
    has_torch = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    if python is not None and subprocess.call([python, "-c", has_torch]):
        sys.stdout.write(torch_to_fetch(python) + "\n")
        sys.stdout.flush()
        if sys.stdin.isatty():
            time.sleep(5)


def torch_to_fetch(python):
    """Return a sentence on the build of torch that pip will choose."""
    with open("constraints.txt") as file:
        version = next(line.strip().partition("==")[2] for line in file if line.startswith("torch=="))
    asked = subprocess.run([python, "-c", ASK_PIP.replace("{version}", version)], stdout=subprocess.PIPE,
                           stderr=subprocess.DEVNULL, universal_newlines=True)
    found, _, size = asked.stdout.strip().rpartition("\n")[2].partition(" ")
    if asked.returncode or not found:
        return "pip will fetch torch %s; with CUDA, the default on Linux, an environment takes 5 GB of disk." % version
    if float(size) > CUDA_BUILD:
        return CUDA.format(version=version, size=float(size) / 1e6, python=python)
    return "pip will fetch torch %s, a build for CPUs." % found


if __name__ == "__main__":
    main(*sys.argv[1:])
