"""The folder of compiled libraries: nothing in it is run that others could have written, or that is damaged."""

from __future__ import annotations

import functools
import os
import stat
from pathlib import Path

import pytest

from kernels import backend, native
from kernels.native import build

NAME = "native-*.so"


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache, a compiler that copies the library that there is, and how often it was called."""
    real = Path(build.library()._name)
    log, compiler = tmp_path / "log", tmp_path / "compiler"
    compiler.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\nfor x; do out=$x; done\n'
        f'case "$*" in *-dM*) ;; *-shared*) cp {real} $out;; *) touch $out;; esac\n'
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "library", functools.cache(build.library.__wrapped__))
    monkeypatch.setattr(build, "_available", functools.cache(build._available.__wrapped__))
    monkeypatch.setattr(backend, "_version_for", functools.cache(backend._version_for.__wrapped__))

    class Cache:
        folder = tmp_path / "cache" / "kv_fast"

        def load(self):
            build.library.cache_clear()
            return Path(build.library()._name)

        def built(self):
            return log.read_text().count("-shared")

    return Cache()


def test_what_we_made_is_loaded_again(cache):
    path = cache.load()
    assert path.parent == cache.folder and cache.load() == path and cache.built() == 1
    assert stat.S_IMODE(cache.folder.stat().st_mode) == stat.S_IMODE(path.stat().st_mode) == 0o700


@pytest.mark.parametrize("umask", [0o002, 0o000, 0o077])
def test_any_umask_makes_a_cache_of_our_own(cache, umask):
    old = os.umask(umask)
    try:
        cache.load(), cache.load()
    finally:
        os.umask(old)
    assert cache.built() == 1


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
def test_a_library_that_is_not_ours_or_damaged_is_made_again(how, cache, capfd):
    SPOIL[how](cache.load())
    assert cache.load().parent == cache.folder and cache.built() == 2 and native.available()
    cache.load()
    assert cache.built() == 2 and "note" not in capfd.readouterr().err


def test_a_folder_that_others_may_write_to_is_closed(cache):
    path = cache.load()
    cache.folder.chmod(0o777)
    assert cache.load() == path and stat.S_IMODE(cache.folder.stat().st_mode) == 0o700


def test_a_folder_of_another_user_is_not_used(cache, monkeypatch, capfd):
    path = cache.load()
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    build.library.cache_clear()
    found = build.cache_path(path.name)
    assert cache.folder not in found.parents and stat.S_IMODE(found.parent.stat().st_mode) == 0o700
    assert capfd.readouterr().err.count("note: ") == 1
