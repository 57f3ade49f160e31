"""Any method inside the models of transformers, for architectures that model.py does not load.

    import engine.bridge  # registers the attention function "kv_fast"

    model = AutoModelForCausalLM.from_pretrained(NAME, attn_implementation="kv_fast")
    cache = engine.bridge.Cache(model, "self_index,budget=512", max_seq_len=4096)
    out = model.generate(**inputs, past_key_values=cache)

Each layer with attention gets a method, as in transformers_backend.py; linear layers keep transformers' own cache. A
cache layer hands itself to the attention function as an attribute of the keys that its `update` returns. The first call
after `reset` is the prompt, also in batches padded on the left; later tokens go through `decode` one at a time, as in
`Session.feed`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from cache.base import KVMethod
from cache.calibration import Calibration
from cache.spec import method_name
from engine.transformers_backend import TransformersModel, causal, transformers
from runtime.errors import InputError, check_count

NOTHING: Any = torch.zeros(1, 2, dtype=torch.int64), torch.tensor([2]), lambda text: []  # for second_pass


class Layer(transformers.cache_utils.CacheLayerMixin):
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
        s, (B, _, S, _) = self.method.shape, key_states.shape
        self.seen += S
        if s.max_batch < B or s.max_seq_len < self.seen:
            raise InputError(f"{B} rows of {self.seen} tokens do not fit in a cache of {s.max_batch} rows of "
                             f"{s.max_seq_len}: make it with a larger max_batch or max_seq_len")  # fmt: skip
        if s.max_prompt < S if self.seen == S else self.decoded + S > s.max_decoded:
            raise InputError(f"{self.seen} tokens do not fit in a cache of {s.max_prompt} for a prompt and "
                             f"{s.max_decoded} after it: make it with another max_new_tokens")  # fmt: skip
        self.cache.waiting = self
        key_states.kv_fast = self.attend  # type: ignore[attr-defined]
        return key_states, value_states

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
               window: int | None) -> Tensor:  # fmt: skip
        """Attention of new tokens, q [B, Hq, S, D], k and v [B, Hkv, S, D] rotated -> [B, Hq, S, D]."""
        if self.cache.waiting is not self:
            raise InputError(f"{type(module).__name__} reads another layer's keys, which kv_fast does not support")
        self.cache.waiting, m, S = None, self.method, q.shape[2]
        self.cache.model.check(m.layer, q, k, v, window)
        padding = self.cache.padding(mask, q, self.seen, self.cache.model.args.window(m.layer))
        at = self.seen - S + torch.arange(S, device=q.device) - padding[:, None]
        q, k = self.cache.model.turned_back(m.layer, m.rope, at.clamp(min=0), q, k)
        q, k, v = (x.to(m.shape.dtype) for x in (q, k, v))
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
            out.append(m.decode(q1, k1, v1, at[:, i]))
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


class Cache(transformers.Cache):
    """A cache for `past_key_values`, with `method` (a --method, whose layer numbers count layers with attention).

    max_seq_len counts prompt, padding and new tokens together, of which max_new_tokens at most come after the prompt:
    some methods then allocate less. calibration: a Calibration, or a file of calibrate.py
    for the model's folder, by default the one in it. Raises InputError for what cannot be exact here.
    """

    def __init__(self, model: Any, method: str, max_seq_len: int, max_batch: int = 1,
                 calibration: str | Path | Calibration | None = None, max_new_tokens: int | None = None,
                 **knobs: Any):  # fmt: skip
        check_count("max_seq_len", max_seq_len, 1, 10**9)
        check_count("max_batch", max_batch, 1, 10**9)
        self.model = TransformersModel(model)
        if isinstance(calibration, Calibration):
            self.model.calibration = calibration
        else:
            self.model.use_calibration(calibration)
        self.model.setup_cache(method, max_batch, max_seq_len, max_new_tokens, **knobs)
        layers: list[Any] = transformers.DynamicCache(config=model.config).layers
        for i, made in zip(self.model.index, self.model.cache, strict=True):
            layers[i] = Layer(made, self)
            for m in made.modules():  # a method may contain others
                if isinstance(m, KVMethod) and m.second_pass(*NOTHING):
                    raise InputError(f"method {method_name(type(m))} reads a prompt twice, and here it is read once: "
                                     "take another method")  # fmt: skip
        super().__init__(layers=layers)
        self._forget()

    def _forget(self) -> None:
        self.waiting: Layer | None = None  # the layer whose keys `attention` has not read yet
        self.masks: dict[int | None, Tensor | None] = {}  # the last ones that were checked, by window
        self.pads, self.padded = torch.empty(0), False  # tokens of padding before each row, [B]; whether there are any

    def padding(self, mask: Tensor | None, q: Tensor, seen: int, window: int | None) -> Tensor:
        """The padding before each row, [B], as the prompt's mask [B, 1, S, seen] says it. Raises InputError unless this
        one, of the last S tokens q [B, Hq, S, D], is causal within the window and behind the same padding."""
        (B, _, S, _), right = q.shape, mask is not None or not (self.padded or seen > (window or seen))
        if mask is None and seen == S:
            self.pads, self.padded = torch.zeros(B, dtype=torch.int64, device=q.device), False
        if mask is not None and mask is not self.masks.get(window):
            own = causal(S, seen, window, q.device)
            if seen == S:
                self.pads = S - mask[:, 0].diagonal(0, 1, 2).sum(-1)
                self.padded = bool(self.pads.any())
            there = torch.arange(seen, device=q.device) >= self.pads[:, None]
            right = torch.equal(mask, (own & there[:, None])[:, None]) and bool(mask[..., -1, -1].all())
        if not right or len(self.pads) != B:
            raise InputError("the attention mask is not causal with padding on the left, or not of the prompt's rows: "
                             "pad on the left (tokenizer.padding_side), give each call all tokens' mask")  # fmt: skip
        self.masks[window] = mask
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


def _rolled(x: Tensor, by: Tensor) -> Tensor:
    """x [B, H, S, D] with row b moved left by by[b] tokens; those that fall out come in on the right."""
    at = (torch.arange(x.shape[2], device=x.device) + by[:, None]) % x.shape[2]
    return x.gather(2, at[:, None, :, None].expand_as(x))


def _tensor_bytes(of: dict[Any, Any]) -> dict[str, int]:
    """Bytes of the tensors in a dict of tensors, and of dicts of them by number."""
    flat = of | {f"{key}.{n}": t for key, value in of.items() if isinstance(value, dict) for n, t in value.items()}
    return {key: t.nbytes for key, t in flat.items() if isinstance(t, Tensor)}
