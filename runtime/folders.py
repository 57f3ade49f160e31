"""Folders: of this project, and of what it keeps between runs. It needs no torch."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/kv_fast, by default ~/.cache/kv_fast, made if need be. Raises OSError, or RuntimeError without a
    home."""
    home = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(home) if home else Path.home() / ".cache") / "kv_fast"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
