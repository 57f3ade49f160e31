"""Runs tasks of EleutherAI's lm-eval under a KV-cache method. A context is prefilled and compressed; the scored or
generated tokens come through decode.

    python -m scripts.eval.lm_eval_adapter --model kvfast --model_args checkpoint=CKPT,method=sals-12.5 --tasks arc_easy
    python -m scripts.eval.lm_eval_adapter --model kvfast --model_args transformers=NAME,method=self_index --tasks piqa
    python -m scripts.eval.lm_eval_adapter --model kvfast --model_args checkpoint=models/tiny,method=kivi,bits=4 \\
        --include_path FOLDER --tasks mine --batch_size 8 --json

It takes the flags of `lm_eval`. Importing this module registers the model kvfast (with lm_eval's Python API: import
scripts.eval.lm_eval_adapter). --model_args may have checkpoint, or transformers for a model that transformers runs,
method, dtype, kv_dtype, weights, head, calibration, max_length and the other arguments of `LLM`; anything else is a
knob of the method. lm-eval splits them at commas, so that a method by layers can only be given in Python. --json prints
the results as one object. lm-eval puts context and question into one prompt, so the question is known when the prompt
is compressed. (A cache for lm-eval's own model hf would change little: it reads the scored tokens with their context in
one pass, without a cache.)
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import tqdm

from engine import LLM
from engine.decode import pad
from engine.snapshot import Snapshot
from runtime.errors import InputError, check_count, run_cli
from runtime.options import refuse_torchrun

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError:  # an optional package: the command says how to install it
    TemplateLM = object  # type: ignore[assignment,misc]
    register_model = lambda *names: lambda cls: cls  # type: ignore[assignment]  # noqa: E731


MOST_NEW = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # lm-eval's names, in its order


def whole(name: str, value: Any, low: int, high: int = 2**31 - 1) -> int:
    """A whole number, given as one or as text. Raises InputError."""
    number = int(value) if re.fullmatch(r"-?\d+", str(value)) else value
    check_count(name, number, low, high)
    return number


@register_model("kvfast")
class KVFast(TemplateLM):
    """A checkpoint and a method of kv-fast as lm-eval's causal model."""

    def __init__(self, checkpoint: str = "", method: str = "full", batch_size: int | str = 1,
                 max_length: int | None = None, max_gen_toks: int = 256, transformers: str = "",
                 **more: Any):  # fmt: skip
        super().__init__()
        for name in ("max_batch_size", "trust_remote_code", "pretrained"):  # lm-eval may add these
            more.pop(name, None)
        if more.get("device") in (None, ""):
            more.pop("device", None)
        if bool(checkpoint) == bool(transformers):
            raise InputError("--model_args needs checkpoint=FOLDER_OR_GGUF, or transformers=NAME_OR_FOLDER")
        self.llm = LLM(checkpoint or transformers, method, transformers=bool(transformers), **more)
        self.tk, self.model = self.llm.tokenizer, self.llm.model
        self.rows = 1 if str(batch_size).startswith("auto") else whole("batch_size", batch_size, 1, 4096)
        context = self.model.args.context
        self.max_length = context if max_length is None else min(whole("max_length", max_length, 2), context)
        self.max_gen_toks = whole("max_gen_toks", max_gen_toks, 1)
        self.name, self.chat = str(checkpoint or transformers), False

    # ---- tokens ----

    @property
    def eot_token_id(self) -> int:
        if not self.llm.stop_ids:
            raise InputError(f"{self.name} has no end-of-text token, which lm-eval needs: name one in its config.json")
        return min(self.llm.stop_ids)

    @property
    def prefix_token_id(self) -> int:
        return self.eot_token_id if self.tk.bos_id is None else self.tk.bos_id

    @property
    def tokenizer_name(self) -> str:
        return self.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.tk.encode(string, bos=not self.chat if add_special_tokens is None else add_special_tokens)

    def chat_template(self, chat_template: bool | str = False) -> str:
        return self.tk.template() if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict], add_generation_prompt: bool = True, **_: Any) -> str:
        self.chat = True  # from now on the text has the bos, if there is one
        text = self.tk.apply_chat_template(chat_history, add_generation_prompt=add_generation_prompt)
        if not add_generation_prompt:  # a task's beginning of the answer, which is to go on
            begun = chat_history[-1]["content"].strip()
            before, found, _ = text.rpartition(begun)
            if not found:
                raise InputError(f"{self.name}: the chat template does not write the beginning of an answer as it is")
            text = before + begun
        return text

    # ---- requests ----

    @torch.inference_mode()
    def _loglikelihood_tokens(self, requests: Sequence[Any], disable_tqdm: bool = False, **_: Any) -> list[Any]:
        """[(texts, context ids, continuation ids)] -> [(log-probability, whether greedy decoding gives the same)].

        Continuations of one context share its prefill. A context that is too long loses its beginning."""
        out: list[Any] = [None] * len(requests)
        by_context: dict[tuple[int, ...], list[int]] = {}
        for i, (_texts, context, continuation) in enumerate(requests):
            room = self.max_length - len(continuation)
            if room < 1:
                raise InputError(
                    f"a continuation of {len(continuation)} tokens has no room for a context in {self.max_length}"
                )
            by_context.setdefault(tuple(context[-room:]), []).append(i)
        # the longest first, so that one that does not fit fails at once
        order = sorted(by_context, key=len, reverse=True)
        new = max((len(r[2]) for r in requests), default=0)
        bar = tqdm(total=len(requests), desc="log-likelihoods", disable=disable_tqdm)
        for first in range(0, len(order), self.rows):
            contexts = order[first : first + self.rows]
            self.model.setup_cache(self.llm.layers, len(contexts), len(contexts[0]) + new, new)
            tokens, lengths = pad([list(c) for c in contexts], self.model.device)
            start = self.model.prefill(tokens, lengths)
            most = max(len(by_context[c]) for c in contexts)
            state = Snapshot(self.model.cache) if most > 1 else None
            for turn in range(most):
                if turn and state:
                    state.restore()
                asked = [(by_context[c][turn : turn + 1] or [None])[0] for c in contexts]
                said = [[] if i is None else list(requests[i][2]) for i in asked]
                for i, result in zip(asked, self._score(start, lengths, said), strict=True):
                    if i is not None:
                        out[i] = result
                        self.cache_hook.add_partial("loglikelihood", requests[i][0], result)
                bar.update(sum(i is not None for i in asked))
        bar.close()
        return out

    def _score(self, logits: torch.Tensor, pos: torch.Tensor, said: list[list[int]]) -> list[tuple[float, bool]]:
        """Scores the tokens that follow logits [B, V] at pos [B], feeding them to the current cache one by one."""
        total, greedy = [0.0] * len(said), [True] * len(said)
        for step in range(most := max(map(len, said))):
            logp = F.log_softmax(logits.float(), -1)
            best = logp.argmax(-1).tolist()
            fed = [ids[step] if step < len(ids) else 0 for ids in said]
            for row, ids in enumerate(said):
                if step < len(ids):
                    total[row] += logp[row, ids[step]].item()
                    greedy[row] &= best[row] == ids[step]
            if step + 1 < most:
                logits = self.model.decode(torch.tensor(fed, device=logits.device), pos)
                pos = pos + 1
                self.model.maintain(step + 1)
        return list(zip(total, greedy, strict=True))

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Scores whole texts: every token except the first window's prefix is decoded after the tokens before it."""
        windows: list[Any] = []
        owner: list[int] = []
        for i, request in enumerate(requests):
            rolling = get_rolling_token_windows(
                self.tok_encode(request.args[0], False), self.prefix_token_id, self.max_length - 1, 1
            )
            for context, continuation in map(make_disjoint_window, rolling):
                windows.append((("", ""), context, continuation))
                owner.append(i)
        out = [0.0] * len(requests)
        for i, (logp, _same) in zip(owner, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            out[i] += logp
        return out

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generates greedily up to one of a request's stop strings."""
        out = [""] * len(requests)
        by_kind: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            by_kind.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(i)
        bar = tqdm(total=len(requests), desc="answers", disable=disable_tqdm)
        for same in by_kind.values():
            asked = requests[same[0]].args[1]
            until = asked.get("until") or []
            given = (asked[name] for name in MOST_NEW if name in asked)
            new = whole("max_gen_toks", next(given, self.max_gen_toks), 0)
            if asked.get("do_sample") or asked.get("temperature") or (asked.get("num_beams") or 1) != 1:
                raise InputError("kvfast decodes greedily: leave do_sample, temperature and num_beams out of the "
                                 "task's generation_kwargs, or set them to false, 0 and 1")  # fmt: skip
            if not 1 <= new < self.max_length:
                raise InputError(f"max_gen_toks {new} leaves no token of {self.max_length} for a prompt: give 1 to "
                                 f"{self.max_length - 1}, or a larger max_length")  # fmt: skip
            stop = [s for s in ([until] if isinstance(until, str) else until) if s]
            for first in range(0, len(same), self.rows):
                part = same[first : first + self.rows]
                prompts = [self.tok_encode(requests[i].args[0])[-(self.max_length - new) :] for i in part]
                for i, c in zip(part, self.llm.generate(prompts, new, stop=stop), strict=True):
                    out[i] = c.text
                    self.cache_hook.add_partial("generate_until", requests[i].args, c.text)
                bar.update(len(part))
        bar.close()
        return out


def main() -> None:
    as_json = "--json" in sys.argv
    if as_json:
        sys.argv.remove("--json")
    if TemplateLM is object or {"-h", "--help"} & set(sys.argv[1:]):
        if {"-h", "--help"} & set(sys.argv[1:]):
            print(__doc__)
            return
        raise InputError("lm-eval is not installed: pip install lm-eval, or leave this command out")
    refuse_torchrun()
    if any(re.search(r"(^|,|=)device=", a) for a in sys.argv[1:]):
        raise InputError("--model_args cannot have device, which lm-eval passes itself: give --device")
    if "--model" in sys.argv and not any(a.startswith("--device") for a in sys.argv):  # lm-eval's default is cuda:0
        sys.argv += ["--device", "cuda" if torch.cuda.is_available() else "cpu"]
    import lm_eval
    from lm_eval.__main__ import cli_evaluate

    run, found = lm_eval.simple_evaluate, list[Any]()

    def kept(*args: Any, **kwargs: Any) -> Any:
        found.append(run(*args, **kwargs))
        return found[-1]

    lm_eval.simple_evaluate = kept
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():  # lm-eval prints a table
        cli_evaluate()
    if as_json:
        print(json.dumps(found[-1]["results"] if found else {}))


if __name__ == "__main__":
    run_cli(main)
