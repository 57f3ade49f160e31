"""Chat templates: Jinja texts in checkpoints that write a conversation in the model's training format."""

from __future__ import annotations

import functools
import json
import re
import secrets
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from runtime.errors import InputError, short

Message = dict[str, Any]


def render(source: Path, template: str, messages: list[Message], given: dict[str, Any], asked: dict[str, Any]) -> str:
    """The conversation as text. given: variables of the template beside messages; asked: those that the user set, which
    the template must read. The message of an InputError begins with `source`."""
    env = _environment()
    try:
        reads = meta.find_undeclared_variables(env.parse(template))
    except Exception as e:
        raise _refused(source, e) from e
    for name in asked:
        if name not in reads or name == "messages":
            known = ", ".join(sorted(reads - {"messages"} - env.globals.keys())) or "none"
            raise InputError(f"{source}: the chat template has no variable {name!r} to set; it reads {known}")
    try:
        return env.from_string(template).render({"tools": None, "documents": None} | given, messages=messages)
    except Exception as e:  # a template is untrusted code: any exception in it is bad input
        raise _refused(source, e) from e


def _refused(source: Path, e: Exception) -> InputError:
    return InputError(f"{source}: the chat template cannot render these messages ({type(e).__name__}: {e})")


def locate(text: str, messages: list[Message], render: Callable[[list[Message]], str]) -> list[str] | None:
    """Split a rendered text into parts by the template (0, 2, 4 ...) and contents of messages (1, 3, 5 ...).

    The messages are rendered again with marks around their contents, inside outer blanks, which templates strip.
    Returns None if the template changes contents in other ways, so that removing the marks does not give the same text.
    """
    nonce = secrets.token_hex(8)  # so that no message can contain a mark
    begin, end = f"\ue000{nonce}\ue001", f"\ue002{nonce}\ue003"

    def mark(content: str) -> str:
        core = content.strip()
        return content.replace(core, f"{begin}{core}{end}", 1) if core else content

    try:
        parts = re.split(f"({begin}|{end})", render(_map_contents(messages, mark)))
    except InputError:
        return None
    if parts[1::2] != [begin, end] * (len(parts) // 4) or "".join(parts[::2]) != text:
        return None
    return parts[::2]


def contents(messages: list[Message]) -> list[str]:
    """The texts of all messages."""
    found: list[str] = []

    def keep(content: str) -> str:
        found.append(content)
        return content

    _map_contents(messages, keep)
    return found


def _map_contents(messages: list[Message], change: Callable[[str], str]) -> list[Message]:
    """Messages with every text of their contents changed: a content itself, or the texts in its parts and fields."""

    def of(value: Any, key: str = "") -> Any:
        if isinstance(value, str):
            return value if key == "type" else change(value)
        if isinstance(value, dict):
            return {k: of(v, k) for k, v in value.items()}
        return [of(v) for v in value] if isinstance(value, list) else value

    return [m | {"content": of(m["content"])} if "content" in m else m for m in messages]


def template_variable(text: str) -> tuple[str, Any]:
    """Parse K=V of --chat-arg. V is read as a JSON literal if it is one, else as text."""
    key, eq, value = text.partition("=")
    if not eq or not key.isidentifier():
        raise InputError(f"--chat-arg {short(text)} is not of the form K=V")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


class Generation(Extension):
    """{% generation %} marks the assistant's text for training; here it renders its body in a scope of its own."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    """The environment that transformers gives a template: no attributes that start with _, immutable arguments."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:  # jinja's escapes HTML
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    extensions = [Generation, "jinja2.ext.loopcontrols"]
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    env.filters["tojson"] = tojson
    env.globals |= {"raise_exception": raise_exception, "strftime_now": lambda f: datetime.now().strftime(f)}
    return env
