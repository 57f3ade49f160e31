"""The peers that bench_generate.py measures, and the base class of all runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model import ModelArgs, Transformer
from runtime.errors import InputError
from runtime.machine import synchronize


class Work:
    """The task that all runs of a group share: `batch` rows of `length` tokens in the cache, `new` tokens to decode."""

    def __init__(self, model: Transformer, batch: int, length: int, new: int, synthetic: bool):
        self.model, self.batch, self.length, self.new, self.synthetic = model, batch, length, new, synthetic
        self.device, self.dtype, self.kv_dtype = model.device, model.dtype, model.kv_dtype or model.dtype
        gen = torch.Generator().manual_seed(batch)
        self.tokens = torch.randint(3, model.args.vocab_size, (batch, length), generator=gen)

    def sync(self) -> None:
        synchronize(self.device)

    def random_kv(self) -> tuple[Tensor, Tensor]:
        """k and v [B, Hkv, length, D], the same for all layers, which does not change a step's time."""
        a, gen = self.model.args, torch.Generator(self.device).manual_seed(self.batch)
        size = (self.batch, a.n_kv_head, self.length, a.head_dim)
        k, v = (torch.randn(size, generator=gen, device=self.device, dtype=self.kv_dtype) for _ in range(2))
        return k, v


class Run:
    """One side of a comparison: `open` allocates and compiles, a call is one round, `close` frees."""

    work: Work
    name: str
    info: dict[str, Any]  # further fields of its row
    opening = "loading"  # what `open` does, for the progress line

    def open(self) -> None: ...

    def __call__(self) -> dict[str, float]:
        """Runs one round -> `step`, seconds per decode step, and `prefill`, seconds."""
        raise NotImplementedError

    def close(self) -> None: ...


def hf_config(a: ModelArgs) -> Any:
    """transformers' configuration of the same shapes."""
    import transformers as t

    if not a.plain:
        raise InputError("Llama, Qwen2 and Qwen3 do not compute what this model does: give a --checkpoint")
    kind: Any = t.Qwen3Config if a.qk_norm else t.Qwen2Config if a.qkv_bias else t.LlamaConfig
    rope = dict(rope_type="default", rope_theta=a.rope.theta)  # the angles do not change the cost
    return kind(hidden_size=a.dim, num_hidden_layers=a.n_layer, num_attention_heads=a.n_head, head_dim=a.head_dim,
                num_key_value_heads=a.n_kv_head, intermediate_size=a.ffn_dim, vocab_size=a.vocab_size,
                max_position_embeddings=a.max_seq_len, tie_word_embeddings=a.tie_embeddings,
                rope_parameters=rope)  # fmt: skip


class Transformers(Run):
    """transformers' generate() with a cache of its own, dynamic or static, or with a method (engine/bridge.py)."""

    def __init__(self, work: Work, folder: str | None, cache: str, bridge: bool = False):
        self.work, self.folder, self.cache, self.bridge = work, folder, cache, bridge
        self.name, self.info = f"{'bridge' if bridge else 'transformers'} {cache}", {}

    def open(self) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import is_flash_attn_2_available

        w, gpu = self.work, self.work.device.type == "cuda"
        flash = gpu and self.cache == "dynamic" and is_flash_attn_2_available()
        how: dict[str, Any] = dict(dtype=w.dtype, attn_implementation="flash_attention_2" if flash else "sdpa")
        if self.bridge:
            from engine.bridge import Cache  # registers the attention function kv_fast

            how["attn_implementation"] = "kv_fast"
        if self.folder:
            self.hf: Any = AutoModelForCausalLM.from_pretrained(self.folder, **how)
        else:
            with torch.device(w.device):
                self.hf = AutoModelForCausalLM.from_config(hf_config(w.model.args), **how)
        self.hf = self.hf.to(w.device).eval()
        self.hf.generation_config.eos_token_id = None
        self.kv: Any = Cache(self.hf, self.cache, w.length + w.new, w.batch, None, w.new) if self.bridge else None
        self.forward: Any = self.hf.forward
        if w.synthetic:
            if gpu and self.cache == "static":  # as in its generate()
                self.forward = torch.compile(self.hf.forward, mode="reduce-overhead")
            self._loop(min(4, w.new))

    @torch.inference_mode()
    def _loop(self, n: int) -> float:
        """Seconds for n steps after the filled length."""
        from transformers import DynamicCache, StaticCache

        w = self.work
        if self.cache == "dynamic":
            self.kv = DynamicCache()
        elif self.kv is None:
            self.kv = StaticCache(config=self.hf.config, max_cache_len=w.length + w.new)
        else:
            self.kv.reset()  # keeps the buffers, which the compiled step uses
        kv = [x.to(w.dtype) for x in w.random_kv()]  # its caches have the dtype of its activations
        for layer in range(self.hf.config.num_hidden_layers):
            self.kv.update(*kv, layer)
        token = w.tokens[:, -1:].to(w.device)
        w.sync()
        start = time.perf_counter()
        for _ in range(n):
            logits = self.forward(input_ids=token, past_key_values=self.kv, use_cache=True).logits
            token = logits[:, -1:].argmax(-1).clone()
        w.sync()
        return time.perf_counter() - start

    def _generate(self, new: int) -> float:
        w, ids = self.work, self.work.tokens.to(self.work.device)
        kind: dict[str, Any] = dict(cache_implementation=self.cache) if self.cache == "static" else {}
        if self.bridge:
            self.kv.reset()
            kind = dict(past_key_values=self.kv)
        w.sync()
        start = time.perf_counter()
        with torch.inference_mode():
            out = self.hf.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new,
                                   do_sample=False, pad_token_id=0, return_dict_in_generate=True, **kind)  # fmt: skip
        w.sync()
        seconds, layers = time.perf_counter() - start, out.past_key_values.layers
        of_layers = (x.keys.nbytes + x.values.nbytes for x in layers)
        self.info["kv_bytes"] = self.kv.kv_bytes() if self.bridge else sum(of_layers)
        return seconds

    def __call__(self) -> dict[str, float]:
        n = self.work.new
        if self.work.synthetic:
            return dict(step=self._loop(n) / n)
        first = self._generate(1)
        return dict(step=(self._generate(n) - first) / (n - 1), prefill=first)

    def close(self) -> None:
        self.hf = self.kv = self.forward = None


class Peer(Run):
    """gpt-fast, which decodes in its own process, with its own code: peer_decode.py."""

    opening = "loading and compiling"

    def __init__(self, work: Work, path: str, threads: int):
        self.work, self.name, self.path, self.threads, self.info = work, "gpt-fast", path, threads, {}
        self.process: subprocess.Popen | None = None

    def open(self) -> None:
        w, a = self.work, self.work.model.args
        if a.head_dim * a.n_head != a.dim or a.qk_norm or a.qkv_bias or not a.plain:
            raise InputError(f"{self.name} runs Llama alone, without biases and with head_dim = dim / n_head")
        model = dict(block_size=max(a.max_seq_len, w.length + w.new + 8), vocab_size=a.vocab_size, n_layer=a.n_layer,
                     n_head=a.n_head, dim=a.dim, intermediate_size=a.ffn_dim, n_local_heads=a.n_kv_head,
                     rope_base=a.rope.theta, norm_eps=a.norm_eps)  # fmt: skip
        setup = dict(model=model, batch=w.batch, length=w.length, new=w.new, device=str(w.device),
                     dtype=str(w.dtype).removeprefix("torch."), threads=self.threads)  # fmt: skip
        pipe = subprocess.PIPE
        command = [sys.executable, str(Path(__file__).with_name("peer_decode.py")), json.dumps(setup)]
        env = os.environ | dict(PYTHONPATH=self.path)
        # a pipe that nobody reads would fill up and block the process
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115, open as long as the process
        self.process = subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=self.log, env=env)
        self.info = self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process is not None and self.process.stdout is not None
        for text in self.process.stdout:
            if text.startswith("{"):
                return json.loads(text)
        self.log.seek(0)
        said = self.log.read().strip().splitlines() or ["without a word"]
        raised = [x for x in said if re.match(r"[\w.]*(Error|Exception|Unsupported|Interrupt)\b", x)]
        raise RuntimeError(f"{self.name} ended: {(raised or said)[-1]}")

    def __call__(self) -> dict[str, float]:
        assert self.process is not None and self.process.stdin is not None
        self.process.stdin.write("run\n")
        self.process.stdin.flush()
        return dict(step=self._read()["seconds_per_step"])

    def close(self) -> None:
        if self.process is not None:
            self.process.communicate()  # closes its input, which ends it
            self.process = None
