"""Any method inside the models of transformers, for architectures that model.py does not load.

    import engine.bridge  # registers the attention function "kv_fast"

    model = AutoModelForCausalLM.from_pretrained(NAME, attn_implementation="kv_fast")
    cache = engine.bridge.Cache(model, "self_index,budget=512", max_seq_len=4096)
    out = model.generate(**inputs, past_key_values=cache)

Each layer with full attention gets a method; sliding and linear layers keep transformers' own cache and attention. A
cache layer hands itself to the attention function as an attribute of the keys that its `update` returns. Without a
Cache of this file, "kv_fast" is transformers' "sdpa". Tested with transformers 5.24.

The model rotates keys before they reach the cache, so the methods' own rotation is the identity, and methods that read
keys before rotation are refused. The first call after `reset` is the prompt, also in batches padded on the left; later
tokens go through `decode` one at a time, as in `Session.feed`.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from cache.base import CacheShape, KVMethod
from cache.calibration import Calibration
from cache.spec import build_cache, layer_methods, method_name
from kernels.backend import version_for
from kernels.rope import Rope, RopeArgs
from loading.checkpoint import read_args
from runtime.errors import InputError, check_count

try:
    from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
    from transformers import Cache as TransformersCache
    from transformers.cache_utils import CacheLayerMixin, DynamicLayer
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    if not hasattr(CacheLayerMixin, "get_max_length"):
        raise ImportError("this one is older")
except ImportError as e:
    raise InputError(f"engine.bridge needs transformers 5.24 ({e}): pip install transformers==5.24.0") from None

REFUSED = {  # arguments of attention functions that change the output, by what they are
    "s_aux": "attention sinks in the softmax",
    "sinks": "attention sinks in the softmax",
    "softcap": "a soft cap on attention logits",
    "position_bias": "a position bias",
    "indices": "sparse attention of its own",
    "block_indices": "sparse attention of its own",
    "cu_seq_lens_q": "packed sequences",
}


class Layer(CacheLayerMixin):
    """A layer of `Cache`: a method instead of keys and values."""

    is_sliding = supports_early_init = False

    def __init__(self, method: KVMethod, cache: Cache):
        super().__init__()
        self.method, self.cache, self.seen, self.decoded = method, cache, 0, 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Returns the new keys and values alone, marked as this layer's for `attention`."""
        if self.cache.waiting is not None:
            raise InputError("the model's attention function did not get the cache's keys: load the model with "
                             'attn_implementation="kv_fast"; if it was, its class is not supported')  # fmt: skip
        s, B = self.method.shape, len(key_states)
        self.seen += key_states.shape[2]
        if s.max_batch < B or s.max_seq_len < self.seen:
            raise InputError(f"{B} rows of {self.seen} tokens do not fit in a cache of {s.max_batch} rows of "
                             f"{s.max_seq_len}: make it with a larger max_batch or max_seq_len")  # fmt: skip
        self.cache.waiting = self
        key_states.kv_fast_layer = self  # type: ignore[attr-defined]
        return key_states, value_states

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
        """Attention of new tokens, q [B, Hq, S, D], k and v [B, Hkv, S, D] rotated -> [B, Hq, S, D]."""
        s, m, S, D = self.method.shape, self.method, q.shape[2], q.shape[3]
        found = [(x.shape[1], x.shape[3], x.device) for x in (q, k, v)]
        if found != (want := [(heads, s.head_dim, s.device) for heads in (s.n_head, s.n_kv_head, s.n_kv_head)]):
            raise InputError(f"layer {m.layer} has q, k and v of (heads, channels, device) {found}, and the model's "
                             f"config and device say {want}: this model is not supported")  # fmt: skip
        padding = self.cache.padding(mask, q, self.seen)
        if scaling is not None and not math.isclose(scaling, D**-0.5):
            q = q * (scaling * D**0.5)
        q, k, v = (x.to(s.dtype) for x in (q, k, v))
        if self.seen == S and not self.cache.padded:  # a prompt
            return m.prefill(q, k, v, S - padding)
        if self.seen == S:
            q, k, v = (_rolled(x, padding) for x in (q, k, v))
            return _rolled(m.prefill(q, k, v, S - padding), -padding)
        if S > 1 and type(m).connect is not KVMethod.connect:
            raise InputError(f"method {method_name(type(m))} shares state between layers, each of which reads {S} "
                             "tokens here before the next: feed tokens after the prompt one at a time")  # fmt: skip
        out = []
        for i in range(S):
            q1, k1, v1 = (x[:, :, i].contiguous() for x in (q, k, v))
            out.append(m.decode(q1, k1, v1, self.seen - S + i - padding))
            self.decoded += 1
            m.maintain(self.decoded)
        return torch.stack(out, 2)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the method's buffers exist."""

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return self.method.shape.max_seq_len

    def reset(self) -> None:
        self.method.reset()
        self.seen = self.decoded = 0


class Cache(TransformersCache):
    """A cache for `past_key_values`, with `method` (a --method, whose layer numbers count layers with full attention)
    in each layer with full attention.

    max_seq_len counts prompt, padding and new tokens together. calibration: a Calibration, or a file of calibrate.py
    for the model's folder. Raises InputError for what cannot be exact here.
    """

    def __init__(self, model: Any, method: str, max_seq_len: int, max_batch: int = 1,
                 calibration: str | Path | Calibration | None = None, **knobs: Any):  # fmt: skip
        check_count("max_seq_len", max_seq_len, 1, 10**9)
        check_count("max_batch", max_batch, 1, 10**9)
        config = model.config.get_text_config(decoder=True)
        layers: list[Any] = DynamicCache(config=config).layers
        full = [i for i, layer in enumerate(layers) if type(layer) is DynamicLayer]
        if not full or model.config.is_encoder_decoder:
            kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
            raise InputError(f"{config.model_type} has {len(full)} of {len(layers)} layers ({kinds}) with full "
                             "attention in a decoder, which a method needs: use transformers' own cache")  # fmt: skip
        sizes = config.per_layer_config[full[0]]  # if other layers differ, `attend` refuses them
        H = sizes.num_attention_heads
        D = getattr(sizes, "head_dim", None) or sizes.hidden_size // H
        kv = getattr(sizes, "num_key_value_heads", None) or H
        shape = CacheShape(max_batch, max_seq_len, H, kv, D, model.dtype, model.device, n_layer=len(full))
        version_for(shape.device, shape.dtype)  # compiles the CPU kernels now, if need be

        def identity(device: torch.device) -> list[Rope]:
            T = max_seq_len if device.type != "meta" else 1
            return [Rope(RopeArgs(type="none"), D, T, 1, T, device)] * len(full)

        chosen = layer_methods(method, len(full), knobs)
        for cls, _ in chosen:
            _check(cls)
        found = functools.partial(_calibration, calibration, model, shape)
        methods: Any = build_cache(chosen, [shape] * len(full), identity, found)
        decoder = model.get_decoder().modules()
        outputs = {x.layer_idx: x.o_proj for x in decoder if hasattr(x, "layer_idx") and hasattr(x, "o_proj")}
        for i, made in zip(full, methods, strict=True):
            layers[i] = Layer(made, self)
            for part in made.modules():  # a method may contain others
                if isinstance(part, KVMethod):
                    _check(part)
                    if i in outputs:
                        part.output_weights = functools.partial(_output_weights, outputs[i], shape)
        super().__init__(layers=layers)
        self._forget()

    def _forget(self) -> None:
        self.waiting: Layer | None = None  # the layer whose keys `attention` has not read yet
        self.mask: Tensor | None = None  # the last one that was checked: all layers get the same
        self.pads, self.padded = torch.empty(0), False  # tokens of padding before each row, [B]; whether there are any

    def padding(self, mask: Tensor | None, q: Tensor, seen: int) -> Tensor:
        """The padding before each row, [B], as the prompt's mask [B, 1, S, seen] says it. Raises InputError unless this
        one, of the last S tokens q [B, Hq, S, D], is causal behind the same padding."""
        (B, _, S, _), right = q.shape, mask is not None or not self.padded
        if mask is None and seen == S:
            self.pads, self.padded, right = torch.zeros(B, dtype=torch.int64, device=q.device), False, True
        if mask is not None and mask is not self.mask:
            if seen == S:
                self.pads = S - mask[:, 0, -1].sum(-1)
                self.padded = bool(self.pads.any())
            t = torch.arange(seen, device=q.device)
            causal = (t <= t[-S:, None]) & (t >= self.pads[:, None, None])
            right = torch.equal(mask, causal[:, None]) and bool(mask[..., -1, -1].all())
        if not right or len(self.pads) != B:
            raise InputError("the attention mask is not causal with padding on the left, or not of the prompt's rows: "
                             "pad on the left (tokenizer.padding_side), give each call all tokens' mask")  # fmt: skip
        self.mask = mask
        return self.pads

    def nbytes(self) -> dict[int, dict[str, int]]:
        """Bytes of every buffer as allocated: {layer: {buffer: bytes}}, transformers' own layers included."""
        return {i: layer.method.nbytes() if isinstance(layer, Layer) else _tensor_bytes(vars(layer))
                for i, layer in enumerate(self.layers)}  # fmt: skip

    def kv_bytes(self) -> int:
        return sum(sum(b.values()) for b in self.nbytes().values())

    def reset(self) -> None:
        """Empty the cache and keep its buffers."""
        super().reset()
        self._forget()

    def _refuse(self, *args: Any) -> None:
        raise InputError("a method's cache cannot be reordered, repeated or cut: generate without beams, assisted "
                         "generation or prompt lookup")  # fmt: skip

    reorder_cache = crop = batch_repeat_interleave = batch_select_indices = activate_past_recording = _refuse  # type: ignore[assignment]


def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
              dropout: float = 0.0, scaling: float | None = None, **kwargs: Any) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' attention function "kv_fast": the output [B, S, Hq, D], and no weights."""
    refused = [what for name, what in REFUSED.items() if kwargs.get(name) is not None]
    layer: Layer | None = getattr(key, "kv_fast_layer", None)
    if layer is not None:
        if dropout or (torch.is_grad_enabled() and query.requires_grad):
            refused.append("gradients or dropout (call model.eval(), and it within torch.no_grad())")
        if kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
            refused.append("attention that is not causal")
        if (kwargs.get("sliding_window") or math.inf) < layer.get_max_length():
            refused.append(f"a sliding window of {kwargs['sliding_window']}")
        if kwargs.get("output_attentions"):
            refused.append("output_attentions")
    if refused:
        raise InputError(f"{type(module).__name__} has {' and '.join(refused)}, which kv_fast does not support: use "
                         "another attn_implementation")  # fmt: skip
    if layer is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    if layer.cache.waiting is not layer:
        raise InputError(f"{type(module).__name__} reads another layer's keys, which kv_fast does not support")
    with torch.no_grad():
        y = layer.attend(query, key, value, attention_mask, scaling)
    layer.cache.waiting = None
    return y.transpose(1, 2).to(query.dtype), None


AttentionInterface.register("kv_fast", attention)
AttentionMaskInterface.register("kv_fast", sdpa_mask)


def _rolled(x: Tensor, by: Tensor) -> Tensor:
    """x [B, H, S, D] with row b moved left by by[b] tokens; those that fall out come in on the right."""
    at = (torch.arange(x.shape[2], device=x.device) + by[:, None]) % x.shape[2]
    return x.gather(2, at[:, None, :, None].expand_as(x))


def _check(m: Any) -> None:
    """Raises InputError for a method, given as its class or made, that needs more than rotated keys and values."""
    made = not isinstance(m, type)
    name = method_name(type(m) if made else m)
    if m.pre_rope or getattr(m, "scores_pre_rope", False):
        raise InputError(f"method {name} reads keys before rotation, and transformers' models hand over rotated ones: "
                         "take another method or other knobs")  # fmt: skip
    if m.predicts:
        raise InputError(f"method {name} needs the query of the next layer ahead of time: give it predict=no")
    if made and m.second_pass(torch.zeros(1, 2, dtype=torch.int64), torch.tensor([2]), lambda text: []):
        raise InputError(f"method {name} reads a prompt twice, and transformers reads it once: take another method")


def _calibration(given: str | Path | Calibration | None, model: Any, shape: CacheShape) -> Calibration:
    """The calibration to use. Raises InputError if there is none, or if it is another model's."""
    folder = Path(model.config.name_or_path)
    if given is None:
        raise InputError("this method needs a calibration: give calibration=FILE, made by calibrate.py, or take a "
                         "method without one")  # fmt: skip
    if not isinstance(given, Calibration):
        if not (folder / "config.json").is_file():
            raise InputError(f"calibration {given} is checked against the model's folder, and {str(folder)!r} is none: "
                             "load the model from a folder, or give a Calibration")  # fmt: skip
        given = Calibration.load(folder, read_args(folder), Path(given))
    sizes = {name: getattr(given.args or shape, name) for name in ("n_head", "n_kv_head", "head_dim")}
    if given.n_layer != shape.n_layer or any(getattr(shape, name) != n for name, n in sizes.items()):
        raise InputError(f"the calibration is of {given.n_layer} layers with {sizes}, the model has {shape.n_layer} "
                         "layers with full attention: give the model's own")  # fmt: skip
    return given


def _output_weights(projection: nn.Module, shape: CacheShape) -> Tensor:
    """W_O by query head, [Hq, D, dim], dequantized if need be."""
    each = torch.eye(shape.n_head * shape.head_dim, dtype=shape.dtype, device=shape.device)
    return (projection(each) - projection(torch.zeros_like(each[:1]))).unflatten(0, (shape.n_head, shape.head_dim))


def _tensor_bytes(of: dict[Any, Any]) -> dict[str, int]:
    """Bytes of the tensors in a dict of tensors, and of dicts of them by number."""
    flat = of | {f"{key}.{n}": t for key, value in of.items() if isinstance(value, dict) for n, t in value.items()}
    return {key: t.nbytes for key, t in flat.items() if isinstance(t, Tensor)}
