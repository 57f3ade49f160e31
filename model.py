"""The decoder of Llama and of the families that differ from it in a line, with a swappable KV cache.

loading/ fills it from Hugging Face folders, engine/ generates with it. Rotary embeddings keep Hugging Face's
half-split layout, so channel lists and bases mean the same everywhere. A family is data: the fields of ModelArgs.
Shapes: B rows, S prompt tokens, Hq query heads, Hkv KV heads, D head_dim, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from cache.base import CacheShape, KVMethod, OncePerStep
from cache.calibration import Calibration, RandomCalibration
from cache.key_bias import center_keys
from cache.prompt import Angles, second_pass
from cache.spec import Methods, build_cache, layer_methods, method_name
from kernels.backend import version_for
from kernels.dense_attention import prefill_attention
from kernels.layer import Matrix, finish_layer, has_few_rows, project_heads
from kernels.linear import serves_dense
from kernels.native import VECTOR
from kernels.rope import Rope, RopeArgs, apply_rope, grow
from runtime.errors import InputError
from runtime.machine import as_path, require_memory
from runtime.parallel import ONE, Ranks
from weights import CenteredNorm, Experts, HeadsNorm, Joined, Linear, first_outputs

SILENT = 2.0  # seconds before a bar says how far a prompt is read
MLP_CHUNK = 8192  # tokens per MLP call in prefill: bounds the [tokens, 2 * ffn_dim] activation


@dataclass
class ModelArgs:
    """Shape and numerics of a decoder: loading/ reads them from a config.json, or knows them by name."""

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
    n_expert: int = 0  # experts of a layer, in place of the MLP
    n_active: int = 1  # of a token
    expert_dim: int = 0
    shared_dim: int = 0  # of the expert that all tokens share; 0: there is none
    norm_topk: bool = True  # the weights of a token's experts sum to 1
    dense_layers: tuple[int, ...] = ()  # that have the MLP
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()  # sliding window of each layer, None: attend to everything
    ropes: tuple[RopeArgs, ...] = ()  # of each layer, if they differ
    query_growth: float = 0.0  # of queries with their position, beyond rope's original context (Ministral 3)
    qk_norm_all: bool = False  # qk_norm is one norm over all heads (OLMo 2)
    centered_norm: bool = False  # a norm's weight is stored as its distance from one (Gemma)
    pre_norm: bool = True  # of the input of attention and MLP
    post_norm: bool = False  # of their output
    act: str = "silu"  # of the MLP's gate
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and MLP add
    query_scale: float = 1.0  # beside 1 / sqrt(head_dim)
    logit_scale: float = 1.0
    logit_cap: float | None = None
    dtype: str = "bfloat16"
    eos_ids: tuple[int, ...] = ()
    ranks: Ranks = ONE  # the processes that share the model; all sizes here are those of the full model

    @property
    def local(self) -> ModelArgs:
        """The sizes of this rank: its KV heads with all their queries, its part of the MLP and of the vocabulary. Every
        rank holds the full embedding. Raises InputError if the ranks do not divide the sizes."""
        n = self.ranks.size
        if n == 1:
            return self
        H, Hkv, ffn = self.n_head, self.n_kv_head, math.gcd(self.ffn_dim, self.expert_dim, self.shared_dim)
        divide = [m for m in range(1, H + 1) if not (H % m or ffn % m or min(Hkv % m, m % Hkv))]
        if n not in divide:
            raise InputError(f"{n} processes cannot share {H} heads, {Hkv} KV heads and an MLP of {ffn}: start "
                             f"{', '.join(map(str, divide))}")  # fmt: skip
        vocab = self.vocab_size // n if self.vocab_size % n == 0 else self.vocab_size
        own = len(self.ranks.heads(Hkv))
        widths = {x: getattr(self, x) // n for x in ("ffn_dim", "expert_dim", "shared_dim")}
        return replace(self, n_head=own * (H // Hkv), n_kv_head=own, vocab_size=vocab, **widths)

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    @property
    def layer_ropes(self) -> tuple[RopeArgs, ...]:
        return self.ropes or (self.rope,) * self.n_layer

    @property
    def plain(self) -> bool:
        """Whether blocks compute what Llama's do (biases, norms of q and k by head, ropes and windows aside)."""
        odd = self.post_norm or self.centered_norm or self.qk_norm_all or self.query_growth or not self.pre_norm
        return not (odd or self.n_expert) and (self.act, self.residual_scale, self.query_scale) == ("silu", 1.0, 1.0)

    @property
    def context(self) -> int:
        """The longest context in tokens: max_seq_len, which dynamic NTK stretches by its factor."""
        return int(self.max_seq_len * (self.rope.factor if self.rope.type == "dynamic" else 1))

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raises InputError for an id that the model has no embedding for: a tokenizer may exceed vocab_size."""
        for id in (min(ids), max(ids)) if ids else ():
            if not 0 <= id < self.vocab_size:
                raise InputError(f"the text has token {id}, the model embeds {self.vocab_size} (vocab_size in "
                                 "config.json): leave that token out, or use the model's own tokenizer")  # fmt: skip

    def rotary(self, max_batch: int, max_seq_len: int, device: Any = None, rope: RopeArgs | None = None,
               new_tokens: int | None = None) -> Rope:  # fmt: skip
        """The rotary tables of positions 0 to max_seq_len - 1. rope: that of a layer, if layers differ."""
        size = (self.head_dim, self.max_seq_len, max_batch, max_seq_len)
        return Rope(rope or self.rope, *size, device, new_tokens or 0)

    def cache_shape(self, layer: int, max_batch: int, max_seq_len: int, dtype: torch.dtype, device: Any = "cpu",
                    max_new_tokens: int | None = None, drafts: int = 0) -> CacheShape:  # fmt: skip
        """The shape by which a method allocates the cache of that layer, on this rank."""
        own = self.local
        return CacheShape(max_batch, max_seq_len, own.n_head, own.n_kv_head, self.head_dim, dtype,
                          torch.device(device), self.window(layer), self.n_layer, max_new_tokens, drafts,
                          self.ranks, self.n_kv_head)  # fmt: skip


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q [..., Hq, D], k and v [..., Hkv, D] -> [..., Hq, D]
ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "gelu": F.gelu, "gelu_pytorch_tanh": functools.partial(F.gelu, approximate="tanh"),
}  # fmt: skip


# ---- the network ----


def make_norm(args: ModelArgs, dim: int, there: bool = True) -> nn.Module:
    return (CenteredNorm if args.centered_norm else nn.RMSNorm)(dim, args.norm_eps) if there else nn.Identity()


class Attention(nn.Module):
    def __init__(self, args: ModelArgs, layer: int):
        super().__init__()
        self.ranks, self.mine, args = args.ranks, args.ranks.queries(args.n_head, args.n_kv_head), args.local
        self.n_head, self.n_kv_head, self.head_dim = args.n_head, args.n_kv_head, args.head_dim
        self.window = args.window(layer)
        heads = (args.n_head, args.n_kv_head, args.n_kv_head)
        self.wqkv = Linear(args.dim, [n * args.head_dim for n in heads], bias=args.qkv_bias)
        self.wo = Linear((self.mine.stop - self.mine.start) * args.head_dim, args.dim, bias=args.o_bias)
        norms: Any = [make_norm(args, args.head_dim, args.qk_norm) for _ in "qk"]
        if args.qk_norm_all:
            norms = [HeadsNorm(n, args.head_dim, args.norm_eps, args.ranks) for n in heads[:2]]
        self.q_norm, self.k_norm = norms
        self.query_scale = args.query_scale
        self.growth = args.query_growth, args.rope.original_max_position_embeddings or args.max_seq_len

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [..., dim] -> q [..., Hq, D], k and v [..., Hkv, D], before rotation."""
        heads = self.wqkv(x).unflatten(-1, (self.n_head + 2 * self.n_kv_head, self.head_dim))
        q, k, v = heads.split((self.n_head, self.n_kv_head, self.n_kv_head), -2)
        return self._scaled(self.q_norm(q)), self.k_norm(k), v

    def query(self, x: Tensor) -> Tensor:
        """Only the q of `qkv`: x [..., dim] -> [..., Hq, D]."""
        q = first_outputs(self.wqkv, x, self.n_head * self.head_dim)
        return self._scaled(self.q_norm(q.unflatten(-1, (self.n_head, self.head_dim))))

    def _scaled(self, q: Tensor) -> Tensor:
        return q if self.query_scale == 1.0 else q * self.query_scale

    def grown(self, q: Tensor, first: int | Tensor) -> Tensor:
        return grow(q, first, *self.growth) if self.growth[0] else q

    def output_weights(self, like: Tensor) -> Tensor:
        """W_O of this rank's query heads, dequantized if need be: [Hq, D, dim], with dtype and device of `like`."""
        each = torch.eye(self.wo.in_features, dtype=like.dtype, device=like.device)
        return (self.wo(each) - self.wo(torch.zeros_like(each[:1]))).unflatten(0, (-1, self.head_dim))

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """x [..., dim] -> [..., dim]; `attend` computes attention over its arguments and the cache, if there is one."""
        y = attend(*self.qkv(x))
        if y.shape[-2] != self.mine.stop - self.mine.start:
            y = y[..., self.mine, :]
        return self.ranks.sum(self.wo(y.flatten(-2)))

    def uncached(self, cos: Tensor, sin: Tensor) -> Attend:
        """Causal attention within a text, for teacher forcing. cos and sin [1, S, 1, D/2]."""

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q = self.grown(q, 0)
            q, k, v = (x.transpose(1, 2) for x in (apply_rope(q, cos, sin), apply_rope(k, cos, sin), v))
            return prefill_attention(q, k, v, self.window).transpose(1, 2)

        return attend


class FeedForward(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.ranks, self.act, args = args.ranks, ACTS[args.act], args.local
        self.w13 = Linear(args.dim, [args.ffn_dim] * 2, bias=args.mlp_bias)  # gate and up
        self.w2 = Linear(args.ffn_dim, args.dim, bias=args.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w13(x).chunk(2, -1)
        return self.ranks.sum(self.w2(self.act(gate) * up))


def make_feed_forward(args: ModelArgs, layer: int) -> nn.Module:
    """The MLP of a layer, or its experts."""
    if not args.n_expert or layer in args.dense_layers:
        return FeedForward(args)
    shared = FeedForward(replace(args, ffn_dim=args.shared_dim)) if args.shared_dim else None
    sizes = args.dim, args.n_expert, args.n_active, args.local.expert_dim
    return Experts(*sizes, args.norm_topk, ACTS[args.act], args.ranks, shared)


class Block(nn.Module):
    def __init__(self, args: ModelArgs, layer: int):
        super().__init__()
        self.attention = Attention(args, layer)
        self.feed_forward = make_feed_forward(args, layer)
        self.attention_norm, self.ffn_norm = (make_norm(args, args.dim, args.pre_norm) for _ in range(2))
        self.attention_post, self.ffn_post = (make_norm(args, args.dim, args.post_norm) for _ in range(2))
        self.scale, self.eps, self.plain = args.residual_scale, args.norm_eps, args.plain and args.ranks.size == 1

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """x [..., dim] -> [..., dim]. Teacher forcing, prompts and decode steps share this residual path."""
        if self.plain and (matrices := self.in_two_calls(x)) is not None:
            return self.two_calls(x, attend, *matrices)
        x = x + self.added(self.attention(self.attention_norm(x), attend), self.attention_post)
        if x.dim() == 2 or x[..., 0].numel() <= MLP_CHUNK or torch.is_grad_enabled():
            return x + self.added(self.feed_forward(self.ffn_norm(x)), self.ffn_post)
        for part in x.view(-1, x.shape[-1]).split(MLP_CHUNK):  # in place, one chunk of MLP activations at a time
            part += self.added(self.feed_forward(self.ffn_norm(part)), self.ffn_post)
        return x

    def added(self, y: Tensor, norm: nn.Module) -> Tensor:
        """What the output y of attention or MLP adds to the residual stream."""
        return norm(y) if self.scale == 1.0 else norm(y) * self.scale

    def in_two_calls(self, x: Tensor) -> list[Matrix] | None:
        """The operands of `two_calls`, if x is for them."""
        a, f = self.attention, self.feed_forward
        linears: Any = (a.wqkv, a.wo, f.w13, f.w2)
        whole = all(n % VECTOR == 0 for n in (a.head_dim, x.shape[-1], linears[3].in_features))
        if not whole or not has_few_rows(x) or any(type(linear) is Joined for linear in linears):
            return None
        matrices = [linear.matrix for linear in linears]
        return matrices if all(w.bits or serves_dense(x, w.weight) for w in matrices) else None

    def two_calls(self, x: Tensor, attend: Attend, wqkv: Matrix, wo: Matrix, w13: Matrix, w2: Matrix) -> Tensor:
        """`forward` for few rows on a CPU, where a step takes the time of torch's calls more than that of its work."""
        a, norms = self.attention, (self.attention_norm, self.ffn_norm)
        before, after = (norm.get_parameter("weight") for norm in norms)
        sizes = (a.n_head, a.n_kv_head, a.n_kv_head)
        q_norm, k_norm = (getattr(x, "weight", None) for x in (a.q_norm, a.k_norm))
        heads = project_heads(x, before, self.eps, wqkv, q_norm, k_norm, *sizes[:2], a.head_dim)
        return finish_layer(x, attend(*heads.split(sizes, -2)), wo, after, self.eps, w13, w2)

    def predicted_query(self, x: Tensor) -> Tensor:
        """The query of this layer if the layer before it were the identity: x [B, dim] -> [B, Hq, D]."""
        return self.attention.query(self.attention_norm(x))


class Transformer(nn.Module):
    """A decoder. `forward` needs no KV cache; `prefill` and `decode` use the one made by `setup_cache`."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        size = args.vocab_size, args.dim
        # not initialized: on the meta device, initialization imports a compiler, which takes over a second
        self.tok_embeddings: Any = nn.Embedding(*size, _weight=torch.empty(size))
        self.layers: Any = nn.ModuleList(Block(args, layer) for layer in range(args.n_layer))
        self.norm: Any = make_norm(args, args.dim)
        self.output = Linear(args.dim, args.local.vocab_size, bias=False)
        if self.tied:
            self.output.weight = self.tok_embeddings.weight
        self.kv_dtype: torch.dtype | None = None  # dtype of keys and values in the cache; None: the compute dtype
        self.once = OncePerStep()  # shared by the layers of `cache`
        self.cache: Any = None  # an nn.ModuleList of KVMethod, one per layer
        self.prefill_chunk: int | None = None  # prompt tokens per prefill chunk; None: the whole prompt
        self.encode: Callable[[str], list[int]] = lambda text: []  # the tokenizer's, if there is one
        self._ropes: dict[RopeArgs, Rope] = {}  # the tables of `forward`
        self.folder: Path | None = None  # the checkpoint's folder or GGUF file, if there is one
        self.calibration: Calibration | None = None  # by default the one in `folder`, read when it is needed

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding. Never with several ranks: each holds rows of the head."""
        return self.args.tie_embeddings and self.args.ranks.size == 1

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype the model computes in; weights and cache may use others."""
        return self.norm.weight.dtype

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens [...] -> [..., dim], the first block's input."""
        x, scale = self.tok_embeddings(tokens).to(self.dtype), self.args.embed_scale
        return x if scale == 1.0 else x * x.new_full((), scale)  # rounded to the dtype, as in Gemma's training

    def logits(self, x: Tensor) -> Tensor:
        """The last block's output [..., dim] -> [..., V]."""
        y, cap = self.output(self.norm(x)), self.args.logit_cap
        if self.args.logit_scale != 1.0:
            y = y * self.args.logit_scale
        if cap:
            y = cap * (y / cap).tanh()
        return y if y.shape[-1] == self.args.vocab_size else self.args.ranks.gather(y)

    # ---- without a cache ----

    def forward(self, tokens: Tensor) -> Tensor:
        """Teacher forcing without a cache: tokens [B, S] -> logits [B, S, V]."""
        last = deque(self.hidden_states(tokens), maxlen=1)
        return self.logits(last.pop())

    def hidden_states(self, tokens: Tensor) -> Iterator[Tensor]:
        """Teacher forcing: yields the input of each block, then the output of the last one, [B, S, dim]."""
        x = self.embed(tokens)
        yield x
        for i, block in enumerate(self.layers):
            x = block(x, block.attention.uncached(*self.rope_tables(tokens.shape[1], i)))
            yield x

    def rope_tables(self, S: int, layer: int = 0) -> tuple[Tensor, Tensor]:
        """A layer's cos and sin [1, S, 1, D/2] for teacher forcing over S tokens."""
        args = self.args.layer_ropes[layer]
        rope = self._ropes.get(args)
        if rope is None or args.varies or rope.cos.shape[1] < S or rope.cos.device != self.device:
            with torch.inference_mode(False):  # an evaluation may ask first, and training after it
                rope = self.args.rotary(1, S if args.varies else max(S, 2048), self.device, args)
                rope.set_prompt(torch.tensor([S]))
            self._ropes[args] = rope  # no submodule: .to(dtype) must leave the tables in fp32
        return rope.cos[:, :S, None], rope.sin[:, :S, None]

    # ---- with one ----

    def setup_cache(self, method: str | Methods, max_batch: int, max_seq_len: int, max_new_tokens: int | None = None,
                    *, drafts: int = 0, **knobs: Any) -> None:  # fmt: skip
        """Allocate every buffer of the KV cache. method: a name, a preset, a spec by layers (cache/spec.py), or the
        `layer_methods` of one. max_seq_len counts prompt and new tokens together. If max_new_tokens is known, methods
        allocate no slots that neither the prompt nor the new tokens can fill. drafts: the number of tokens drafted at a
        time and then checked, for which the cache gets extra slots. Raises InputError if the method or a knob is
        unknown or out of range, if the method cannot draft, or if the buffers do not fit in memory."""
        if max_batch < 1 or max_seq_len < 1:
            raise InputError(f"the cache needs a batch and a length of at least 1, got {max_batch} and {max_seq_len}")
        if max_new_tokens is not None and not 0 <= max_new_tokens < max_seq_len:
            raise InputError(f"max_new_tokens {max_new_tokens} leaves no tokens for a prompt in {max_seq_len}")
        args, w = self.args, self.norm.weight
        layers = layer_methods(method, args.n_layer, knobs) if isinstance(method, str) else method
        version_for(w.device, w.dtype)  # compiles the CPU kernels now, if need be, and not in the middle of a step
        self.cache = None  # frees the old buffers before the new ones are allocated

        def ropes(device: torch.device) -> list[Rope]:
            return self.make_ropes(layers, device, max_batch, max_seq_len if device.type != "meta" else 1,
                                   max_new_tokens)  # fmt: skip

        if drafts and (cannot := next((cls for cls, _ in layers if not cls.verifies), None)):
            add = "Add keep=full to store them, or draft" if cannot.rewinds else "Draft"
            raise InputError(f"method {method_name(cannot)} cannot draft: it does not hold all keys and values. {add} "
                             "with double_sparsity, quest, loki, sparq or hshare")  # fmt: skip
        max_seq_len, new = max_seq_len + drafts, max_new_tokens and max_new_tokens + drafts
        size = (max_batch, max_seq_len, self.kv_dtype or w.dtype, w.device, new, drafts)
        shapes = [args.cache_shape(i, *size) for i in range(args.n_layer)]
        self.cache = build_cache(layers, shapes, ropes, self.find_calibration)
        for block, layer in zip(self.layers, self.cache, strict=True):
            for part in layer.modules():  # a method may contain others
                if isinstance(part, KVMethod):
                    part.output_weights = functools.partial(block.attention.output_weights, w)
                    part.once = self.once
        center_keys(self.layers, self.cache)

    def make_ropes(self, layers: Methods, device: torch.device, max_batch: int, max_seq_len: int,
                   new_tokens: int | None) -> list[Rope]:  # fmt: skip
        """The rotary tables of each layer for its method."""
        size, each = (max_batch, max_seq_len, device), self.args.layer_ropes
        tables = {rope: self.args.rotary(*size, rope, new_tokens) for rope in set(each)}
        return [tables[rope] for rope in each]

    def find_calibration(self) -> Calibration:
        """The calibration set on the model, or else the file in the checkpoint's folder or beside its GGUF file. Raises
        InputError if there is none.

        A model of random weights cannot be calibrated: it gets random bases, which take the same time to apply.
        """
        if self.calibration is None:
            if self.folder is None:
                return RandomCalibration(self.args)
            self.calibration = Calibration.load(self.folder, self.args)
        return self.calibration

    def use_calibration(self, file: str | Path | Sequence[str | Path] | None) -> None:
        """Use the calibration in a file, or in several; None: the default again. A cache, which may hold the bases of
        another, is dropped. Raises InputError if it is another model's."""
        self.calibration = self.cache = None
        given = [] if file is None else list(file) if isinstance(file, list | tuple) else [file]
        if files := [as_path(f, "a calibration") for f in given]:
            if self.folder is None:
                raise InputError("random weights have no calibration: drop --calibration, or give a --checkpoint")
            self.calibration = Calibration.joined(self.folder, self.args, files)

    @torch.inference_mode()
    def prefill(self, tokens: Tensor, lengths: Tensor, chunk: int | None = None) -> Tensor:
        """Right-padded prompts: tokens [B, S] int64, lengths [B] -> logits of each row's last token [B, V].

        chunk: the number of tokens per chunk, by default `prefill_chunk`. A layer reads all chunks before the next
        layer starts, so memory holds one chunk's activations, one layer's input and its queries, keys and values.
        """
        assert self.cache is not None, "call setup_cache first"
        S, chunk = tokens.shape[1], chunk or self.prefill_chunk or tokens.shape[1]
        texts = second_pass(self.cache, tokens, lengths, self.encode)
        self._check_prompt(tokens, min(chunk, S))
        most = S + max((t.tokens.shape[1] for t in texts), default=0)
        angles = {rope: Angles(rope, lengths, most) for rope in {m.rope for m in self.cache}}
        for rope in angles:
            rope.set_prompt(lengths)
        x, again = self.embed(tokens), [self.embed(t.tokens) for t in texts]
        # on a terminal only; a layer reads its share of every token, and a GPU is not waited for
        with tqdm(total=tokens.numel(), desc="prompt", unit="token", delay=SILENT, leave=False, disable=None) as bar:
            for layer, (block, method) in enumerate(zip(self.layers, self.cache, strict=True)):
                kind = block.attention, method.shape.dtype
                if chunk >= S and not texts:
                    x = block(x, attending(*kind, method.prefill, 0, lengths))
                    bar.update(tokens.numel() * (layer + 1) // len(self.layers) - bar.n)
                    continue
                method.begin_prompt(S)
                for start in range(0, S, chunk):
                    part = x[:, start : start + chunk]
                    part.copy_(block(part, attending(*kind, method.prefill, start, lengths, start)))
                    bar.update(len(tokens) * (layer * S + min(start + chunk, S)) // len(self.layers) - bar.n)
                read = functools.partial(attending, *kind, angles[method.rope].rotated(method.reread), lengths, lengths)
                again = [block(y, read(t)) for y, t in zip(again, texts, strict=True)]
                method.end_prompt(lengths)
        return self.logits(x[torch.arange(len(lengths), device=x.device), lengths - 1])

    def _check_prompt(self, tokens: Tensor, chunk: int) -> None:
        (rows, length), a, shape = tokens.shape, self.args.local, self.cache[0].shape
        if chunk < length and (refused := [m for m in self.cache if not m.takes_chunks]):
            raise InputError(f"method {type(refused[0]).__name__} needs a whole prompt at a time: leave out "
                             f"--prefill-chunk, or give at least the {length} tokens of this one")  # fmt: skip
        if rows > shape.max_batch or length > shape.max_prompt:
            raise InputError(f"prompts of {rows} x {length} tokens do not fit in a cache of {shape.max_batch} x "
                             f"{shape.max_prompt}: set up a larger cache")  # fmt: skip
        numbers = chunk * (3 * a.dim + 3 * (a.n_head + 2 * a.n_kv_head) * a.head_dim)
        if chunk < length:
            numbers += length * (a.dim + (a.n_head + 3 * a.n_kv_head) * a.head_dim)
        require_memory(rows * numbers * self.dtype.itemsize, tokens.device, f"prefill of {rows} x {length} tokens",
                       "lower the batch or --prefill-chunk, or shorten the prompt")  # fmt: skip

    def decode(self, tokens: Tensor, pos: Tensor) -> Tensor:
        """One step: tokens [B] at positions pos [B] -> logits [B, V]. Or exact attention of n tokens of each row, the
        first ones at pos: [B, n] -> [B, n, V]; their keys and values replace those drafted there. A static graph;
        engine/compiled.py compiles it."""
        # no autograd history, whoever calls; a compiled graph cannot enter inference mode
        compiling = torch.compiler.is_compiling()
        with torch.no_grad() if compiling else torch.inference_mode(), nullcontext() if compiling else self.once:
            x = self.embed(tokens)
            for part in self.decode_parts():
                x = layer_step(part, x, pos)
            return self.logits(x)

    @torch.inference_mode()
    def rewind(self, pos: Tensor, end: Tensor) -> None:
        """Take back the tokens from pos [B] up to end [B]: they are no longer part of the text."""
        for method in self.cache or ():
            method.rewind(pos, end)

    def decode_parts(self) -> list[Any]:
        """For each layer its block and method, and those of the next layer if that method prefetches, else None."""
        assert self.cache is not None, "call setup_cache first"
        layers = list(zip(self.layers, self.cache, strict=True))
        ahead = [after if after[1].predicts else None for after in layers[1:]]
        return [(*layer, after) for layer, after in zip(layers, [*ahead, None], strict=True)]

    @torch.inference_mode()
    def maintain(self, step: int) -> None:
        """Called after decode step `step` since the prompt, counted from 1; runs outside the compiled graph.

        Raises InputError if the cache was set up for fewer new tokens: the next token would overwrite another.
        """
        most = self.cache[0].shape.max_new_tokens if self.cache else None
        if most is not None and step > most:
            raise InputError(f"{step} tokens were decoded, the cache was set up for max_new_tokens={most}")
        for method in self.cache or ():
            method.maintain(step)

    @torch.inference_mode()
    def reset_cache(self) -> None:
        """Empty the cache and keep its buffers."""
        for method in self.cache or ():
            method.reset()

    def cache_nbytes(self) -> dict[int, dict[str, int]]:
        """Bytes of every buffer as allocated: {layer: {buffer: bytes}}; `kv_bytes`: of all of them."""
        return {layer: method.nbytes() for layer, method in enumerate(self.cache or ())}

    def kv_bytes(self) -> int:
        return sum(sum(b.values()) for b in self.cache_nbytes().values())

    def kv_bytes_full(self, batch: int, max_seq_len: int) -> int:
        """Bytes of dense keys and values of that capacity, of a sliding window's if narrower, in the cache's dtype."""
        a, dtype = self.args, self.kv_dtype or self.dtype
        tokens = sum(min(a.window(i) or max_seq_len, max_seq_len) for i in range(a.n_layer))
        return 2 * batch * a.local.n_kv_head * tokens * a.head_dim * dtype.itemsize


def attending(attention: Attention, dtype: torch.dtype, read: Callable[..., Tensor], first: Any, *at: Any) -> Attend:
    """A method's `read(q, k, v, *at)`, which gets its cache's dtype, and [B, H, S, D] for [B, S, H, D], as a block's
    attention. first: the position of the first token, or of each row's [B]."""

    def turn(x: Tensor, to: torch.dtype) -> Tensor:
        x = x if x.dtype == to else x.to(to)
        return x.transpose(1, 2) if x.dim() == 4 else x

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = attention.grown(q, first)
        return turn(read(turn(q, dtype), turn(k, dtype), turn(v, dtype), *at), q.dtype)

    return attend


def layer_step(part: Any, x: Tensor, pos: Tensor) -> Tensor:
    """A layer of `Transformer.decode_parts`, a token of each row, x [B, dim] at pos [B], or exact attention of drafted
    ones, x [B, n, dim] from pos [B] on. Returns the layer's output, like x."""
    block, method, ahead = part
    dtype, alone = method.shape.dtype, x.dim() == 2
    if ahead is not None and alone:  # the next layer, which prefetches
        after, fetching = ahead
        fetching.prefetch(after.predicted_query(x).to(dtype), pos)
    return block(x, attending(block.attention, dtype, method.decode if alone else method.verify, pos, pos))
