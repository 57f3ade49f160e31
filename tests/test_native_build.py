"""How kernels/native is compiled and cached: once, whole, and nothing is run that others could have written."""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import generate
from engine import LLM
from kernels import backend, native
from kernels.dense_attention import decode_attention
from kernels.native import build
from runtime.errors import InputError

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.cpp


@pytest.fixture(autouse=True)
def in_cpp(monkeypatch):
    monkeypatch.setattr("kernels.backend.BACKEND", "")


SAY = """
import sys, torch
from kernels.dense_attention import decode_attention
from kernels.native import build
from runtime.errors import InputError
from kernels.select import budget_select
torch.manual_seed(0)
q, k, v = torch.randn(1, 2, 32), torch.randn(1, 1, 50, 32), torch.randn(1, 1, 50, 32)
for _ in range(2):
    y = decode_attention(q, k, v, torch.tensor([3]), torch.tensor([50]))
    w = (q @ k[0, :, 3:].mT / 32**0.5).softmax(-1) @ v[0, :, 3:]
    idx, count = budget_select(q[:, :, :20], torch.tensor([19]), torch.tensor([4]), 4)
    assert (y - w).abs().max() < 1e-5 and count.tolist() == [[4, 4]]
    assert idx[0, 0].sort().values.tolist() == q[0, 0, :20].topk(4).indices.sort().values.tolist()
print(build.available(), build._available.cache_info().currsize)
"""


def process(**env):
    env = {x: y for x, y in os.environ.items() if x != "KV_FAST_BACKEND"} | env
    return subprocess.Popen([sys.executable, "-c", SAY], cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)  # fmt: skip


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_without_a_compiler_torch_runs(tmp_path):
    """In a process of its own, as a user meets it."""
    out, err = (child := process(PATH=str(tmp_path), CXX="nonsense", XDG_CACHE_HOME=str(tmp_path))).communicate()
    assert child.returncode == 0, err
    assert out.split() == ["False", "1"] and err.count("note: ") == 1 and "no C++ compiler found" in err


def test_a_compiled_step_without_a_compiler(refused, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "nonsense")
    assert "needs a C++ compiler: install g++" in refused(generate, "--compile", "--device", "cpu", "--prompt", "a")
    with pytest.raises(InputError, match="compiler: install g"):
        LLM(compile=True).generate("import os", 2)


@pytest.fixture
def copier(fresh, monkeypatch, tmp_path):
    """A compiler that takes its time, writes a log, and gives the library that there is."""
    build.private_path.cache_clear()
    log = tmp_path / "log"
    text = f'echo "$@" >> {log}\nfor x; do out=$x; done\ncase "$*" in *-dM*) ;; *-shared*) head -c 99 {fresh} > $out; '
    text += f"sleep 0.2; cp {fresh} $out;; *) touch $out;; esac"
    monkeypatch.setenv("CXX", script(tmp_path / "compiler", text))
    return lambda: log.read_text().count("-shared")


def forget():
    build.library.cache_clear()
    build._available.cache_clear()
    build.private_path.cache_clear()
    backend._version_for.cache_clear()


def works():
    q, k, v = torch.randn(1, 2, 32), torch.randn(1, 1, 40, 32), torch.randn(1, 1, 40, 32)
    want = (q.double() @ k[0, :, 1:].double().mT * 32**-0.5).softmax(-1) @ v[0, :, 1:].double()
    return (decode_attention(q, k, v, torch.tensor([1]), torch.tensor([40])) - want).abs().max() < 1e-5


def libraries(tmp_path):
    return sorted(x.name for x in (tmp_path / "cache").glob("kv_fast/*") if x.name != "lock")


@pytest.mark.parametrize("fails", ("always", "at the source", "by a file that is no library"))
def test_a_compiler_that_fails(fails, fresh, monkeypatch, tmp_path, capfd):
    """One note, which says why; torch runs, and nothing is left that the next process would take for a library."""
    text = {
        "always": "echo 'x.cpp:1: error: it is late' >&2; exit 1",
        "at the source": 'case "$*" in *-dM*) ;; *) echo "error: it is late" >&2; exit 1;; esac',
        "by a file that is no library": 'for x; do out=$x; done; case "$*" in *-dM*) ;; *) echo text > $out;; esac',
    }[fails]
    monkeypatch.setenv("CXX", script(tmp_path / "compiler", text))
    assert not native.available() and works() and not native.available() and works()
    err = capfd.readouterr().err
    assert [x[:5] for x in err.splitlines() if not x.startswith("compiling ")] == ["note:"]
    if fails != "by a file that is no library":
        assert "it is late" in err and libraries(tmp_path) == []


def test_a_cache_that_cannot_be_written(copier, monkeypatch, tmp_path):
    """The library is made in a folder that goes with the process."""
    (tmp_path / "cache").write_text("a file")
    assert native.available() and works() and copier() == 1
    path = Path(build.library()._name)
    assert tmp_path not in path.parents and path.exists()
    (tmp_path / "cache").unlink()
    (tmp_path / "cache").mkdir()
    forget()
    access = os.access
    monkeypatch.setattr(os, "access", lambda at, mode: mode != os.W_OK and access(at, mode))  # root may write anywhere
    assert works() and libraries(tmp_path) == []
    assert build.cache_path("steps") == build.cache_path("steps")  # asked for at every call
    assert build.openmp() != "-lgomp", "torch brings its own"
    odd = tmp_path / os.fsdecode(b"m\xfcller")  # a name that is not UTF-8, of a file that is mapped
    odd.write_bytes(b"0" * 4096)
    with odd.open("rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ):
        assert build.openmp() != "-lgomp"


def test_without_a_home(copier, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: Path.cwd() / Path(os.devnull) / "nobody")
    assert native.available() and works()

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    forget()
    monkeypatch.setattr(Path, "home", homeless)
    assert native.available() and works() and copier() == 2


@pytest.mark.slow
def test_the_name_tells_what_it_was_made_of(copier, monkeypatch, tmp_path):
    assert works()
    names = [libraries(tmp_path)]
    sources = [Path("native.cpp"), Path("isa/avx2.h")]
    folders = [shutil.copytree(build.FOLDER, tmp_path / f"edited {name.name}") for name in sources]
    for folder, name in zip(folders, sources, strict=True):
        with (folder / name).open("a") as f:
            f.write("// another\n")
    changes = [("FOLDER", folder) for folder in folders]
    for name, value in (*changes, ("FLAGS", (*build.FLAGS, "-g")), ("openmp", lambda: "-lanother")):
        monkeypatch.setattr(build, name, value)
        forget()
        assert works()
        names.append(libraries(tmp_path))
    assert [len(x) for x in names] == list(range(1, len(sources) + 4)) and copier() == len(sources) + 3


def test_two_at_once_leave_one_complete_file(copier, tmp_path, fresh):
    got = []
    each = [threading.Thread(target=lambda: got.append(build.library.__wrapped__())) for _ in range(2)]
    [x.start() for x in each], [x.join() for x in each]
    assert len(got) == 2 and all(hasattr(x, "kvf_register") for x in got) and copier() == 1
    (name,) = libraries(tmp_path)
    assert (tmp_path / "cache" / "kv_fast" / name).read_bytes().startswith(fresh.read_bytes())


@pytest.mark.slow
def test_two_processes_compile_once(copier, tmp_path):
    children = [process() for _ in range(2)]
    said = [child.communicate() for child in children]
    assert all(out.split() == ["True", "1"] and "note" not in err for out, err in said), said
    assert "".join(err for _, err in said).count("compiling kernels/native") == 1 == copier()
    assert len(libraries(tmp_path)) == 1


def test_what_a_killed_build_left_is_removed(copier, tmp_path, monkeypatch):
    """It may end at any time, by a signal that cannot be caught, and no later build waits for it."""
    begun = tmp_path / "begun"
    never = f'case "$*" in *-dM*) ;; *) echo $$ > {begun}; exec sleep 600;; esac'
    with monkeypatch.context() as m:
        m.setenv("CXX", script(tmp_path / "never", never))
        child = process()
    while not (begun.exists() and begun.read_text().strip()):
        assert child.poll() is None, child.communicate()[1]
        time.sleep(0.05)
    (left,) = libraries(tmp_path)
    assert left.startswith("tmp")
    child.kill()
    os.kill(int(begun.read_text()), signal.SIGKILL)  # its compiler
    child.communicate()
    assert libraries(tmp_path) == [left]
    assert works() and copier() == 1
    (name,) = libraries(tmp_path)
    assert name.startswith("native-")


# ---- the folder of compiled libraries ----


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache" / "kv_fast"


def load():
    build.library.cache_clear()
    return Path(build.library()._name)


def test_what_we_made_is_loaded_again(copier, folder):
    path = load()
    assert path.parent == folder and load() == path and works() and works() and copier() == 1
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(path.stat().st_mode) == 0o700


@pytest.mark.parametrize("umask", [0o002, 0o000, 0o077])
def test_any_umask_makes_a_cache_of_our_own(copier, folder, umask):
    old = os.umask(umask)
    try:
        load(), load()
    finally:
        os.umask(old)
    assert copier() == 1


def damage(change):
    """Another file of that name: this one is mapped into this process."""

    def spoil(path):
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(change(data))
        path.chmod(0o700)

    return spoil


SPOIL = {
    "empty": damage(lambda d: b""),
    "truncated": damage(lambda d: d[: len(d) // 2]),
    "a byte short": damage(lambda d: d[:-1]),
    "a byte changed": damage(lambda d: d[:5000] + bytes([d[5000] ^ 1]) + d[5001:]),
    "text": damage(lambda d: b"no library"),
    "of another key": damage(lambda d: d[:-81] + b"0" * 16 + d[-65:]),
    "writable by the group": lambda p: p.chmod(0o770),
    "writable by all": lambda p: p.chmod(0o707),
    "a link": lambda p: p.symlink_to(p.rename(p.with_name("elsewhere"))),
}


@pytest.mark.parametrize("how", SPOIL)
def test_a_library_that_is_not_ours_or_damaged_is_made_again(how, copier, folder, capfd):
    SPOIL[how](load())
    assert load().parent == folder and copier() == 2 and native.available()
    load()
    assert copier() == 2 and "note" not in capfd.readouterr().err


def test_a_folder_that_others_may_write_to_is_closed(copier, folder):
    path = load()
    folder.chmod(0o777)
    assert load() == path and stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_of_another_user_is_not_used(copier, folder, monkeypatch, capfd):
    path = load()
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    build.library.cache_clear()
    found = build.cache_path(path.name)
    assert folder not in found.parents and stat.S_IMODE(found.parent.stat().st_mode) == 0o700
    assert capfd.readouterr().err.count("note: ") == 1
