"""A model of transformers with the interface of `model.Transformer`, for architectures that model.py does not load.

    model = load_model("NAME_OR_FOLDER", device, dtype)
    model.setup_cache("self_index", max_batch, max_seq_len)    # and so on, as with load_checkpoint

Importing this registers the attention function "kv_fast" with transformers. A call of the model hands it `kv_fast`, a
function that attends; without one, and without a Cache of bridge.py, "kv_fast" is transformers' "sdpa". Layers are
those with attention, in their order; one with a sliding window keeps it, as in our decoder. Tested with transformers
5.16, 5.20, 5.23 and 5.24.

Models rotate keys before they hand them over, so a method's own rotation is the identity. For a method that reads keys
before rotation they are turned back, by the rope of config.json, if a probe of the model shows that it is the one.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from cache.base import KVMethod
from cache.calibration import Calibration
from cache.prompt import Text, second_pass
from cache.spec import Methods, method_name
from cache.statistic import REPEATS, Rotated, Statistic, Tokens
from kernels.dense_attention import prefill_attention
from kernels.rope import Rope, RopeArgs, apply_rope, half_split
from loading.config import read_args, rope_args
from model import ModelArgs, Transformer
from runtime.errors import InputError, note_once
from weights import WeightFormat

try:
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
    from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    if not hasattr(CacheLayerMixin, "get_max_length"):
        raise ImportError("this one is older")
except ImportError as e:
    raise InputError(f"this needs transformers 5.16 to 5.24 ({e}): pip install transformers==5.24.0") from None

REFUSED = {  # arguments of attention functions that change the output, by what they are
    "s_aux": "attention sinks in the softmax",
    "sinks": "attention sinks in the softmax",
    "softcap": "a soft cap on attention logits",
    "position_bias": "a position bias",
    "indices": "sparse attention of its own",
    "block_indices": "sparse attention of its own",
    "cu_seq_lens_q": "packed sequences",
}
PROBED = 97  # the position at which keys are compared with those at 0 (ours)


# ---- the model ----


def load_model(
    folder: str | Path, device: torch.device | str, dtype: torch.dtype, weight_format: WeightFormat | None = None
) -> TransformersModel:
    """A folder's model, in eval mode. Raises InputError if transformers cannot load it."""
    if weight_format is not None:
        raise InputError("transformers holds weights in the compute dtype: leave out --weights and --head")
    try:
        load: Any = transformers.AutoModelForCausalLM.from_pretrained
        hf = load(folder, attn_implementation="kv_fast", dtype=dtype, local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError, RuntimeError) as e:
        raise InputError(f"transformers cannot load {folder}: {e}") from None
    return TransformersModel(hf.to(device).eval())


def read_sizes(folder: str | Path) -> ModelArgs:
    """The sizes of a folder's model, without reading its weights."""
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as e:
        raise InputError(f"transformers cannot read {folder}: {e}") from None
    return model_args(config)[0]


def model_args(config: Any) -> tuple[ModelArgs, list[int], int]:
    """The sizes of a decoder by its config, which of its layers have attention, and how many have another state.

    Of a folder that model.py loads, they are model.py's own, so that both share its calibration. Raises InputError for
    layers that no method can take."""
    c = config.get_text_config(decoder=True)
    cached: list[Any] = DynamicCache(config=config).layers
    kinds = [DynamicLayer, DynamicSlidingWindowLayer]
    layers = [i for i, layer in enumerate(cached) if type(layer) in kinds]
    if not layers or config.is_encoder_decoder or "chunked_attention" in (getattr(c, "layer_types", None) or ()):
        found = ", ".join(sorted({type(layer).__name__ for layer in cached}))
        raise InputError(f"{c.model_type} has {len(layers)} of {len(cached)} layers ({found}) with full or sliding "
                         "attention in a decoder, which a method needs: use transformers' own cache")  # fmt: skip
    sizes = c.per_layer_config[layers[0]]  # if other layers differ, `check` refuses them
    H, context = sizes.num_attention_heads, getattr(c, "max_position_embeddings", None) or 2**31 - 1
    kv, D = (getattr(sizes, name, None) for name in ("num_key_value_heads", "head_dim"))
    eos = [] if c.eos_token_id is None else c.eos_token_id
    args = ModelArgs(
        dim=c.hidden_size, n_layer=len(layers), n_head=H, n_kv_head=kv or H, head_dim=D or sizes.hidden_size // H,
        ffn_dim=getattr(sizes, "intermediate_size", None) or 0, vocab_size=c.vocab_size, max_seq_len=context,
        rope=RopeArgs(type="none"), eos_ids=tuple(eos if isinstance(eos, list) else [eos]),
    )  # fmt: skip
    with contextlib.suppress(InputError):
        own = read_args(config.name_or_path)
        if own.n_layer == args.n_layer and not own.rope.rotated:  # else model.py orders channels in another way
            args = own
    return (
        replace(args, windows=tuple(getattr(cached[i], "sliding_window", None) for i in layers)),
        layers,
        len(cached) - len(layers),
    )


class TransformersModel(Transformer):
    """A decoder of transformers, loaded with attn_implementation="kv_fast"."""

    def __init__(self, hf: Any):
        args, layers, self.others = model_args(hf.config)
        with torch.device("meta"):
            super().__init__(replace(args, n_layer=0))
        self.args, self.hf = args, hf
        self.folder = Path(name) if (name := hf.config.name_or_path) and Path(name).is_dir() else None
        self.index = {layer: i for i, layer in enumerate(layers)}  # its layer -> ours
        self.norm = self.tok_embeddings = hf.get_input_embeddings()  # which say dtype and device
        self.output = hf.get_output_embeddings()
        inside = [m for m in hf.get_decoder().modules() if getattr(m, "layer_idx", None) in self.index]
        self.attentions = {self.index[m.layer_idx]: m for m in inside if hasattr(m, "o_proj")}
        del self.layers
        self.layers = [self._layer(self.attentions.get(i)) for i in range(args.n_layer)]

    def _layer(self, attention: Any) -> Any:
        """What `setup_cache` asks of a block."""

        def output_weights(like: Tensor) -> Tensor:
            if attention is None:
                raise InputError("this model's attention has no o_proj, and the method needs its weights: take another")
            each = torch.eye(attention.o_proj.in_features, dtype=like.dtype, device=like.device)
            w = attention.o_proj(each) - attention.o_proj(torch.zeros_like(each[:1]))
            return w.unflatten(0, (self.args.n_head, -1))

        of = SimpleNamespace(output_weights=output_weights, wqkv=SimpleNamespace(bias=None))
        return SimpleNamespace(attention=of)

    def check(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> None:
        """Raises InputError unless q, k and v [B, H, S, D] of a layer, and its window, are as the config says."""
        a = self.args
        want = [(heads, a.head_dim, self.device) for heads in (a.n_head, a.n_kv_head, a.n_kv_head)]
        found = [(x.shape[1], x.shape[3], x.device) for x in (q, k, v)]
        if found != want:
            raise InputError(f"layer {layer} has q, k and v of (heads, channels, device) {found}, and the model's "
                             f"config and device say {want}: this model is not supported")  # fmt: skip
        if window is not None and window != a.window(layer):
            raise InputError(f"layer {layer} has a sliding window of {window}, and the model's config says "
                             f"{a.window(layer)}: this model is not supported")  # fmt: skip

    # ---- the cache ----

    def make_ropes(self, layers: Methods, device: torch.device, max_batch: int, max_seq_len: int,
                   new_tokens: int | None = None) -> list[Rope]:  # fmt: skip
        size = (max_batch, max_seq_len, device)
        none = self.args.rotary(*size, RopeArgs(type="none"))
        ropes = [self.rotations[i][0] if reads_before_rotation(cls) else None for i, (cls, _) in enumerate(layers)]
        return [self.args.rotary(*size, rope) if rope else none for rope in ropes]

    def setup_cache(self, method: str | Methods, *size: Any, **knobs: Any) -> None:
        super().setup_cache(method, *size, **knobs)
        for m in self.cache.modules():
            if not isinstance(m, KVMethod):
                continue
            name = method_name(type(m))
            if reads_before_rotation(m) and (m.rope.of[0] != self.rotations[m.layer][0]):
                raise InputError(f"method {name} reads keys before rotation, and here it gets rotated ones that cannot "
                                 "be turned back: take another method or other knobs")  # fmt: skip
            if m.predicts:
                raise InputError(f"method {name} needs the query of the next layer ahead of time: give it predict=no")

    def use_calibration(self, file: str | Path | Sequence[str | Path] | None) -> None:
        if file and self.folder is None:
            raise InputError(f"calibration {file} is checked against the model's folder, and the model was not loaded "
                             "from one: load it from a folder, or give a Calibration")  # fmt: skip
        super().use_calibration(file)

    def find_calibration(self) -> Calibration:
        if self.calibration is None and self.folder is None:
            raise InputError("this method needs a calibration, which lies beside the weights: load the model from a "
                             "folder that has one (calibrate.py), or give a Calibration")  # fmt: skip
        return super().find_calibration()

    @functools.cached_property
    @torch.no_grad()
    def rotations(self) -> list[tuple[RopeArgs | None, Tensor]]:
        """For each layer the rope that turned its keys, None if it is none that config.json tells of, and the order of
        channels in which it turns halves. Found from the keys of one token at two positions."""
        keys: dict[int, Tensor] = {}

        def probe(i: int, module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys[i] = k.float()
            return prefill_attention(q, k, v)

        far = min(PROBED, self.args.context - 1)
        tokens = torch.full((2, 1), self.args.vocab_size // 2, device=self.device)
        self.forward_with(probe, tokens, torch.tensor([[0], [far]], device=self.device))
        D, tolerance = self.args.head_dim, max(1e-5, 8 * torch.finfo(self.dtype).eps)
        config = self.hf.config.get_text_config(decoder=True).to_dict()
        ropes = [RopeArgs(type="none"), *self.args.layer_ropes, *rope_args(config, self.args.context, D)]
        tries = list[tuple[RopeArgs, Tensor, Rope]]()
        for rope in dict.fromkeys(r for r in ropes if not r.varies):
            turning, rest = torch.arange(D).split((n := rope.rotated or D, D - n))
            pairs = torch.cat((turning.view(-1, 2).T.flatten(), rest))  # channel 2i turns with 2i + 1
            halves = half_split(D, n)
            tables = self.args.rotary(1, far + 1, self.device, rope)
            tries += [(rope, order.to(self.device), tables) for order in (halves, pairs[halves])]
        found = list[tuple[RopeArgs | None, Tensor]]()
        for i in range(self.args.n_layer):
            first, later = keys[i].split(1)
            for rope, order, tables in tries:
                near, back = (turn_back(x[..., order], *tables.at(torch.tensor([[at]], device=x.device)))
                              for x, at in ((first, 0), (later, far)))  # fmt: skip
                if (near - back).abs().max() <= tolerance * near.abs().max():
                    found.append((rope, order))
                    break
            else:
                found.append((None, torch.arange(D)))
        return found

    # ---- prompts and steps ----

    def forward(self, tokens: Tensor) -> Tensor:
        """Teacher forcing without a cache: tokens [B, S] -> logits [B, S, V]."""
        return self.hf(tokens, use_cache=False).logits

    def forward_with(self, attend: Callable[..., Tensor], tokens: Tensor, pos: Tensor, **options: Any) -> Tensor:
        """Logits of tokens [B, S] at positions pos [B or 1, S]. attend(layer, module, q, k, v) is the attention of a
        layer, q [B, Hq, S, D] rotated and of scale 1 / sqrt(D), k and v [B, Hkv, S, D] -> as q."""
        done, known = set[int](), dict[int | None, Tensor]()  # layers; masks that are right, by window

        def read(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, window: int | None) -> Tensor:
            i = self.index.get(module.layer_idx, -1)
            if i < 0 or i in done:
                raise InputError(f"{type(module).__name__} reads another layer's keys, which kv_fast does not support")
            self.check(i, q, k, v, window)
            done.add(i)
            own, S = self.args.window(i), q.shape[2]
            right = (own or S) >= S
            if mask is not None and not (right := mask is known.get(own)):
                right, known[own] = bool((mask == causal(S, S, own, mask.device)).all()), mask
            if not right:
                raise InputError(f"{type(module).__name__} has an attention mask that is not causal, which kv_fast "
                                 "does not support")  # fmt: skip
            return attend(i, module, q, k, v)

        logits = self.hf(input_ids=tokens, position_ids=pos, use_cache=False, kv_fast=read, **options).logits
        if len(done) != self.args.n_layer:
            raise InputError(f"{len(done)} of {self.args.n_layer} layers of {type(self.hf).__name__} called "
                             'kv_fast: load the model with attn_implementation="kv_fast"; if it was, its class is '
                             "not supported")  # fmt: skip
        return logits

    def _cached(self, read: Callable[..., Tensor], tokens: Tensor, pos: Tensor, **options: Any) -> Tensor:
        """`forward_with` the layers' methods: read(method, q, k, v)."""

        def attend(i: int, module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            m = self.cache[i]
            q, k = self.turned_back(i, m.rope, pos, q, k)
            return read(m, *(x.to(m.shape.dtype) for x in (q, k, v)))

        return self.forward_with(attend, tokens, pos, **options)

    def turned_back(self, layer: int, rope: Rope, pos: Tensor, *rotated: Tensor) -> list[Tensor]:
        """Queries or keys [B, H, S, D] at pos [B or 1, S], before rotation if that is for a method with this rope."""
        if rope.of[0].type == "none":
            return [*rotated]
        return [turn_back(x[..., self.rotations[layer][1]], *rope.at(pos)) for x in rotated]

    @torch.inference_mode()
    def prefill(self, tokens: Tensor, lengths: Tensor, chunk: int | None = None) -> Tensor:
        """As the decoder's, but for chunks: a prompt comes in one piece."""
        assert self.cache is not None, "call setup_cache first"
        S = tokens.shape[1]
        if self.others:
            kind, all_layers = self.hf.config.model_type, self.args.n_layer + self.others
            raise InputError(
                f"{kind} has layers with a state of their own, such as linear attention ({self.others} of "
                f"{all_layers}), which is not kept here: call its generate with engine.bridge.Cache"
            )
        if (chunk or self.prefill_chunk or S) < S:
            raise InputError("transformers' models read a prompt in one piece: leave out --prefill-chunk")
        self._check_prompt(tokens, S)
        texts = second_pass(self.cache, tokens, lengths, self.encode)
        for m in self.cache if texts else ():
            m.begin_prompt(S)
        t = torch.arange(S, device=tokens.device)[None]
        kept, at = lengths.unique(return_inverse=True)
        start = 0 if texts else None
        logits = self._cached(lambda m, *qkv: m.prefill(*qkv, lengths, start), tokens, t, logits_to_keep=kept - 1)
        for text in texts:
            after = lengths[:, None] + torch.arange(text.tokens.shape[1], device=tokens.device)

            def reread(i: int, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, text: Text = text) -> Tensor:
                m: KVMethod = self.cache[i]
                q, k = (x[..., self.rotations[i][1]] if m.rope.of[0].type != "none" else x for x in (q, k))
                return m.reread(q, k, v, lengths, text)

            self.forward_with(reread, text.tokens, after, logits_to_keep=1)
        for m in self.cache if texts else ():
            m.end_prompt(lengths)
        return logits[torch.arange(len(lengths), device=at.device), at]

    def decode(self, tokens: Tensor, pos: Tensor) -> Tensor:
        alone = tokens.dim() == 1
        tokens = tokens[:, None] if alone else tokens
        at = pos[:, None] + torch.arange(tokens.shape[1], device=pos.device)

        def read(m: KVMethod, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return m.decode(q[:, :, 0], k[:, :, 0], v[:, :, 0], pos)[:, :, None] if alone else m.verify(q, k, v, pos)

        with torch.inference_mode(), self.once:
            logits = self._cached(read, tokens, at)
        return logits[:, 0] if alone else logits

    # ---- calibration ----

    def measurable(self, statistics: Sequence[Statistic]) -> list[Statistic]:
        """Those that do not read keys before rotation, if these are not known. One line names the others."""
        if all(rope for rope, _ in self.rotations):
            return [*statistics]
        kept, example = list[Statistic](), Rotated.meta(self.args, 16 * REPEATS)
        for s in statistics:
            with contextlib.suppress(InputError):
                s.measure(example)
                kept.append(s)
        if left := [s.name for s in statistics if s not in kept]:
            note_once(f"this model's keys cannot be turned back to those before rotation: {', '.join(left)} left out")
        return kept

    @torch.inference_mode()
    def layer_tokens(self, tokens: Tensor, first: int = 0) -> Iterator[Tokens]:
        """As calibrate.py's: what statistics measure, of all layers from `first` on. Holds all of them at a time."""
        seen, inputs = list[Any](), dict[nn.Module, Tensor]()

        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            inputs[module] = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]

        def attend(i: int, module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            seen.append((i, module, inputs[module], q, k, v))
            return prefill_attention(q, k, v, self.args.window(i))

        inside = [m for m in self.hf.modules() if hasattr(m, "layer_idx")]
        hooks = [m.register_forward_pre_hook(note, with_kwargs=True) for m in inside]
        pos = torch.arange(tokens.shape[1], device=self.device)[None]
        try:
            self.forward_with(attend, tokens.to(self.device), pos, logits_to_keep=1)
        finally:
            for hook in hooks:
                hook.remove()
        while seen:
            i, *tensors = seen.pop(0)
            if i >= first:
                yield self._tokens(i, *tensors)

    def _tokens(self, layer: int, module: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tokens:
        """What a statistic measures: x [1, S, dim], q [1, Hq, S, D] and k, v [1, Hkv, S, D], rotated."""
        (rope, order), S = self.rotations[layer], x.shape[1]
        rotated = [t[0].transpose(0, 1).float() for t in (q, k)]
        v = v[0].transpose(0, 1)
        if rope is None:
            t: Tokens = Rotated(layer, x[0], *rotated, v)
            t.window = self.args.window(layer)
            return t
        cos, sin = self.args.rotary(1, S, x.device, rope).at(torch.arange(S, device=x.device)[None])
        q, k = (turn_back(t.float()[..., order], cos, sin)[0].transpose(0, 1) for t in (q, k))
        biases = [getattr(getattr(module, f"{name}_proj", None), "bias", None) for name in "kv"]
        if biases[0] is None or getattr(module, "k_norm", None) is not None:  # behind a norm none can be subtracted
            biases = [None, None]
        k_bias, v_bias = (b if b is None else b.float().view(-1, self.args.head_dim) for b in biases)
        k_bias = k_bias if k_bias is None else k_bias[..., order]
        t = Tokens(layer, x[0], q, k, v, cos[0, :, None], sin[0, :, None], k_bias, v_bias)
        t.q_rot, t.k_rot = rotated
        t.window = self.args.window(layer)
        return t


# ---- the attention function ----


def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
              dropout: float = 0.0, scaling: float | None = None, kv_fast: Callable[..., Tensor] | None = None,
              **kwargs: Any) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' attention function "kv_fast": the output [B, S, Hq, D], and no weights.

    kv_fast, or an attribute of that name of the keys, gets module, q [B, Hq, S, D] of scale 1 / sqrt(D), k and v [B,
    Hkv, S, D], the mask and the sliding window, and returns the output like q."""
    refused = [what for name, what in REFUSED.items() if kwargs.get(name) is not None]
    read = kv_fast or getattr(key, "kv_fast", None)
    if read is not None:
        if dropout or (torch.is_grad_enabled() and query.requires_grad):
            refused.append("gradients or dropout (call model.eval(), and it within torch.no_grad())")
        if kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
            refused.append("attention that is not causal")
        if kwargs.get("output_attentions"):
            refused.append("output_attentions")
    if refused:
        raise InputError(f"{type(module).__name__} has {' and '.join(refused)}, which kv_fast does not support: use "
                         "another attn_implementation")  # fmt: skip
    if read is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    D = query.shape[3]
    if scaling is not None and not math.isclose(scaling, D**-0.5):
        query = query * (scaling * D**0.5)
    with torch.no_grad():
        y = read(module, query, key, value, attention_mask, kwargs.get("sliding_window"))
    return y.transpose(1, 2).to(query.dtype), None


AttentionInterface.register("kv_fast", attention)
AttentionMaskInterface.register("kv_fast", sdpa_mask)


def causal(S: int, seen: int, window: int | None, device: torch.device) -> Tensor:
    """Which of `seen` tokens each of the last S attends to, [S, seen]."""
    t = torch.arange(seen, device=device)
    return (t <= t[-S:, None]) & (t > t[-S:, None] - (window or seen))


def turn_back(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, H, S, D] as it was before it was rotated by cos and sin [B or 1, S, D/2]."""
    square = cos.square() + sin.square()  # of the factor on both, which is 1 but in yarn
    return apply_rope(x, (cos / square)[:, None], (-sin / square)[:, None])


def reads_before_rotation(method: Any) -> bool:
    """Whether a method, or its class, gets keys before rotation."""
    return method.pre_rope or getattr(method, "scores_pre_rope", False)
