"""The shapes of published models, by name, for random weights and for bytes: from the checkpoints' own config.json."""

from __future__ import annotations

from typing import Any

from kernels.rope import RopeArgs
from model import ModelArgs
from runtime.errors import InputError

_LLAMA3 = dict(theta=5e5, type="llama3", factor=8.0, original_max_position_embeddings=8192)
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
    "qwen3-30b-a3b": dict(dim=2048, n_layer=48, n_kv_head=4, ffn_dim=6144, vocab_size=151936, max_seq_len=40960, norm_eps=1e-6, qk_norm=True, n_expert=128, n_active=8, expert_dim=768, rope=dict(theta=1e6)),
    "mixtral-8x7b": dict(n_kv_head=8, ffn_dim=14336, max_seq_len=32768, n_expert=8, n_active=2, expert_dim=14336, rope=dict(theta=1e6)),
    "mistral-small-24b": dict(dim=5120, n_layer=40, n_kv_head=8, ffn_dim=32768, vocab_size=131072, max_seq_len=131072, rope=dict(theta=1e9)),
    "ministral-3-8b": dict(n_layer=34, n_kv_head=8, ffn_dim=14336, vocab_size=131072, max_seq_len=262144, query_growth=0.1, rope=dict(theta=1e6, type="yarn", factor=16.0, original_max_position_embeddings=16384, mscale=1.0, mscale_all_dim=1.0)),
    "smollm3-3b": dict(dim=2048, n_layer=36, n_head=16, n_kv_head=4, vocab_size=128256, max_seq_len=65536, norm_eps=1e-6, tie_embeddings=True, rope=dict(theta=5e6), ropes=tuple(RopeArgs(5e6, "none" if i % 4 == 3 else "default") for i in range(36))),
    "phi-4-mini": dict(dim=3072, n_head=24, n_kv_head=8, ffn_dim=8192, vocab_size=200064, max_seq_len=4096, tie_embeddings=True, rope=dict(rotated=96)),  # without longrope's 96 divisors
    "gemma-3-270m": dict(dim=640, n_layer=18, n_head=4, n_kv_head=1, head_dim=256, ffn_dim=2048, vocab_size=262144, max_seq_len=32768, norm_eps=1e-6, tie_embeddings=True, qk_norm=True, centered_norm=True, post_norm=True, act="gelu_pytorch_tanh", embed_scale=640**0.5, rope=dict(theta=1e6), ropes=tuple(RopeArgs(1e6 if i % 6 == 5 else 1e4) for i in range(18)), windows=tuple(None if i % 6 == 5 else 512 for i in range(18))),
}
# fmt: on


def named_args(name: str) -> ModelArgs:
    """Raises InputError for a name that is not in NAMED."""
    if name not in NAMED:
        raise InputError(f"unknown model name {name!r}: use one of {', '.join(NAMED)}")
    d = dict(NAMED[name])
    return ModelArgs(rope=RopeArgs(**d.pop("rope")), **d)
