"""--peer of bench_generate.py: checks its value, and makes the peer's runs."""

from __future__ import annotations

from pathlib import Path

from runtime.errors import InputError
from scripts.bench.llama_cpp import LlamaCpp, check_program
from scripts.bench.peer_runs import Peer, Run, Transformers, Work

FAST, LLAMA, BRIDGE = "gpt-fast", "llama.cpp", "bridge"


def check_peer(peer: str) -> None:
    """Raises InputError unless it is `transformers`, bridge:METHOD, KIND:PATH of a checkout, or llama.cpp:PATH of
    llama-bench."""
    kind, _, path = peer.partition(":")
    if kind not in ("transformers", BRIDGE, FAST, LLAMA) or (kind != "transformers") != bool(path):
        raise InputError(f"--peer {peer} is not known: use transformers, {BRIDGE}:METHOD, {FAST}:PATH or {LLAMA}:PATH")
    if kind == LLAMA:
        check_program(peer, path)
    elif kind != BRIDGE and path and not (file := Path(path) / "generate.py").is_file():
        raise InputError(f"--peer {peer}: {path} is not a checkout of {kind}: there is no {file}")


def peer_runs(work: Work, peer: str, folder: str | None, threads: int) -> list[Run]:
    """The runs of one --peer; folder: the checkpoint that transformers loads, None for random weights."""
    kind, _, path = peer.partition(":")
    if kind == LLAMA:
        return [LlamaCpp(work, path, threads)]
    if kind == BRIDGE:
        return [Transformers(work, folder, path, bridge=True)]
    if path:
        return [Peer(work, path, threads)]
    return [Transformers(work, folder, cache) for cache in ("dynamic", "static")]
