"""The C++ library: compiled for this machine's processor, cached, and loaded.

It is cached in $XDG_CACHE_HOME/kv_fast, by default ~/.cache/kv_fast, under a name that depends on sources, compiler and
instruction set. It needs $CXX, g++ or c++, with an OpenMP that goes with torch's.

Loading a library runs its code: a file is used only if it and its folder belong to us, nobody else may write to them,
and it ends with its own key and hash (`seal`). Any other is rebuilt, if need be in a folder of this process alone.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from runtime.errors import note_once
from runtime.folders import cache_folder

FOLDER = Path(__file__).parent
TORCH = Path(torch.__file__).parent
MAIN = "native.cpp"  # includes all others: one by one, with the headers five times, they took 13 s instead of 8
# no trapping, no errno: comparisons and roots can be vectorized. No flag changes results
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-Wno-psabi")
LINKING = ("-shared", "-Wl,-Bsymbolic")  # its symbols are global: it must call its own, not an older library's


def compiler() -> str:
    """The C++ compiler to use. Raises OSError if there is none."""
    for name in (os.environ.get("CXX", ""), "g++", "c++"):
        if found := shutil.which(name):
            return found
    raise OSError("no C++ compiler found")


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        lines = [x for x in done.stderr.splitlines() if "error" in x] or done.stderr.splitlines() or ["no message"]
        raise OSError(f"{command[0]} failed: {lines[0].strip()}")
    return done.stdout


def openmp() -> str:
    """The OpenMP library that torch has loaded: the threads of a second one would compete with torch's for cores."""
    loaded = re.findall(r" (/.*/lib(?:gomp|omp|iomp5)\b.*)", os.fsdecode(Path("/proc/self/maps").read_bytes()))
    # other packages bring their own, too
    return min(loaded, key=lambda path: "/torch" not in path, default="-lgomp")


def cache_path(name: str) -> Path:
    """Where a library is cached; if that is not possible, in a folder that is removed with this process."""
    try:
        folder = cache_folder()
        if not ours(folder):
            if folder.stat().st_uid == os.geteuid():
                folder.chmod(0o700)  # made under a umask of 002: what others have left in it is not theirs to sign
            else:
                note_once(f"{folder} belongs to another user: the C++ kernels are compiled at every start")
                return private_path(name)
        if (folder / name).exists() or os.access(folder, os.W_OK):
            return folder / name
        why = f"{folder} cannot be written to"
    except (OSError, RuntimeError) as e:  # RuntimeError: there is no home
        why = str(e)
    note_once(f"the C++ kernels are compiled at every start, as nothing can be kept: {why}; set XDG_CACHE_HOME")
    return private_path(name)


@functools.cache
def private_path(name: str) -> Path:
    own = tempfile.mkdtemp(prefix="kv_fast-")
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    return Path(own, name)


def ours(path: Path) -> bool:
    """Whether the path belongs to us and nobody else may write to it."""
    s = path.stat()
    return s.st_uid == os.geteuid() and not s.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def seal(key: str, content: bytes) -> bytes:
    """The end of a library's file: the key of what it was made of, and a hash that detects a truncated file."""
    return f"kv_fast {key} {hashlib.sha256(content).hexdigest()}".encode()


def intact(path: Path, key: str) -> bool:
    """Whether we made a library of this key. A damaged file is never loaded, which could end the process."""
    try:
        data, size = path.read_bytes(), len(seal(key, b""))
        return ours(path) and not path.is_symlink() and data[-size:] == seal(key, data[:-size])
    except OSError:
        return False


@contextlib.contextmanager
def workshop(folder: Path) -> Iterator[str]:
    """A new folder in `folder` to build in, for one process at a time; what killed builds left is removed."""
    import fcntl  # not on Windows

    with open(folder / "lock", "w") as lock:
        with contextlib.suppress(OSError):  # some file systems have no locks: then each process builds for itself
            fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed, by the system if need be
            for left in folder.glob("tmp*"):
                shutil.rmtree(left, ignore_errors=True)
        # under a new name: the compiler of a killed build may still be writing to the old one
        with tempfile.TemporaryDirectory(dir=folder) as own:
            yield own


@functools.cache
def library() -> ctypes.CDLL:
    """The library, compiled if it is not cached. Raises OSError, with the reason in one line, if that fails.

    Loading it registers the operators of operators.cpp with torch.
    """
    if sys.platform != "linux":
        raise OSError(f"they are for Linux, this is {sys.platform}")
    cxx, omp = compiler(), openmp()
    # the compiler's macros name its version and every instruction set of the processor
    target = run(cxx, "-march=native", "-dM", "-E", "-x", "c++", "/dev/null")
    sources = (x.read_text() for x in sorted(FOLDER.rglob("*")) if x.suffix in (".h", ".cpp"))
    made_of = (*sources, target, omp, torch.__version__, *FLAGS, *LINKING)
    key = hashlib.sha256("\0".join(made_of).encode(errors="surrogateescape")).hexdigest()[:16]
    path = cache_path(f"native-{key}.so")
    if not intact(path, key):
        with workshop(path.parent) as folder:
            if not intact(path, key):  # another process may have built it meanwhile
                print(f"compiling kernels/native with {cxx}, once", file=sys.stderr)
                made, built = f"{folder}/native.o", f"{folder}/native.so"
                run(cxx, *FLAGS, f"-I{TORCH / 'include'}", "-fopenmp", "-c", str(FOLDER / MAIN), "-o", made)
                run(cxx, *LINKING, made, omp, f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-o", built)
                with open(built, "ab") as f:
                    f.write(seal(key, Path(built).read_bytes()))
                os.chmod(built, 0o700)
                os.replace(built, path)  # atomic: the file is complete or absent
    lib = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)  # compiled steps call its operators (`Declarations`)
    lib.kvf_register()
    return lib


def available() -> bool:
    """Whether there is a library; if not, a note on stderr says why, once."""
    return _available()


# Makes the result a constant of a graph, so that it is not traced. torch.compiler.assume_constant_result does nothing
# but set this, but imports the compiler to do so: 2 s of every command's start.
available._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _available() -> bool:
    try:
        library()
    except OSError as e:
        print(f"note: the CPU kernels in C++ are not used ({e}): torch's are slower", file=sys.stderr)
        return False
    return True


def ask(question: str, *args: int) -> bool:
    """Ask the library. has_tiles: whether the processor multiplies tiles of bf16, and the system lets us.
    has_many_rows, bits: whether the library multiplies prompts with such weights itself. multiplies_one_row: whether
    `dense_linear` is faster than torch for a single row in fp32. multiplies_pairs: whether bf16 is multiplied as is."""
    return bool(getattr(library(), f"kvf_{question}")(*args))


ask._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as `available`
