"""What a checkpoint folder says about its tokenizer: its files, its special and its added tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from errors import InputError

SPECIAL_NAMES = ("bos", "eos", "unk", "pad")


@dataclass(frozen=True)
class AddedToken:
    """A token found in the text before the model sees it; the flags are those of tokenizer.json's `added_tokens`."""

    id: int
    content: str
    special: bool
    normalized: bool = False
    lstrip: bool = False
    rstrip: bool = False

    @classmethod
    def read(cls, id: int, token: dict) -> AddedToken:
        if token.get("single_word"):
            raise InputError(f"added token {token['content']!r} has single_word=true, which is not supported")
        special = bool(token.get("special"))
        flags = {"normalized": not special, "lstrip": False, "rstrip": False}
        return cls(id, token["content"], special, **{name: bool(token.get(name, flags[name])) for name in flags})


class Folder:
    """The tokenizer files of a checkpoint folder. A JSON file that is not there reads as {}."""

    def __init__(self, path: str | Path):
        self.path = Path(path).expanduser()
        if not self.path.is_dir():
            found = "is a file" if self.path.exists() else "does not exist"
            raise InputError(f"checkpoint {self.path} {found}: give a folder in the Hugging Face format")
        self.config = self.json("tokenizer_config.json")
        self.special_tokens_map = self.json("special_tokens_map.json")

    def error(self, name: str, message: str) -> InputError:
        return InputError(f"{self.path / name if name else self.path}: {message}")

    def unsupported(self, what: str, found: Any, expected: str) -> InputError:
        """For a part of tokenizer.json that would need what is not here."""
        found = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
        return self.error("tokenizer.json", f"{what} {found[:200]} is not supported, expected {expected}")

    def has(self, *names: str) -> bool:
        return all((self.path / name).is_file() for name in names)

    def read(self, name: str) -> bytes:
        try:
            data = (self.path / name).read_bytes()
        except OSError as e:
            raise self.error(name, f"cannot be read ({e.strerror})") from e
        if data.startswith(b"version https://git-lfs"):
            raise self.error(name, "a Git LFS pointer, not the file: run `git lfs pull` in the checkpoint")
        return data

    def text(self, name: str) -> str:
        try:
            return self.read(name).decode()
        except UnicodeDecodeError as e:
            raise self.error(name, f"not UTF-8 text ({e}); download it again") from e

    def json(self, name: str) -> dict[str, Any]:
        if not self.has(name):
            return {}
        try:
            value = json.loads(self.text(name))
        except (ValueError, RecursionError) as e:
            raise self.error(name, f"not valid JSON ({e}); download it again") from e
        if not isinstance(value, dict):
            raise self.error(name, f"holds a JSON {type(value).__name__}, expected an object")
        return value

    def special(self, name: str, default: str | None = None) -> str | None:
        """The text of `bos_token`, `eos_token`...; a null in the files means none, whatever the default."""
        for source in (self.config, self.special_tokens_map):
            if name in source:
                return _content(source[name])
        return default

    def added_tokens(self, vocab: dict[str, int], spec: dict) -> dict[int, AddedToken]:
        """Added tokens by id. As in Hugging Face, tokenizer_config.json has the last word on a token's flags, and the
        named special tokens are special wherever they come from."""
        names = [_content(s.get(f"{n}_token")) for s in (self.special_tokens_map, self.config) for n in SPECIAL_NAMES]
        for source in (self.special_tokens_map, self.config):
            for key in ("additional_special_tokens", "extra_special_tokens"):
                more = source.get(key) or []
                names += [_content(token) for token in (more.values() if isinstance(more, dict) else more)]
        tokens = {t["id"]: AddedToken.read(t["id"], t) for t in spec.get("added_tokens") or []}
        for content, id in self.json("added_tokens.json").items():
            special = content in names
            tokens.setdefault(id, AddedToken(id, content, special, normalized=not special))
        for key, token in (self.config.get("added_tokens_decoder") or {}).items():
            tokens[int(key)] = AddedToken.read(int(key), token)
        known = {token.content for token in tokens.values()}
        for name in names:
            if name in vocab and name not in known:
                tokens[vocab[name]] = AddedToken(vocab[name], name, special=True)
        return tokens


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def sequence(node: dict | None, key: str) -> list[dict]:
    """The parts of a normalizer, pre_tokenizer, decoder or post_processor, each null, one thing, or a Sequence."""
    return [] if node is None else node[key] if node["type"] == "Sequence" else [node]
