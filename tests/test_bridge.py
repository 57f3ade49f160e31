"""Methods in the models of transformers, on tiny random models: where nothing is lost, the tokens of its own cache."""

from __future__ import annotations

import functools
import os
import re
import runpy
import sys

import pytest
import torch

from cache.base import KVMethod
from cache.spec import method_files, resolve
from loading import load_checkpoint, load_tokenizer
from runtime.errors import InputError
from runtime.machine import ROOT

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

from engine.bridge import Cache, attention  # noqa: E402, it needs transformers

TINY, PROMPT, NEW = ROOT / "models/tiny", 32, 20
FILE = TINY / "calibration.safetensors"
SELF_INDEX = "self_index,budget=8,sinks=2,min_tokens=0"
SIZES = dict(vocab_size=199, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, bos_token_id=1,
             eos_token_id=None)  # fmt: skip
EXPERTS = dict(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
SLIDING = dict(head_dim=16, sliding_window=8, layer_types=["sliding_attention", "full_attention"])
LINEAR = dict(shared_expert_intermediate_size=32, linear_num_value_heads=4, linear_num_key_heads=2,
              linear_key_head_dim=16, linear_value_head_dim=16,
              layer_types=["linear_attention", "full_attention"])  # fmt: skip
FAMILIES = dict(
    Llama={},
    Qwen2={},
    Qwen3=dict(head_dim=16),
    Glm4=dict(head_dim=16, partial_rotary_factor=0.5),
    Olmo2={},
    Granite=dict(attention_multiplier=0.1),
    Cohere={},
    Exaone4=SLIDING,
    Phi3={},
    SmolLM3={},
    Qwen3Moe=EXPERTS,
    Gemma3=SLIDING | dict(query_pre_attn_scalar=40, tie_word_embeddings=False),
    Qwen3Next=EXPERTS | LINEAR,
)
LOSSLESS = ["quest", "streaming", "self_index", "snapkv"]
NEED_CALIBRATION = {
    "double_sparsity",
    "double_sparsity_offload",
    "hshare",
    "loki",
    "ojakv",
    "qfilters",
    "razor",
    "triattention",
}
REASONS = dict.fromkeys(NEED_CALIBRATION, "needs a calibration") | dict(
    sals="before rotation",
    palu="before rotation",
    expected_attention="before rotation",
    compactor="before rotation",
    triattention="before rotation",
    kvzip="reads a prompt twice",
)
METHODS = sorted(name for name, file in method_files().items() if file.parent == ROOT / "kv_methods")


@functools.cache
def model_of(family, implementation="kv_fast", **changes):
    """A model whose attention is peaked and whose logits are far apart."""
    config = {"Gemma3": "Gemma3Text"}.get(family, family) + "Config"
    config = getattr(transformers, config)(**SIZES | FAMILIES.get(family, {}) | changes)
    config._attn_implementation = implementation
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.25 if p.dim() > 1 else 0.5)
    return model


@functools.cache
def trained():
    return transformers.AutoModelForCausalLM.from_pretrained(TINY, attn_implementation="kv_fast", dtype=torch.float32)


@functools.cache
def text():
    """[1, 200], a file's beginning."""
    return torch.tensor([load_tokenizer(TINY).encode((ROOT / "model.py").read_text())[:200]])


def prompts(rows=2, n=PROMPT, seed=1):
    return torch.randint(3, SIZES["vocab_size"], (rows, n), generator=torch.Generator().manual_seed(seed))


def new_tokens(model, ids, cache=None, n=NEW, **options):
    """n greedy tokens of each row; cache None: transformers' own, with its own attention."""
    out = model.generate(ids, max_new_tokens=n, do_sample=False, past_key_values=cache, **options)
    return out[:, ids.shape[1] :].tolist()


@functools.cache
def expected(family):
    return new_tokens(model_of(family, "sdpa"), prompts())


def refuses(match, call, *args, **options):
    with pytest.raises(InputError, match=match) as e:
        call(*args, **options)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_lossless_knobs_give_the_tokens_of_transformers(family):
    """Two rows; some models have sliding or linear layers, another scale, or rotate half of the channels."""
    model = model_of(family)
    for name in LOSSLESS:
        cache = Cache(model, name, PROMPT + NEW, 2, **resolve(name)[0].lossless)
        assert new_tokens(model, prompts(), cache) == expected(family), name
    cache = Cache(model, "streaming,recent=2,sinks=1", PROMPT + NEW, 2)
    lossy = new_tokens(model, prompts(), cache, 8)
    assert lossy != [row[:8] for row in expected(family)]  # the method is what attends


@pytest.mark.parametrize("name", METHODS)
def test_every_method_runs_or_refuses_in_a_line(name):
    """At its defaults, and at its lossless knobs with the tokens of transformers' own cache."""
    model, want, lossless = model_of("Llama"), [expected("Llama")[0][:4]], resolve(name)[0].lossless
    if name in REASONS:
        refuses(REASONS[name], Cache, model, name, PROMPT + 4)
    else:
        assert len(new_tokens(model, prompts(1), Cache(model, name, PROMPT + 4), 4)[0]) == 4
        assert new_tokens(model, prompts(1), Cache(model, name, PROMPT + 4, **lossless), 4) == want
    if name in NEED_CALIBRATION:
        knobs = lossless | (dict(predict=False) if "offload" in name else {})
        cache = Cache(trained(), name, 204, calibration=FILE, **knobs)
        assert new_tokens(trained(), text(), cache, 4) == new_tokens(trained(), text(), n=4)


@pytest.mark.parametrize(
    "spec",
    [
        "self_index,budget=72",
        "snapkv,budget=24,recent=4,value_aware=true,decode_budget=8,decode_every=4",
        "double_sparsity,budget=16,min_tokens=0",
    ],
)
def test_tokens_of_our_decoder(spec):
    """On a trained Llama, lossy methods give what our own decoder gives with them: one needs W_O, one a calibration."""
    ours, ids = load_checkpoint(TINY, dtype=torch.float32), text()
    ours.setup_cache(spec, 1, 200 + NEW)
    want, pos = [], torch.tensor([200])
    logits = ours.prefill(ids, pos)
    for step in range(NEW):
        want.append(int(logits.argmax()))
        logits = ours.decode(logits.argmax(-1), pos + step)
        ours.maintain(step + 1)
    cache = Cache(trained(), spec, 200 + NEW, calibration=FILE)
    assert new_tokens(trained(), ids, cache) == [want]
    assert new_tokens(trained(), ids) != [want]
    assert cache.kv_bytes() == ours.kv_bytes()


@pytest.mark.parametrize("spec", [
    "quest,budget=8,min_tokens=0", "snapkv,budget=12,recent=4", "kivi-4", SELF_INDEX, "streaming,recent=6,sinks=2",
])  # fmt: skip
def test_rows_padded_on_the_left_give_their_tokens_alone(spec):
    model, ids, padding = model_of("Qwen3"), prompts(), 11
    ids[0, :padding] = 0
    rows = ids[:1, padding:], ids[1:]
    alone = [new_tokens(model, row, Cache(model, spec, PROMPT + 10), 10)[0] for row in rows]
    cache, mask = Cache(model, spec, PROMPT + 11, 2), (ids != 0).long()
    for _ in range(2):
        cache.reset()
        assert new_tokens(model, ids, cache, 10, attention_mask=mask) == alone
    with torch.no_grad():
        refuses("attention mask is not causal", model, ids[:, :1], past_key_values=cache)


def test_a_second_turn_is_fed_through_decode():
    model, more, spec = model_of("Llama"), prompts(2, 7, seed=2), SELF_INDEX
    whole, single = (Cache(model, spec, PROMPT + 7, 2) for _ in range(2))
    with torch.no_grad():
        for cache in (whole, single):
            model(prompts(), past_key_values=cache)
        logits = model(more, past_key_values=whole).logits
        each = [model(more[:, i : i + 1], past_key_values=single).logits for i in range(7)]
        torch.testing.assert_close(logits, torch.cat(each, 1))
        lossless = Cache(model, "kivi", PROMPT + 7, 2, bits=16)
        model(prompts(), past_key_values=lossless)
        exact = model_of("Llama", "sdpa")(torch.cat((prompts(), more), 1)).logits[:, -7:]
        torch.testing.assert_close(model(more, past_key_values=lossless).logits, exact, atol=1e-3, rtol=1e-3)
        shared = Cache(trained(), "hshare", PROMPT + 7, 2, calibration=FILE)
        trained()(prompts(), past_key_values=shared)
        refuses("one at a time", trained(), more, past_key_values=shared)


def test_bytes_are_those_of_the_buffers():
    model = model_of("Gemma3")
    cache = Cache(model, "kivi-4", 1024, 2)
    new_tokens(model, prompts(), cache, 4)
    sliding, layer = cache.layers
    assert cache.nbytes()[1] == {name: b.nbytes for name, b in layer.method.named_buffers()}
    assert {"keys": sliding.keys.nbytes, "values": sliding.values.nbytes}.items() <= cache.nbytes()[0].items()
    assert cache.kv_bytes() == sum(sum(b.values()) for b in cache.nbytes().values())
    assert not [x for x in vars(layer).values() if isinstance(x, torch.Tensor)]  # no keys and values beside them
    whole = Cache(model, "full", 1024, 2)
    assert sum(cache.nbytes()[1].values()) < 0.5 * sum(whole.nbytes()[1].values())


@pytest.mark.parametrize("family, match, changes", [
    ("GptOss", "GptOssAttention has attention sinks", dict(head_dim=16, num_local_experts=4, num_experts_per_tok=2)),
    ("Gemma2", "Gemma2Attention has a soft cap", dict(head_dim=16)),
    ("Mistral", "mistral has 0 of 2 layers .DynamicSlidingWindowLayer", dict(sliding_window=8)),
    ("DeepseekV3", "did not get the cache's keys", dict(
        q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, num_key_value_heads=4,
        first_k_dense_replace=2)),
])  # fmt: skip
def test_attention_that_methods_lack_is_refused_by_name(family, match, changes):
    model = model_of(family, **{k: tuple(v) if isinstance(v, list) else v for k, v in changes.items()})
    refuses(match, lambda: new_tokens(model, prompts(), Cache(model, "quest", 64, 2), 2))


def test_keys_that_another_layer_has_read_are_refused():
    """As in models whose layers share keys and values: a method would store them twice."""
    model = model_of("Llama")
    cache, q, k = Cache(model, "full", 8), torch.randn(1, 4, 3, 16), torch.randn(1, 2, 3, 16)
    k, v = cache.update(k, k.clone(), 0)
    attention(model.model.layers[0].self_attn, q, k, v, None)
    refuses("reads another layer's keys", attention, model.model.layers[1].self_attn, q, k, v, None)


def test_what_a_cache_cannot_do_is_refused_in_a_line(monkeypatch):
    model, ids = model_of("Llama"), prompts()

    def run(*args, model=model, rows=2, tokens=64, **options):
        return new_tokens(model, ids, Cache(model, "full", tokens, rows), 4, **options)

    refuses("do not fit in a cache of 1 rows", run, rows=1)
    refuses("do not fit in a cache of 2 rows of 33", run, tokens=PROMPT + 1)
    refuses("cannot be reordered", run, rows=4, num_beams=2)
    refuses("attention mask is not causal", run, attention_mask=(torch.arange(PROMPT) < 30).long().expand(2, -1))
    refuses('attn_implementation="kv_fast"', run, model=model_of("Llama", "sdpa"))
    refuses("gradients or dropout", model, ids, past_key_values=Cache(model, "full", 64, 2))
    refuses("no method for layer|outside", Cache, model, "0-7:full", 64)
    refuses("give it predict=no", Cache, trained(), "double_sparsity_offload", 64, calibration=FILE)
    refuses("is checked against the model's folder", Cache, model, "loki", 64, calibration=FILE)
    refuses("assisted", new_tokens, model, ids[:1], Cache(model, "full", 64), prompt_lookup_num_tokens=2)
    monkeypatch.setattr(model.model.layers[0].self_attn, "is_causal", False)
    refuses("attention that is not causal", run)
    monkeypatch.undo()
    assert new_tokens(model, ids) == expected("Llama")  # without our cache it is transformers' own attention


def test_output_weights_are_those_of_the_projection():
    model = model_of("Llama")
    for layer, cached in zip(model.model.layers, Cache(model, "full", 8).layers, strict=True):
        assert isinstance(cached.method, KVMethod) and cached.method.output_weights is not None
        x = torch.randn(1, 4, 16)
        want = layer.self_attn.o_proj(x.flatten(1))
        torch.testing.assert_close(torch.einsum("bhd,hde->be", x, cached.method.output_weights()), want)


def test_transformers_is_optional(monkeypatch):
    files = [f for folder in ("engine", "loading", "cache", "kernels", "kv_methods", "runtime", "weights", ".")
             for f in (ROOT / folder).glob("*.py")]  # fmt: skip
    imports = re.compile(r"^ *(import|from) (transformers|engine\.bridge|engine import .*bridge)", re.MULTILINE)
    assert [str(f.relative_to(ROOT)) for f in files if imports.search(f.read_text())] == ["engine/bridge.py"]
    monkeypatch.setitem(sys.modules, "transformers", None)
    refuses("pip install transformers==5.24.0", runpy.run_path, str(ROOT / "engine/bridge.py"))
