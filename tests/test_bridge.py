"""Methods in the models of transformers, on tiny random models: where nothing is lost, the tokens of its own cache."""

from __future__ import annotations

import functools
import json
import os
import re
import runpy
import shutil
import sys

import pytest
import torch

import calibrate as calibrate_script
from cache.base import KVMethod
from cache.grammar import method_files
from cache.spec import all_statistics, resolve
from calibrate import calibrate
from loading import load_checkpoint, load_tokenizer
from runtime.errors import InputError
from runtime.machine import ROOT
from scripts.eval import compare, perplexity, view
from scripts.eval.evaluation import Evaluation
from scripts.eval.lm_eval_adapter import KVFast
from scripts.eval.perplexity import predict, summary

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

from engine.bridge import Cache  # noqa: E402, it needs transformers
from engine.transformers_backend import TransformersModel, attention, load_model, model_args  # noqa: E402

TINY, PROMPT, NEW = ROOT / "models/tiny", 32, 20
FILE = TINY / "calibration.safetensors"
SELF_INDEX = "self_index,budget=8,sinks=2,min_tokens=0"
SIZES = dict(vocab_size=199, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, bos_token_id=1,
             eos_token_id=None)  # fmt: skip
EXPERTS = dict(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
SLIDING = dict(head_dim=16, sliding_window=8, layer_types=["sliding_attention", "full_attention"])
DYNAMIC = dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0)
LINEAR = dict(shared_expert_intermediate_size=32, linear_num_value_heads=4, linear_num_key_heads=2,
              linear_key_head_dim=16, linear_value_head_dim=16,
              layer_types=["linear_attention", "full_attention"])  # fmt: skip
FAMILIES = dict(
    Llama={}, Qwen2={}, Qwen3=dict(head_dim=16), Glm4=dict(head_dim=16, partial_rotary_factor=0.5), Olmo2={},
    Granite=dict(attention_multiplier=0.1), Cohere={}, Exaone4=SLIDING, Phi3={}, SmolLM3={}, Qwen3Moe=EXPERTS,
    Gemma3=SLIDING | dict(query_pre_attn_scalar=40, tie_word_embeddings=False), Qwen3Next=EXPERTS | LINEAR,
)  # fmt: skip
ROTATED = {"oja", "pca", "channels", "razor", "qfilters"}  # statistics that read queries and keys after rotation alone
LOSSLESS = ["quest", "streaming", "self_index", "snapkv"]
NEED_CALIBRATION = {
    "double_sparsity", "double_sparsity_offload", "hshare", "loki", "ojakv", "palu", "qfilters", "razor", "sals",
    "triattention",
}  # fmt: skip
REASONS = dict.fromkeys(NEED_CALIBRATION, "needs a calibration") | dict(kvzip="reads a prompt twice")
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
    for i in range(2):
        assert cache.nbytes()[i] == {name: b.nbytes for name, b in cache.layers[i].method.named_buffers()}
    assert sum(cache.nbytes()[0].values()) == 2 * 2 * 2 * 8 * 16 * 4  # keys and values of its window
    assert cache.kv_bytes() == sum(sum(b.values()) for b in cache.nbytes().values())
    assert not [x for x in vars(layer).values() if isinstance(x, torch.Tensor)]  # no keys and values beside them
    whole = Cache(model, "full", 1024, 2)
    assert sum(cache.nbytes()[1].values()) < 0.5 * sum(whole.nbytes()[1].values())


@pytest.mark.parametrize("family, match, changes", [
    ("GptOss", "GptOssAttention has attention sinks", dict(head_dim=16, num_local_experts=4, num_experts_per_tok=2)),
    ("Gemma2", "Gemma2Attention has a soft cap", dict(head_dim=16)),
    ("Mistral", "Quest cannot honour this model's sliding window of 8", dict(sliding_window=8)),
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
    few = Cache(model, "self_index,budget=8,sinks=2,min_tokens=0", 64, 2, max_new_tokens=3)
    assert few.kv_bytes() < Cache(model, "self_index,budget=8,sinks=2,min_tokens=0", 64, 2).kv_bytes()
    new_tokens(model, ids, few, 4)
    refuses("61 for a prompt and 3 after it", new_tokens, model, ids, Cache(model, "full", 64, 2, max_new_tokens=3), 5)
    refuses("cannot be reordered", run, rows=4, num_beams=2)
    refuses("attention mask is not causal", run, attention_mask=(torch.arange(PROMPT) < 30).long().expand(2, -1))
    refuses('attn_implementation="kv_fast"', run, model=model_of("Llama", "sdpa"))
    refuses("gradients or dropout", model, ids, past_key_values=Cache(model, "full", 64, 2))
    refuses("no method for layer|outside", Cache, model, "0-7:full", 64)
    refuses("give it predict=no", Cache, trained(), "double_sparsity_offload", 64, calibration=FILE)
    refuses("is checked against the model's folder", Cache, model, "loki", 64, calibration=FILE)
    refuses("has 4 of 4 layers", model_args, transformers.Llama4TextConfig(num_hidden_layers=4))  # in chunks
    varying = model_of.__wrapped__("Llama", rope_parameters=DYNAMIC)
    refuses("before rotation", Cache, varying, "expected_attention", 64)
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
    imports = re.compile(r"^ *(import|from) transformers|^from engine\.transformers_backend", re.MULTILINE)
    found = {f.name for f in files if imports.search(f.read_text())}
    assert found == {"bridge.py", "transformers_backend.py"}  # others import these where --transformers is given
    monkeypatch.setitem(sys.modules, "transformers", None)
    refuses("pip install transformers==5.24.0", runpy.run_path, str(ROOT / "engine/transformers_backend.py"))


# ---- the model behind our decoder's interface ----


@functools.cache
def ours():
    return load_checkpoint(TINY, dtype=torch.float32)


@functools.cache
def theirs():
    return load_model(TINY, "cpu", torch.float32)


def test_calibration_is_that_of_our_decoder():
    """On a family that both have: bit for bit behind the rotation, and to rounding before it."""
    tk, ids = load_tokenizer(TINY), text()[0]
    a, b = (calibrate(m, [ids[:100], ids[100:]], 16, vocabulary=tk.text_ids) for m in (ours(), theirs()))
    assert a.tensors.keys() == b.tensors.keys()
    for name in a.tensors:
        if name.split(".")[2] in ROTATED:
            torch.testing.assert_close(b.tensors[name], a.tensors[name], rtol=0, atol=0)
        elif not name.endswith(("basis", "eigenvalues")):
            torch.testing.assert_close(b.tensors[name], a.tensors[name], rtol=1e-4, atol=1e-4, equal_nan=True)
        elif name.endswith("eigenvalues"):
            torch.testing.assert_close(b.tensors[name], a.tensors[name], rtol=1e-5, atol=1e-4)
            basis, values = (c.tensors[name.replace("eigenvalues", "basis")] for c in (a, b)), a.tensors[name]
            x, y = (u @ torch.diag(values) @ u.mT for u in basis)  # eigenvectors of close eigenvalues may turn
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3 * float(values[0]))


@pytest.mark.parametrize("spec", ["full", "self_index,budget=72", "kvzip,budget=0.5", "sals-25",
                                  "snapkv,budget=24,recent=4,value_aware=true", "palu",
                                  "expected_attention,budget=40"])  # fmt: skip
def test_predictions_are_those_of_our_decoder(spec):
    """Perplexity of two texts in one batch, prefilled as evaluations do it; and the bytes of the cache."""
    rows = [text()[0, :120].tolist(), text()[0, 60:180].tolist()]
    found = []
    for model in (ours(), theirs()):
        ev = Evaluation(TINY, torch.device("cpu"), 2, False, 0, model)
        ev.setup(dict.fromkeys(["full", spec]) | {"full": ("full", {}), spec: (spec, {})}, 120, 20)
        found.append((summary([predict(ev, rows, 20, 2)[spec]]), ev.bytes(spec, 99)))
    (a, bytes_a), (b, bytes_b) = found
    assert bytes_a == bytes_b
    for key in ("perplexity", "kl", "same_top", "recall"):
        assert b[key] == pytest.approx(a[key], rel=2e-3, abs=2e-3), key


@pytest.mark.parametrize("family", ["Glm4", "Cohere", "Exaone4", "Gemma3", "Qwen3Next"])
def test_keys_are_turned_back_where_the_models_rotation_is_known(family):
    """In halves or pairs, of all channels or some, in all layers or some: measured by a pass over text, methods of keys
    before rotation give the tokens of transformers at their lossless knobs."""
    model = TransformersModel(model_of(family))
    assert all(rope is not None for rope, _ in model.rotations)
    calib = calibrate(
        model, [prompts(1, 64, seed=3)[0]], 16, [*resolve("sals")[0].statistics, *resolve("palu")[0].statistics]
    )
    for name in ("sals", "palu"):
        cache = Cache(model_of(family), name, PROMPT + NEW, 2, calibration=calib, **resolve(name)[0].lossless)
        assert new_tokens(model_of(family), prompts(), cache) == expected(family)


def test_a_layer_that_carries_a_state_is_refused_where_only_keys_are_kept():
    model = TransformersModel(model_of("Qwen3Next"))
    model.setup_cache("full", 1, PROMPT + NEW)
    with pytest.raises(InputError, match=r"linear attention \(1 of 2\), which is not kept here: call its generate"):
        model.prefill(prompts(1), torch.tensor([PROMPT]))


def test_statistics_before_an_unknown_rotation_are_left_out(capsys):
    model = TransformersModel(model_of.__wrapped__("Llama", rope_parameters=DYNAMIC))
    kept = model.measurable(all_statistics())
    assert {s.name for s in kept} == ROTATED
    assert calibrate(model, [prompts(1, 64)[0]], 16, kept).names == ROTATED
    said = " ".join(capsys.readouterr().err.split())
    assert "cannot be turned back to those before rotation:" in said and "sals, palu" in said


def test_commands_take_a_model_of_transformers(tmp_path, cli, few_texts):
    """Of an architecture that our decoder refuses: calibrate, predict, compare, view, and answer as lm-eval asks."""
    folder, text = tmp_path / "model", tmp_path / "text.txt"
    family = dict(vocab_size=load_tokenizer(TINY).vocab_size, bos_token_id=None, eos_token_id=0,
                  max_position_embeddings=2048)  # fmt: skip
    model_of("Glm4", **family).save_pretrained(folder)
    for file in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copy(TINY / file, folder)
    text.write_text((ROOT / "model.py").read_text()[:3000])
    flags = ["--transformers", folder]
    code, out, err = cli(calibrate_script, *flags, "--data", text, "--samples", 2, "--seq-len", 64)
    assert code == 0 and (folder / "calibration.safetensors").is_file(), err
    code, out, err = cli(perplexity, *flags, "--method", "sals-25", "--text", text, "--length", 96, "--decoded", 8,
                         "--windows", 1, "--json")  # fmt: skip
    result = json.loads(out)
    assert code == 0 and result["checkpoint"] == "model" and result["settings"]["engine"] == "transformers", err
    assert [r["method"] for r in result["rows"]] == ["full", "sals-25"] and 1 < result["rows"][0]["perplexity"] < 1e9
    code, out, err = cli(
        compare, *flags, "--method", "full", "quest", "--tasks", "needle", "--lengths", 96, "--samples", 1
    )
    assert code == 0 and "`quest`" in out, err
    code, out, err = cli(view, *flags, "--method", "quest", "--prompt-file", text, "--steps", 2, "--json", "--out",
                         tmp_path / "view.html")  # fmt: skip
    assert code == 0 and len(json.loads(out)["rows"]) == 2, err
    assert len(KVFast(transformers=folder, method="quest").llm.generate("import os", 4)[0].tokens) == 4
    code, _, err = cli(perplexity, *flags, "--weights", "int8")
    assert code == 2 and err.endswith("error: transformers holds weights in the compute dtype: leave out --weights and "
                                      "--head\n")  # fmt: skip
    assert cli(perplexity, "--transformers", tmp_path)[0] == cli(perplexity, "--transformers", "no/such")[0] == 2
