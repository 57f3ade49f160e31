"""Chat templates: the Jinja text in a checkpoint that writes a conversation as the model was trained to read it."""

from __future__ import annotations

import functools
import json
from datetime import datetime

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokenizer.folder import Folder


def read_template(folder: Folder) -> str:
    """The folder's template: chat_template.jinja before tokenizer_config.json, of several the one named "default"."""
    template = folder.config.get("chat_template")
    if folder.has("chat_template.jinja"):
        template = folder.text("chat_template.jinja")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        if "default" not in named:
            raise folder.error("tokenizer_config.json", f"no chat template is 'default' among {list(named)}")
        template = named["default"]
    if not isinstance(template, str):
        where = "neither chat_template in tokenizer_config.json nor chat_template.jinja"
        raise folder.error("", f"no chat template ({where}); if it is a base model, run it without --chat")
    return template


def render(folder: Folder, template: str, messages: list[dict], add_generation_prompt: bool, tokens: dict) -> str:
    """The conversation as text; `tokens` are the special tokens that the template may name, such as `bos_token`."""
    flags = {"add_generation_prompt": add_generation_prompt, "tools": None, "documents": None}
    try:
        return _environment().from_string(template).render(tokens, messages=messages, **flags)
    except Exception as e:  # a template is untrusted code: whatever it raises is bad input, with no traceback
        reason = " ".join(f"{type(e).__name__}: {e}".split())
        raise folder.error("", f"the chat template cannot render these messages ({reason})") from e


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    """What transformers gives a template and no more: no attribute that starts with _, no changing of its arguments."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:  # jinja's own escapes HTML
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.filters["tojson"] = tojson
    env.globals |= {"raise_exception": raise_exception, "strftime_now": lambda f: datetime.now().strftime(f)}
    return env
