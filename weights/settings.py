"""Typed access to a quantization_config: a value of the wrong type raises an InputError that names its key."""

from __future__ import annotations

from typing import Any

from runtime.errors import InputError, short


class Settings:
    """A dictionary of settings, and its name in messages."""

    def __init__(self, values: dict[str, Any], source: str):
        self.values, self.source = values, source

    def get(self, *keys: str) -> Any:
        """The value of the first of these keys that exists and is not null; None if there is none."""
        return next((self.values[k] for k in keys if self.values.get(k) is not None), None)

    def refuse(self, key: str, expected: str) -> InputError:
        return InputError(f"{self.source}: {key} = {short(self.values.get(key))} is not supported, expected {expected}")

    def one_of(self, expected: tuple[Any, ...], default: Any, *keys: str) -> Any:
        """The value of the first key that exists. It must equal one of `expected` in value and type."""
        value = self.get(*keys)
        value = default if value is None else value.lower() if isinstance(value, str) else value
        if not any(type(value) is type(e) and value == e for e in expected):
            key = next((k for k in keys if self.values.get(k) is not None), keys[0])
            raise self.refuse(key, " or ".join(map(str, expected)))
        return value

    def group_size(self, *keys: str) -> int | None:
        """The number of adjacent inputs that share a scale; None for -1 in the file, one scale per row."""
        value = self.get(*keys)
        if type(value) is not int or not (value == -1 or 0 < value < 1 << 24):
            key = next((k for k in keys if k in self.values), keys[0])
            raise self.refuse(key, "a group size, or -1")
        return None if value == -1 else value


def not_performed(s: Settings, activations: str) -> str | None:
    """A line on what the settings ask for and this engine does not do, or None. activations: their format, or empty."""
    said = [f"{activations} are asked for and not performed, the weights alone are quantized"] if activations else []
    if s.get("kv_cache_scheme"):
        said.append("kv_cache_scheme is ignored: choose a cache with --method")
    return f"{s.source}: {'; '.join(said)}" if said else None
