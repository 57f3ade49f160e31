"""The tokenizer files of a checkpoint folder, with its special and added tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from runtime.errors import InputError
from runtime.machine import check_fetched

SPECIAL_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class Folder:
    """The tokenizer files of a checkpoint folder. A missing JSON file reads as {}."""

    def __init__(self, path: Path):
        self.path = path
        self.config = self.json("tokenizer_config.json")
        self.special_tokens_map = self.json("special_tokens_map.json")

    @staticmethod
    def find(path: Path, *patterns: str) -> list[str]:
        """Names of files that match, in the order of the patterns."""
        return [f.name for p in patterns for f in sorted(path.glob(p)) if f.is_file()]

    def error(self, name: str, message: str) -> InputError:
        return InputError(f"{self.path / name if name else self.path}: {message}")

    def has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def read(self, name: str) -> bytes:
        check_fetched(self.path / name)
        try:
            return (self.path / name).read_bytes()
        except OSError as e:
            raise self.error(name, f"cannot be read ({e.strerror})") from e

    def text(self, name: str) -> str:
        try:
            return self.read(name).decode("utf-8-sig")  # editors on Windows add a byte order mark
        except UnicodeDecodeError as e:
            raise self.error(name, f"not UTF-8 text ({e}); download it again") from e

    def json(self, name: str) -> dict[str, Any]:
        if not self.has(name):
            return {}
        text = self.text(name)
        try:
            value = json.loads(text)
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

    def special_names(self, **defaults: str | None) -> dict[str, str]:
        """The special tokens that exist, as `bos_token` ... -> text, for chat templates."""
        found = {f"{n}_token": self.special(f"{n}_token", defaults.get(n)) for n in SPECIAL_NAMES}
        return {name: token for name, token in found.items() if token is not None}

    def added_tokens(self) -> list[tuple[int | None, AddedToken]]:
        """Added tokens by id, then special tokens that are only named, with None: their ids are in the vocabulary. As
        in Hugging Face, tokenizer_config.json decides a token's flags, and named special tokens are special in every
        file."""
        names = [_content(s.get(f"{n}_token")) for s in (self.special_tokens_map, self.config) for n in SPECIAL_NAMES]
        for source in (self.special_tokens_map, self.config):
            for key in ("additional_special_tokens", "extra_special_tokens"):
                more = source.get(key) or []
                names += [_content(token) for token in (more.values() if isinstance(more, dict) else more)]
        tokens = {}
        for content, id in self.json("added_tokens.json").items():
            special = content in names
            tokens[int(id)] = AddedToken(content, special=special, normalized=not special)
        for key, token in (self.config.get("added_tokens_decoder") or {}).items():
            special = bool(token.get("special"))
            flags = {"normalized": not special, "lstrip": False, "rstrip": False, "single_word": False}
            flags = {flag: bool(token.get(flag, default)) for flag, default in flags.items()}
            tokens[int(key)] = AddedToken(token["content"], special=special, **flags)
        known = {token.content for token in tokens.values()}
        alone = {
            n: AddedToken(n, special=True, normalized=False) for n in names if isinstance(n, str) and n not in known
        }
        return [*sorted(tokens.items(), key=lambda item: item[0]), *((None, token) for token in alone.values())]

    def adds_bos(self, default: bool) -> bool:
        """Whether a text begins with bos, by tokenizer_config.json. Raises InputError if it would end with eos."""
        if self.config.get("add_eos_token"):
            raise self.error("tokenizer_config.json", "add_eos_token would end every prompt; set it to false")
        flag = self.config.get("add_bos_token")
        return default if flag is None else bool(flag)

    def stop_ids(self) -> set[int]:
        """All ids in `eos_token_id` of generation_config.json and config.json."""
        ids = set()
        for name in ("generation_config.json", "config.json"):
            value = self.json(name).get("eos_token_id")
            for id in value if isinstance(value, list) else [] if value is None else [value]:
                if type(id) is not int or id < 0:
                    raise self.error(name, f"eos_token_id is {value!r}, expected ids >= 0")
                ids.add(id)
        return ids

    def chat_template(self) -> str:
        """chat_template.jinja or else that of tokenizer_config.json; of several templates the one named "default"."""
        template = self.config.get("chat_template")
        if self.has("chat_template.jinja"):
            template = self.text("chat_template.jinja")
        if isinstance(template, list):
            named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
            if "default" not in named:
                found = f"no chat template is 'default' among {list(named)}"
                raise self.error("tokenizer_config.json", f"{found}: copy the one to use into chat_template.jinja")
            template = named["default"]
        if not isinstance(template, str):
            where = "neither chat_template in tokenizer_config.json nor chat_template.jinja"
            raise self.error("", f"no chat template ({where}); if it is a base model, run it without --chat")
        return template


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token
