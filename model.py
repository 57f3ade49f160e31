"""The decoder: Llama, Mistral, Qwen2/2.5 and Qwen3 from Hugging Face folders, with a swappable KV cache.

Rotary embeddings keep Hugging Face's half-split layout and weights are never permuted, so channel lists and bases
mean the same everywhere. Shapes: B rows, S prompt tokens, Hq query heads, Hkv KV heads, D head_dim, V vocabulary.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from errors import InputError
from kernels.backend import use_native
from kernels.dense_attention import prefill_attention

MLP_CHUNK = 8192  # tokens per MLP call in prefill: bounds the [tokens, 2 * ffn_dim] activation


@dataclass
class RopeArgs:
    """Rotary embedding: `type` is default, linear, dynamic, llama3 or yarn; the rest as in Hugging Face's configs."""

    theta: float = 10_000.0
    type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0  # 0: the model's max_seq_len
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass
class ModelArgs:
    """Shape and numerics of a decoder. `from_hf` reads a config.json, `from_name` knows the models of NAMED."""

    dim: int = 4096
    n_layer: int = 32
    n_head: int = 32
    n_kv_head: int = 32
    head_dim: int = 128
    ffn_dim: int = 11008
    vocab_size: int = 32000
    max_seq_len: int = 4096
    norm_eps: float = 1e-5
    rope: RopeArgs = field(default_factory=RopeArgs)
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()  # sliding window of each layer, None: attend to everything
    dtype: str = "bfloat16"
    eos_ids: tuple[int, ...] = ()

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    @property
    def context(self) -> int:
        """Tokens the model can hold: max_seq_len, which dynamic NTK stretches by its factor."""
        return int(self.max_seq_len * (self.rope.factor if self.rope.type == "dynamic" else 1))

    @classmethod
    def from_name(cls, name: str) -> ModelArgs:
        if name not in NAMED:
            raise InputError(f"unknown model name {name!r}: use one of {', '.join(NAMED)}")
        d = dict(NAMED[name])
        return cls(rope=RopeArgs(**d.pop("rope")), **d)

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> ModelArgs:
        """From a config.json as a dict. InputError names any key that would change the numbers and is not supported."""
        return _args_from_hf(config)


_LLAMA3 = dict(theta=5e5, type="llama3", factor=8.0, original_max_position_embeddings=8192)
# One line per known configuration, from the checkpoints' own config.json.
# fmt: off
NAMED: dict[str, dict[str, Any]] = {
    "llama-2-7b": dict(rope=dict()),
    "llama-2-13b": dict(dim=5120, n_layer=40, n_head=40, n_kv_head=40, ffn_dim=13824, rope=dict()),
    "llama-3-8b": dict(n_kv_head=8, ffn_dim=14336, vocab_size=128256, max_seq_len=8192, rope=dict(theta=5e5)),
    "llama-3.1-8b": dict(n_kv_head=8, ffn_dim=14336, vocab_size=128256, max_seq_len=131072, rope=_LLAMA3),
    "llama-3.2-1b": dict(dim=2048, n_layer=16, n_kv_head=8, head_dim=64, ffn_dim=8192, vocab_size=128256, max_seq_len=131072, tie_embeddings=True, rope=dict(_LLAMA3, factor=32.0)),
    "llama-3.3-70b": dict(dim=8192, n_layer=80, n_head=64, n_kv_head=8, ffn_dim=28672, vocab_size=128256, max_seq_len=131072, rope=_LLAMA3),
    "mistral-7b": dict(n_kv_head=8, ffn_dim=14336, vocab_size=32768, max_seq_len=32768, rope=dict(theta=1e6)),
    "mistral-nemo-12b": dict(dim=5120, n_layer=40, n_kv_head=8, ffn_dim=14336, vocab_size=131072, max_seq_len=131072, rope=dict(theta=1e6)),
    "qwen2.5-0.5b": dict(dim=896, n_layer=24, n_head=14, n_kv_head=2, head_dim=64, ffn_dim=4864, vocab_size=151936, max_seq_len=32768, norm_eps=1e-6, qkv_bias=True, tie_embeddings=True, rope=dict(theta=1e6)),
    "qwen2.5-7b": dict(dim=3584, n_layer=28, n_head=28, n_kv_head=4, ffn_dim=18944, vocab_size=152064, max_seq_len=32768, norm_eps=1e-6, qkv_bias=True, rope=dict(theta=1e6)),
    "qwen3-0.6b": dict(dim=1024, n_layer=28, n_head=16, n_kv_head=8, ffn_dim=3072, vocab_size=151936, max_seq_len=40960, norm_eps=1e-6, qk_norm=True, tie_embeddings=True, rope=dict(theta=1e6)),
    "qwen3-8b": dict(n_layer=36, n_kv_head=8, ffn_dim=12288, vocab_size=151936, max_seq_len=40960, norm_eps=1e-6, qk_norm=True, rope=dict(theta=1e6)),
}
# fmt: on


# ---- rotary embedding ----


def rope_inv_freq(args: ModelArgs, seq_len: int | Tensor = 0) -> tuple[Tensor, float]:
    """Inverse frequencies [..., D/2] in fp32 and the factor on cos and sin. `seq_len` [...] matters to dynamic alone."""
    r, d = args.rope, args.head_dim
    original = r.original_max_position_embeddings or args.max_seq_len
    theta, scale = r.theta, 1.0
    exponent = torch.arange(0, d, 2, dtype=torch.float32, device="cpu") / d
    if r.type == "dynamic":
        n = torch.as_tensor(seq_len, dtype=torch.float64, device="cpu").clamp(min=args.max_seq_len)
        base = theta * (r.factor * n / args.max_seq_len - (r.factor - 1)) ** (d / (d - 2))
        return 1.0 / base.float()[..., None] ** exponent, scale
    inv_freq = 1.0 / theta**exponent
    if r.type == "linear":
        inv_freq = inv_freq / r.factor
    elif r.type == "llama3":  # slow down the wavelengths above the original context, blend those around it
        turns = original * inv_freq / (2 * math.pi)
        blend = ((turns - r.low_freq_factor) / (r.high_freq_factor - r.low_freq_factor)).clamp(0, 1)
        inv_freq = inv_freq * (blend + (1 - blend) / r.factor)
    elif r.type == "yarn":  # Peng et al. 2023: interpolate the channels that turn less than beta_slow times

        def channel(turns: float) -> float:
            return d * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = channel(r.beta_fast), channel(r.beta_slow)
        if r.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, d - 1)
        ramp = ((torch.arange(d // 2, device="cpu") - low) / (high - low or 0.001)).clamp(0, 1)
        inv_freq = inv_freq * (1 - ramp) + inv_freq / r.factor * ramp

        def mscale(m: float) -> float:
            return 0.1 * m * math.log(r.factor) + 1.0 if r.factor > 1 else 1.0

        if r.attention_factor is not None:
            scale = r.attention_factor
        elif r.mscale and r.mscale_all_dim:
            scale = mscale(r.mscale) / mscale(r.mscale_all_dim)
        else:
            scale = mscale(1.0)
    return inv_freq, scale


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [..., D] in halves (x1, x2) by cos, sin [..., D/2] that broadcast against it; computed in fp32."""
    x1, x2 = x.float().chunk(2, -1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).to(x.dtype)


class Rope(nn.Module):
    """cos and sin of every position a cache can hold, [R, T, D/2] fp32; what a method rotates with.

    R is 1, but for dynamic NTK, whose angles depend on each row's prompt length, it is the batch size. As in
    Hugging Face, a prompt longer than the model's context is rotated by its own length's base, and each token decoded
    after it by the base of its own position.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, args: ModelArgs, max_batch: int, max_seq_len: int, device: Any = None):
        super().__init__()
        self.args = args
        self.per_row = args.rope.type == "dynamic" and max_seq_len > args.max_seq_len
        pos = torch.arange(max_seq_len, dtype=torch.float32, device="cpu")
        if self.per_row:
            inv_freq, scale = rope_inv_freq(args, pos + 1)
            angle = pos[:, None] * inv_freq
        else:
            inv_freq, scale = rope_inv_freq(args)
            angle = torch.outer(pos, inv_freq)
        R = max_batch if self.per_row else 1
        tables = torch.stack((angle.cos() * scale, angle.sin() * scale)).to(device or torch.get_default_device())
        for name, table in zip(("cos", "sin"), tables, strict=True):
            self.register_buffer(name, table.expand(R, -1, -1).clone(), persistent=False)

    def set_prompt(self, lengths: Tensor) -> None:
        """Fit the tables to a batch of prompts; a no-op for all types but dynamic. lengths [B]."""
        if not self.per_row:
            return
        T = self.cos.shape[1]
        fresh = Rope(self.args, 1, T, self.cos.device)
        self.cos.copy_(fresh.cos.expand_as(self.cos))
        self.sin.copy_(fresh.sin.expand_as(self.sin))
        for row, n in enumerate(lengths.tolist()):
            angle = torch.outer(torch.arange(n, dtype=torch.float32), rope_inv_freq(self.args, n)[0])
            self.cos[row, :n], self.sin[row, :n] = angle.cos().to(self.cos), angle.sin().to(self.sin)

    def prompt(self, S: int) -> tuple[Tensor, Tensor]:
        """cos, sin [R, 1, S, D/2] of positions 0..S-1, ready for [B, H, S, D]."""
        return self.cos[:, None, :S], self.sin[:, None, :S]

    def at(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin [B, ..., D/2] at positions pos [B, ...] int64."""
        if not self.per_row:
            return self.cos[0][pos], self.sin[0][pos]
        row = torch.arange(pos.shape[0], device=pos.device).view(-1, *[1] * (pos.dim() - 1))
        return self.cos[row, pos], self.sin[row, pos]

    def rotate_prompt(self, x: Tensor) -> Tensor:
        """x [B, H, S, D] at positions 0..S-1."""
        cos, sin = self.prompt(x.shape[2])
        return apply_rope(x, cos[: len(x)], sin[: len(x)])

    def rotate(self, x: Tensor, pos: Tensor) -> Tensor:
        """x [B, H, D], one token per row, at pos [B]."""
        cos, sin = self.at(pos)
        return apply_rope(x, cos[:, None], sin[:, None])


# ---- memory ----


def available_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on the device."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    with open("/proc/meminfo") as f:
        lines = dict(line.split(":", 1) for line in f)
    return int(lines["MemAvailable"].split()[0]) * 1024


def require_memory(need: int, device: torch.device, what: str, advice: str) -> None:
    """InputError before an allocation that cannot succeed: better than being killed in the middle."""
    if device.type != "meta" and need > (free := available_memory(device)):
        raise InputError(f"{what} needs {need / 2**30:.2f} GiB, {free / 2**30:.2f} GiB are free on {device}: {advice}")


def _require_weights(model: nn.Module, device: torch.device) -> None:
    need = sum(p.numel() * p.element_size() for p in model.parameters())
    require_memory(need, device, "the model", "use --dtype bf16, a smaller model, or a device with more memory")


# ---- the network ----


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, args: ModelArgs, layer: int):
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = args.n_head, args.n_kv_head, args.head_dim
        self.window = args.window(layer)
        self.wqkv = nn.Linear(args.dim, (args.n_head + 2 * args.n_kv_head) * args.head_dim, bias=args.qkv_bias)
        self.wo = nn.Linear(args.n_head * args.head_dim, args.dim, bias=args.o_bias)
        self.q_norm = RMSNorm(args.head_dim, args.norm_eps) if args.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(args.head_dim, args.norm_eps) if args.qk_norm else nn.Identity()

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [..., dim] -> q [..., Hq, D], k and v [..., Hkv, D], before rotation."""
        heads = self.wqkv(x).unflatten(-1, (self.n_head + 2 * self.n_kv_head, self.head_dim))
        q, k, v = heads.split((self.n_head, self.n_kv_head, self.n_kv_head), -2)
        return self.q_norm(q), self.k_norm(k), v

    def query(self, x: Tensor) -> Tensor:
        """The q of `qkv` alone: x [..., dim] -> [..., Hq, D]."""
        n, bias = self.n_head * self.head_dim, self.wqkv.bias
        q = F.linear(x, self.wqkv.weight[:n], None if bias is None else bias[:n])
        return self.q_norm(q.unflatten(-1, (self.n_head, self.head_dim)))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Teacher forcing, no cache. x [B, S, dim], cos and sin [1, S, 1, D/2] -> [B, S, dim]."""
        q, k, v = self.qkv(x)
        q, k = apply_rope(q, cos, sin).transpose(1, 2), apply_rope(k, cos, sin).transpose(1, 2)
        y = prefill_attention(q, k, v.transpose(1, 2), self.window)
        return self.wo(y.transpose(1, 2).flatten(2))

    def prefill(self, x: Tensor, method: Any, lengths: Tensor) -> Tensor:
        """x [B, S, dim] -> [B, S, dim]; the method stores what it wants of the keys and values."""
        q, k, v = (t.transpose(1, 2) for t in self.qkv(x))
        y = method.prefill(q, k, v, lengths)  # [B, Hq, S, D]
        return self.wo(y.transpose(1, 2).flatten(2))

    def decode(self, x: Tensor, method: Any, pos: Tensor) -> Tensor:
        """One token per row. x [B, dim], pos [B] -> [B, dim]."""
        return self.wo(method.decode(*self.qkv(x), pos).flatten(1))


class FeedForward(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.w13 = nn.Linear(args.dim, 2 * args.ffn_dim, bias=args.mlp_bias)  # gate and up
        self.w2 = nn.Linear(args.ffn_dim, args.dim, bias=args.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w13(x).chunk(2, -1)
        return self.w2(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, args: ModelArgs, layer: int):
        super().__init__()
        self.attention = Attention(args, layer)
        self.feed_forward = FeedForward(args)
        self.attention_norm = RMSNorm(args.dim, args.norm_eps)
        self.ffn_norm = RMSNorm(args.dim, args.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))

    def prefill(self, x: Tensor, method: Any, lengths: Tensor) -> Tensor:
        x = x + self.attention.prefill(self.attention_norm(x), method, lengths)
        for part in x.view(-1, x.shape[-1]).split(MLP_CHUNK):  # in place: a chunk of MLP activations at a time
            part += self.feed_forward(self.ffn_norm(part))
        return x

    def predicted_query(self, x: Tensor) -> Tensor:
        """The query this layer would have if the layer before it changed nothing: x [B, dim] -> [B, Hq, D]."""
        return self.attention.query(self.attention_norm(x))

    def decode(self, x: Tensor, method: Any, pos: Tensor) -> Tensor:
        x = x + self.attention.decode(self.attention_norm(x), method, pos)
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    """A decoder: `forward` needs no KV cache; after `setup_cache`, `prefill` and `decode` use one."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers: Any = nn.ModuleList(Block(args, layer) for layer in range(args.n_layer))
        self.norm = RMSNorm(args.dim, args.norm_eps)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        if args.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight
        self.cache: Any = None  # an nn.ModuleList of KVMethod, one per layer
        self._rope: Rope | None = None  # the tables of `forward`
        self.folder: Path | None = None  # of the checkpoint, if there is one
        self.calibration: Any = None  # a calibrate.Calibration; by default the one in `folder`, read when it is needed

    def trunk(self, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """tokens [B, S], cos and sin [1, S, 1, D/2] -> the last hidden state after the norm, [B, S, dim]."""
        x = self.tok_embeddings(tokens)
        for block in self.layers:
            x = block(x, cos, sin)
        return self.norm(x)

    def rope_tables(self, S: int) -> tuple[Tensor, Tensor]:
        """cos and sin [1, S, 1, D/2] for teacher forcing over S tokens."""
        device = self.tok_embeddings.weight.device
        dynamic = self.args.rope.type == "dynamic"
        rope = self._rope
        if rope is None or dynamic or rope.cos.shape[1] < S or rope.cos.device != device:
            with torch.inference_mode(False):  # an evaluation may ask first, and training after it
                rope = Rope(self.args, 1, S if dynamic else max(S, 2048), device)
                rope.set_prompt(torch.tensor([S]))
            object.__setattr__(self, "_rope", rope)  # no submodule: .to(dtype) must leave the tables in fp32
        return rope.cos[:, :S, None], rope.sin[:, :S, None]

    def forward(self, tokens: Tensor) -> Tensor:
        """Teacher forcing without a cache: tokens [B, S] -> logits [B, S, V]."""
        return self.output(self.trunk(tokens, *self.rope_tables(tokens.shape[1])))

    def setup_cache(self, method: str, max_batch: int, max_seq_len: int, **method_args: Any) -> None:
        """Allocate every buffer of the KV cache. `method` is a name, a preset or a per-layer spec (kv_methods).

        InputError if the method or an argument is unknown or out of range, or if the buffers do not fit in memory.
        """
        from kv_methods import build_cache  # here, because the methods import this module

        use_native(self.norm.weight)  # if the CPU kernels are still to be compiled: not in the middle of a step
        self.cache = None  # the old buffers are free before the new ones are asked for
        self.cache = build_cache(self, method, max_batch, max_seq_len, **method_args)

    @torch.inference_mode()
    def prefill(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Right-padded prompts: tokens [B, S] int64, lengths [B] -> logits of each row's last token [B, V]."""
        assert self.cache is not None, "call setup_cache first"
        a, size = self.args, tokens.numel() * self.norm.weight.element_size()
        require_memory(
            size * (3 * a.dim + 3 * (a.n_head + 2 * a.n_kv_head) * a.head_dim),
            tokens.device,
            f"prefill of {tokens.shape[0]} x {tokens.shape[1]} tokens",
            "lower the batch or shorten the prompt",
        )
        self.cache[0].rope.set_prompt(lengths)
        x = self.tok_embeddings(tokens)
        for block, method in zip(self.layers, self.cache, strict=True):
            x = block.prefill(x, method, lengths)
        last = x[torch.arange(len(lengths), device=x.device), lengths - 1]
        return self.output(self.norm(last))

    def decode(self, tokens: Tensor, pos: Tensor) -> Tensor:
        """One step: tokens [B] at positions pos [B] -> logits [B, V]. A static graph; generate.py compiles it."""
        assert self.cache is not None, "call setup_cache first"
        x = self.tok_embeddings(tokens)
        for i, (block, method) in enumerate(zip(self.layers, self.cache, strict=True)):
            if i + 1 < len(self.layers) and self.cache[i + 1].predicts:
                self.cache[i + 1].prefetch(self.layers[i + 1].predicted_query(x), pos)
            x = block.decode(x, method, pos)
        return self.output(self.norm(x))

    def maintain(self, step: int) -> None:
        """Between decode steps, outside the compiled graph: what the methods do now and then."""
        for method in self.cache or ():
            method.maintain(step)

    def reset_cache(self) -> None:
        """Same buffers, empty."""
        for method in self.cache or ():
            method.reset()

    def cache_nbytes(self) -> dict[int, dict[str, int]]:
        """Bytes of every buffer as allocated: {layer: {buffer: bytes}}."""
        return {layer: method.nbytes() for layer, method in enumerate(self.cache or ())}


def _empty_transformer(args: ModelArgs, device: str | torch.device, dtype: torch.dtype) -> Transformer:
    """Weights allocated on the device, not filled."""
    with torch.device("meta"):
        model = Transformer(args).to(dtype)
    _require_weights(model, torch.device(device))
    model.to_empty(device=device)
    if torch.device(device).type == "cpu":
        # [in, out] in memory: BLAS is up to twice as fast on the one-row products of decoding (measured with MKL, fp32)
        for m in model.modules():
            if isinstance(m, nn.Linear):
                m.weight = nn.Parameter(torch.empty_like(m.weight.t(), memory_format=torch.contiguous_format).t())
    if args.tie_embeddings:  # to_empty unties them
        model.output.weight = model.tok_embeddings.weight
    return model


def random_transformer(args: ModelArgs, device: str | torch.device, dtype: torch.dtype, seed: int = 0) -> Transformer:
    """Random weights made on the device, std 0.02: for throughput runs that need no checkpoint."""
    model = _empty_transformer(args, device, dtype)
    gen = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 2:
                p.normal_(0, 0.02, generator=gen)
            elif name.endswith("bias"):
                p.zero_()
            else:
                p.fill_(1.0)
    return model.eval()


# ---- reading Hugging Face checkpoints ----

# model_type -> (q/k/v bias, o bias, q/k norm): True, False, or the config key that says so
FAMILIES: dict[str, tuple[bool | str, bool | str, bool]] = {
    "llama": ("attention_bias", "attention_bias", False),
    "mistral": (False, False, False),
    "qwen2": (True, False, False),
    "qwen3": ("attention_bias", "attention_bias", True),
}
# Keys of other architectures or of quantized checkpoints that change the numbers, with the values that do not.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (1.0, 1),
    "quantization_config": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "logits_scaling": (1.0, 1),
    "logit_scale": (1.0, 1),
    "embedding_multiplier": (1.0, 1),
    "residual_multiplier": (1.0, 1),
    "attention_multiplier": (),
    "query_pre_attn_scalar": (),
    "clip_qkv": (),
    "num_local_experts": (0, 1),
    "num_experts": (0, 1),
    "no_rope_layers": (),
    "attention_chunk_size": (),
}
ROPE_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {f.name for f in fields(RopeArgs)} - {"theta", "type", "low_freq_factor", "high_freq_factor"},
}


def _args_from_hf(c: dict[str, Any]) -> ModelArgs:
    family = c.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise InputError(f"unsupported architecture {family!r} in config.json: supported are {', '.join(FAMILIES)}")
    for key, neutral in NEUTRAL.items():
        if c.get(key) is not None and c[key] not in neutral:
            raise InputError(
                f"config.json sets {key} = {str(c[key])[:80]}, which is not supported and changes the output"
            )
    dim, n_layer, n_head = (_number(c, k) for k in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    n_kv_head = _number(c, "num_key_value_heads", n_head)
    head_dim = _number(c, "head_dim", 128 if family == "qwen3" else dim // n_head)
    if head_dim % 2:
        raise InputError(f"config.json: head_dim {head_dim} is odd, rotary embeddings need pairs of channels")
    if n_head % n_kv_head:
        raise InputError(f"config.json: num_attention_heads {n_head} is no multiple of num_key_value_heads {n_kv_head}")
    flag = [c.get(f, False) if isinstance(f, str) else f for f in FAMILIES[family]]
    context = {"llama": 2048, "mistral": 131072}.get(family, 32768)  # transformers' defaults for an absent key
    max_seq_len = _number(c, "max_position_embeddings", context)
    eos = [] if c.get("eos_token_id") is None else c["eos_token_id"]
    eos = eos if isinstance(eos, list) else [eos]
    if not all(isinstance(i, int) for i in eos):
        raise InputError(f"config.json: eos_token_id must be one or several token numbers, found {c['eos_token_id']!r}")
    return ModelArgs(
        dim=dim,
        n_layer=n_layer,
        n_head=n_head,
        n_kv_head=n_kv_head,
        head_dim=head_dim,
        ffn_dim=_number(c, "intermediate_size"),
        vocab_size=_number(c, "vocab_size"),
        max_seq_len=max_seq_len,
        norm_eps=_number(c, "rms_norm_eps", 1e-6, whole=False),
        rope=_rope_from_hf(c, max_seq_len),
        tie_embeddings=c.get("tie_word_embeddings", False),
        qkv_bias=bool(flag[0]),
        o_bias=bool(flag[1]),
        mlp_bias=family == "llama" and c.get("mlp_bias", False),
        qk_norm=bool(flag[2]),
        windows=_windows_from_hf(c, family, n_layer),
        dtype=str(c.get("dtype") or c.get("torch_dtype") or "float32").removeprefix("torch."),
        eos_ids=tuple(eos),
    )


def _number(c: dict[str, Any], key: str, default: float | None = None, whole: bool = True) -> Any:
    """A positive number of the config; InputError names the key if it is anything else."""
    value: Any = default if c.get(key) is None else c[key]
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
        kind = "whole number" if whole else "number"
        raise InputError(f"config.json: {key} must be a positive {kind}, found {value!r}")
    return value


def _windows_from_hf(c: dict[str, Any], family: str, n_layer: int) -> tuple[int | None, ...]:
    """Mistral slides in every layer, Qwen from max_window_layers on (or as layer_types says) if use_sliding_window."""
    if family == "llama" or (family != "mistral" and not c.get("use_sliding_window", False)):
        return ()
    if c.get("sliding_window", 4096) is None:
        return ()
    window = _number(c, "sliding_window", 4096)
    types = c.get("layer_types")
    if family == "mistral":
        if types and set(types) != {"sliding_attention"}:
            raise InputError("config.json sets layer_types on a mistral model, which is not supported")
        return (window,) * n_layer
    if not types:
        full = c.get("max_window_layers", 28)
        types = ["full_attention" if i < full else "sliding_attention" for i in range(n_layer)]
    if len(types) != n_layer or not set(types) <= {"full_attention", "sliding_attention"}:
        raise InputError(f"config.json: layer_types must name full_attention or sliding_attention for {n_layer} layers")
    return tuple(window if t == "sliding_attention" else None for t in types)


def _rope_from_hf(c: dict[str, Any], max_seq_len: int) -> RopeArgs:
    """Both layouts: rope_theta + rope_scaling, and the newer rope_parameters (transformers v5)."""
    p = c.get("rope_scaling") or c.get("rope_parameters") or {}
    if not isinstance(p, dict):
        raise InputError(f"config.json: rope_scaling or rope_parameters must be an object, found {p!r}")
    p = dict(p)
    if any(isinstance(v, dict) for v in p.values()):
        raise InputError("config.json: rope_parameters per layer type are not supported")
    kind = p.pop("rope_type", None) or p.pop("type", None) or "default"
    p.pop("type", None)
    theta = _number(
        {"rope_theta": p.pop("rope_theta", None) or c.get("rope_theta")}, "rope_theta", 10_000.0, whole=False
    )
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        raise InputError(f"unsupported rope type {kind!r} in config.json: supported are {', '.join(ROPE_KEYS)}")
    if p.pop("partial_rotary_factor", 1.0) != 1.0:
        raise InputError("config.json sets partial_rotary_factor, which is not supported and changes the output")
    known = {k: v for k, v in p.items() if k in ROPE_KEYS[kind] and v is not None}
    extra = {k for k, v in p.items() if v is not None} - ROPE_KEYS[kind]
    if kind != "default" and extra - {"original_max_position_embeddings"}:
        raise InputError(f"config.json: rope parameter {sorted(extra)[0]!r} is not known for rope type {kind!r}")
    if kind in ("llama3", "yarn") and c.get("original_max_position_embeddings"):
        known["original_max_position_embeddings"] = c["original_max_position_embeddings"]
    for key in known.keys() - {"truncate"}:
        _number(known, key, whole=False)
    if "factor" in ROPE_KEYS[kind] and "factor" not in known:
        if kind == "yarn" and "original_max_position_embeddings" in known:
            known["factor"] = max_seq_len / known["original_max_position_embeddings"]
        else:
            raise InputError(f"config.json: rope type {kind!r} needs a factor")
    return RopeArgs(theta=float(theta), type=kind, **known)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; InputError if it is missing or is not one."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} is missing: a checkpoint is a Hugging Face folder with config.json, *.safetensors "
                         "and tokenizer files") from None  # fmt: skip
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as e:
        raise InputError(f"cannot read {path} as JSON: {e}") from None
    if not isinstance(data, dict):
        raise InputError(f"{path} holds a JSON {type(data).__name__}, expected an object")
    return data


def load_checkpoint(
    path: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = torch.float32
) -> Transformer:
    """Read a Hugging Face folder as it is: config.json and *.safetensors, one file or shards with an index.

    Weights are memory-mapped and copied once into place, q/k/v and gate/up fused on the way; `dtype` None keeps the
    checkpoint's. InputError if a file is missing or truncated, or a tensor is missing, unexpected or of a wrong shape.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise InputError(f"checkpoint folder {folder} not found: give --checkpoint a Hugging Face model folder")
    args = ModelArgs.from_hf(read_json(folder / "config.json"))
    if dtype is None:
        if args.dtype not in ("float32", "bfloat16", "float16"):
            raise InputError(f"config.json: dtype {args.dtype!r} is not float32, bfloat16 or float16: give --dtype")
        dtype = getattr(torch, args.dtype)
    model = _empty_transformer(args, device, dtype)
    model.folder = folder
    targets, head = _load_targets(model), None
    for file in _weight_files(folder):
        try:
            with safe_open(file, framework="pt", device="cpu") as f:
                for name in f.keys():  # noqa: SIM118, a safe_open is no dict
                    if name.endswith("rotary_emb.inv_freq"):
                        continue
                    if name == "lm_head.weight" and args.tie_embeddings:
                        head = f.get_tensor(name)
                        continue
                    if name not in targets:
                        raise InputError(f"unexpected tensor {name} in {file}: config.json describes another model")
                    target = targets.pop(name)
                    if (found := tuple(f.get_slice(name).get_shape())) != tuple(target.shape):
                        raise InputError(
                            f"tensor {name} in {file} has shape {list(found)}, expected {list(target.shape)} by config.json"
                        )
                    if (kind := f.get_slice(name).get_dtype()) not in ("F64", "F32", "F16", "BF16"):
                        raise InputError(f"tensor {name} in {file} is {kind}: quantized checkpoints are not supported")
                    target.copy_(f.get_tensor(name))
        except (SafetensorError, OSError) as e:
            raise InputError(f"cannot read {file}: {e}; the file is truncated or is no safetensors file") from None
    if targets:
        raise InputError(f"tensor {next(iter(targets))} is missing from {folder} ({len(targets)} missing in all)")
    if head is not None and not torch.equal(head.to(model.output.weight), model.output.weight):
        raise InputError(f"lm_head.weight in {folder} is not the embedding, as tie_word_embeddings in config.json says")
    return model.eval()


def _weight_files(folder: Path) -> list[Path]:
    """The shards an index names, or every *.safetensors of the folder."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards or not all(isinstance(s, str) for s in shards.values()):
            raise InputError(f"{index} has no weight_map from tensors to files")
        files = [folder / name for name in sorted(set(shards.values()))]
        if gone := [f.name for f in files if f.parent != folder or not f.is_file()]:
            raise InputError(f"{index} names {gone[0]}, which is not in the folder: download the missing shard")
        return files
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    files = sorted(f for f in folder.glob("*.safetensors") if not f.name.startswith("calibration"))
    if not files:
        raise InputError(f"no *.safetensors in {folder}: only safetensors checkpoints are read, pickles never are")
    return files


def _load_targets(model: Transformer) -> dict[str, Tensor]:
    """Hugging Face's tensor names -> views of our parameters; fused ones are slices."""
    a = model.args
    out: dict[str, Tensor] = {}

    def add(name: str, module: nn.Module) -> None:
        for kind, p in module.named_parameters(recurse=False):
            out[f"{name}.{kind}"] = p.data

    def add_fused(names: list[str], sizes: list[int], module: nn.Module) -> None:
        for kind, p in module.named_parameters(recurse=False):
            out.update({f"{n}.{kind}": part for n, part in zip(names, p.data.split(sizes), strict=True)})

    add("model.embed_tokens", model.tok_embeddings)
    add("model.norm", model.norm)
    if not a.tie_embeddings:
        add("lm_head", model.output)
    block: Any  # nn.ModuleList does not know what it holds
    for i, block in enumerate(model.layers):
        at, ff, pre = block.attention, block.feed_forward, f"model.layers.{i}"
        heads = [a.n_head * a.head_dim, a.n_kv_head * a.head_dim, a.n_kv_head * a.head_dim]
        add_fused([f"{pre}.self_attn.{x}_proj" for x in "qkv"], heads, at.wqkv)
        add_fused([f"{pre}.mlp.{x}_proj" for x in ("gate", "up")], [a.ffn_dim] * 2, ff.w13)
        add(f"{pre}.self_attn.o_proj", at.wo)
        add(f"{pre}.self_attn.q_norm", at.q_norm)
        add(f"{pre}.self_attn.k_norm", at.k_norm)
        add(f"{pre}.mlp.down_proj", ff.w2)
        add(f"{pre}.input_layernorm", block.attention_norm)
        add(f"{pre}.post_attention_layernorm", block.ffn_norm)
    return out


def save_checkpoint_tensors(model: Transformer, dtype: torch.dtype) -> dict[str, Tensor]:
    """The model's weights under Hugging Face's names, unfused, contiguous: what safetensors' save_file takes."""
    return {name: t.to(dtype).contiguous().clone() for name, t in _load_targets(model).items()}
