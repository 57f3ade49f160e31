"""engine.LLM: what a notebook does. Every method generates, streams, and lets itself be looked into."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from cache.grammar import method_files
from cache.trace import observe
from engine import LLM, Ended, Sampling
from engine.decode import Session
from kernels.rope import Rope, RopeArgs, rope_inv_freq
from runtime.errors import InputError
from runtime.machine import ROOT, TINY
from scripts.eval.lm_eval_adapter import KVFast

METHODS = sorted(method_files())


@pytest.fixture(scope="module")
def llm():
    return LLM(TINY)


def prompt_of(llm, n, seed=0):
    return torch.randint(300, 1900, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("method", ("full", "h2o", "ojakv", "razor", "self_index"))
def test_generate_stream_and_decode_agree(llm, method):
    """Batched, streamed and by hand the same greedy tokens, and none of them keeps an autograd history."""
    llm.use(method)
    prompts = [prompt_of(llm, 90), prompt_of(llm, 33, 1)]
    both = llm.generate(prompts, max_new_tokens=12)
    assert [c.prompt_tokens for c in both] == [90, 33] and both[0].batch is both[1].batch
    assert both[0].kv_bytes > 0 and both[0].decode_tokens_per_s > 0 and both[0].batch.prefill_s > 0
    assert "".join(llm.stream(prompts[0], max_new_tokens=12)) == both[0].text
    model = llm.model
    model.setup_cache(method, 1, 102)
    tokens, pos, got = torch.tensor([prompts[0]]), torch.tensor([90]), []
    logits = model.prefill(tokens, pos)
    for step in range(12):
        assert not logits.requires_grad and logits.grad_fn is None
        got.append(int(logits.argmax()))
        logits = model.decode(logits.argmax(-1), pos)
        model.maintain(step + 1)
        pos = pos + 1
    n = len(both[0].tokens)  # a stop token ends it early
    assert got[:n] == both[0].tokens and (n == 12 or got[n] in llm.stop_ids)
    assert not any(b.requires_grad for b in model.cache.buffers())


def test_longrope_goes_by_what_is_asked_for_and_not_by_the_size_of_a_cache(tmp_path):
    """All of a text has the frequencies of long texts if its new tokens get there; a saved one keeps those it has."""
    llm = LLM(TINY, compile=False)
    n = llm.model.args.head_dim // 2
    rope = RopeArgs(type="longrope", original_max_position_embeddings=256, factor=4.0, short_factor=(1.0,) * n,
                    long_factor=tuple(1 + i / 8 for i in range(n)))  # fmt: skip
    llm.model.args, prompt = replace(llm.model.args, rope=rope), prompt_of(llm, 200)

    @torch.inference_mode()
    def steps(session):
        return torch.stack([llm.model.decode(torch.tensor([t]), session.pos + i)[0] for i, t in enumerate(prompt[:20])])

    short, longer = (steps(llm.read([prompt], new)) for new in (24, 100))
    assert (short - longer).abs().max() > 0.1
    session = llm.session(1, 512, 256, 24, Sampling())  # as for a compiled step, of a rounded size
    session.prefill([prompt])
    assert torch.equal(steps(session), short)
    llm.read([prompt], 24)
    llm.save(tmp_path / "a")
    assert torch.equal(steps(llm.restore(tmp_path / "a", 40)), short)
    with pytest.raises(InputError, match="read for 24 tokens more, .* this run's 100 lie beyond it.*save it again"):
        llm.restore(tmp_path / "a", 100)
    llm.read([prompt], 100)
    llm.save(tmp_path / "b")
    assert torch.equal(steps(llm.restore(tmp_path / "b", 24)), longer)


def test_a_conversation_under_longrope_is_one_text():
    """A turn that gets beyond the original context is read with the frequencies of long texts, as `generate` reads it,
    and so is all before it when a later turn gets there."""
    llm = LLM(TINY, compile=False)
    n = llm.model.args.head_dim // 2
    rope = RopeArgs(type="longrope", original_max_position_embeddings=128, factor=4.0, short_factor=(1.0,) * n,
                    long_factor=tuple(1 + i / 8 for i in range(n)))  # fmt: skip
    llm.model.args = replace(llm.model.args, rope=rope)
    text = llm.tokenizer.decode(prompt_of(llm, 60))
    ids = llm.tokenizer.encode(text)
    assert llm.conversation().say(text, 100).tokens == llm.generate([ids], 100)[0].tokens
    talk = llm.conversation()
    talk.say(text, 8)
    known = [*talk.tokens]
    more = llm.tokenizer.encode_after(known, f"\n{text}", True)
    assert talk.say(text, 40).tokens == llm.generate([known + more], 40)[0].tokens


def test_longrope_averages_the_rotations_of_the_text_it_is_in():
    """Where triattention and expected_attention look ahead, keys keep the frequencies that they have."""
    args = RopeArgs(type="longrope", original_max_position_embeddings=64, factor=4.0, short_factor=(1.0,) * 8,
                    long_factor=tuple(2.0 + i for i in range(8)))  # fmt: skip
    rope = Rope(args, 16, 256, 2, 128)
    rope.set_prompt(torch.tensor([40, 80]))
    where = torch.tensor([[10, 50, 90, 2000]]).expand(2, -1)
    cos, _ = rope.mean(where)
    for row, long in enumerate((False, True)):
        inv_freq, scale = rope_inv_freq(args, 16, 256, 1000 if long else 1)
        want = (where[row, :, None].double() * inv_freq).cos().mean(0) * scale
        assert (cos[row, 0, 0] - want).abs().max() < 1e-6


@pytest.mark.parametrize("method", METHODS)
def test_observe_sees_what_each_step_attended_to(llm, method):
    model = llm.model
    model.setup_cache(method, 2, 120)
    tokens = torch.tensor([prompt_of(llm, 100), prompt_of(llm, 100, 1)])
    model.prefill(tokens, torch.tensor([100, 40]))
    pos = torch.tensor([100, 40])
    with observe(model) as trace:
        for step in range(3):
            model.decode(tokens[:, step], pos + step)
            model.maintain(step + 1)
    model.decode(tokens[:, 3], pos + 3)  # no longer looked at
    assert {s.layer for s in trace} == set(range(model.args.n_layer)) and len(trace) >= 3 * model.args.n_layer
    for s in trace:
        torch.testing.assert_close(s.weight.sum(-1), torch.ones(s.weight.shape[:2]))
        assert s.position.max() <= s.pos.max() and s.position.min() >= -2
        for row in range(2):  # nobody attends to what is not there, or twice to one token
            for head in range(s.position.shape[1]):
                real = s.position[row, head][s.position[row, head] >= 0]
                assert len(real.unique()) == len(real)
                assert real.max() == s.pos[row] or method == "skip_softmax"  # whose newest block may weigh nothing
        known = s.mass(120).sum(-1)
        assert (known <= 1 + 1e-5).all()
    if method == "full":
        assert all((s.mass(120).sum(-1) > 1 - 1e-5).all() for s in trace)


def test_a_second_call_of_the_same_size_uses_the_same_cache(llm):
    llm.use("self_index,budget=80")
    first = llm.generate([prompt_of(llm, 50)], 5)
    cache = llm.model.cache
    assert llm.generate([prompt_of(llm, 50)], 5)[0].tokens == first[0].tokens and llm.model.cache is cache
    llm.generate([prompt_of(llm, 60)], 5)
    assert llm.model.cache is not cache


def test_short_contexts_allocate_what_they_can_fill(llm, monkeypatch):
    """A prompt of 11 tokens once took 3.4 times the bytes of full. Any token ends the text: room is for 128."""
    monkeypatch.setattr(LLM, "stop_ids", frozenset(range(llm.model.args.vocab_size)))
    for method, most in (("self_index", 1.05), ("streaming", 1.0), ("double_sparsity", 1.2)):
        (c,) = llm.use(method).generate([prompt_of(llm, 11)], 128)
        assert c.kv_bytes <= most * c.kv_bytes_full, method


def test_another_calibration_is_used_at_once(tmp_path):
    """Also where a call of the same size has set up a cache with the bases of the one before."""
    own, other, tensors = LLM(TINY, "sals-25", compile=False), tmp_path / "other.safetensors", {}
    with safe_open(TINY / "calibration.safetensors", "pt") as f:
        meta = f.metadata()
        tensors = {key: f.get_tensor(key) for key in f.keys()}  # noqa: SIM118
    turned = {key: x.flip(-1).contiguous() for key, x in tensors.items() if key.endswith("sals.basis")}
    save_file(tensors | turned, other, meta)
    prompt = prompt_of(own, 300)
    before = own.generate([prompt], 16)[0].tokens
    own.model.use_calibration(other)
    after = LLM(TINY, "sals-25", compile=False, calibration=other).generate([prompt], 16)[0].tokens
    assert own.generate([prompt], 16)[0].tokens == after != before


def test_a_place_for_a_cache_is_checked_before_the_prompt_is_read(llm, monkeypatch):
    monkeypatch.setattr(Session, "prefill", lambda *_: pytest.fail("the prompt is read"))
    with pytest.raises(InputError, match="the folder /no does not exist"):
        llm.generate("a", save="/no/x")


def test_a_callback_that_takes_the_cache_ends_the_text(llm):
    with pytest.raises(Ended, match="another call has taken the KV cache") as e:
        llm.generate("import os", 8, on_text=lambda i, piece: llm.use("full"))
    assert len(e.value.completions[0].tokens) == 1 and e.value.completions[0].kv_bytes > 0


@pytest.mark.parametrize("speculate", [None, 4])
def test_tokens_of_rows_that_have_ended_are_not_counted(speculate):
    llm = LLM(TINY, "double_sparsity", compile=False, speculate=speculate)
    both = ["import os", "def main():"]
    assert llm.generate(both, 24)[0].batch.decoded == 2 * 23  # each prompt gives a token
    a, b = llm.generate(both, 24, stop="import")  # of the first
    assert len(a.tokens) < 8 and len(b.tokens) == 24 and a.batch.decoded == len(a.tokens) + 23
    (a,) = llm.generate(both[:1], 24, stop="import")
    assert a.batch.decoded <= len(a.tokens) and a.decode_tokens_per_s == a.batch.decoded / a.batch.decode_s


def test_more_tokens_than_were_promised_are_refused(llm):
    model = llm.model
    model.setup_cache("self_index", 1, 40, max_new_tokens=10)
    with pytest.raises(InputError, match="does? not fit|do not fit"):
        model.prefill(torch.tensor([prompt_of(llm, 31)]), torch.tensor([31]))
    model.prefill(torch.tensor([prompt_of(llm, 30)]), torch.tensor([30]))
    model.maintain(10)
    with pytest.raises(InputError, match="max_new_tokens=10"):
        model.maintain(11)


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda llm: llm.use("nope"), "unknown method"),
        (lambda llm: llm.use("self_index", colour=1), "no knob 'colour'"),
        (lambda llm: LLM(TINY, self=1), "no knob 'self'"),
        (lambda llm: llm.use(None), "a method is a NoneType"),
        (lambda llm: LLM(TINY, dtype="fp8"), "dtype 'fp8' is not supported: use fp32, bf16, fp16"),
        (lambda llm: LLM(TINY, kv_dtype=torch.int8), "dtype torch.int8 is not supported"),
        (lambda llm: LLM(TINY, adaptive=True), "give speculate, too"),
        (lambda llm: llm.generate("a", 2, {"temperature": 1}), "is no Sampling: give"),
        (lambda llm: llm.generate("a", 2, pack=0.5), "give save, too"),
        (lambda llm: llm.use("ojakv", eta_decode=10**400), "out of range"),
        (lambda llm: Sampling(temperature=float("nan")), "--temperature nan is no number"),
        (lambda llm: llm.generate([[]]), "no tokens"),
        (lambda llm: llm.generate([[5] * 5000]), "context"),
        (lambda llm: llm.generate([[-1]]), "token -1, the model embeds"),
        (lambda llm: llm.generate(["a"], questions=["b", "c"], batch_size=1), "are one batch: drop --batch-size"),
        (lambda llm: llm.generate(["a"], chat=True), r"chat=True is no Chat: give Chat\(\)"),
        (
            lambda llm: llm.generate([1, 2, 3]),
            r"a list: give a list, of texts or of lists of token ids, as \[\[1, 2, 3\]\]",
        ),
        (lambda llm: llm.generate(torch.tensor([[1, 2]])), "a Tensor: give a list"),
        (lambda llm: llm.generate(None), "a NoneType: give a list"),
        (lambda llm: llm.generate([None, "a"]), "a NoneType: give text"),
        (lambda llm: llm.generate([[1.0]]), "list of float: give text or a list of token ids"),
        (lambda llm: next(llm.stream(None)), "a NoneType: give text"),
        (lambda llm: llm.conversation().say(None, 3), "a NoneType: give text"),
        (lambda llm: llm.conversation().say("a", 0), "--max-new-tokens 0 is below 1"),
        (lambda llm: llm.generate("a", None), "--max-new-tokens is None"),
        (lambda llm: llm.generate("a", batch_size=0), "--batch-size 0 is below 1"),
        (lambda llm: Sampling(top_k=2.0), "--top-k is 2.0"),
        (lambda llm: Sampling(temperature=None), "--temperature is a NoneType: give a number"),
        (lambda llm: LLM(TINY, max_seq_len=80.0), "--max-seq-len is 80.0"),
        (lambda llm: llm.generate("a", questions=3), "questions are 3: give a text"),
        (lambda llm: llm.generate(None, load=3), "a saved cache is 3, a int: give a file's name"),
        (lambda llm: llm.generate("a", save=3), "--save-cache is 3, a int"),
        (lambda llm: LLM(weights=4), "--weights 4: use fp32"),
        (lambda llm: LLM(calibration=[3]), "a calibration is 3, a int"),
        (lambda llm: LLM(random_init="llama-3.2-1b", seed="x"), "--seed is 'x'"),
    ],
)
def test_bad_input(llm, call, says):
    with pytest.raises(InputError, match=says):
        call(llm)


def test_engine_needs_no_command_line():
    """Importing it reads no arguments and pulls in neither scripts, a command line, nor the compiler (2 s)."""
    unwanted = "('generate', 'calibrate', 'scripts', 'torch._dynamo', 'torch._inductor')"
    code = f"import sys, engine; print([m for m in {unwanted} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_lm_evals_beginning_of_an_answer_goes_on(tmp_path):
    """Also where lm-eval is not installed."""
    folder = shutil.copytree(TINY, tmp_path / "m")
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    lm, asked = KVFast(str(folder)), dict(role="user", content="of: of")
    assert lm.apply_chat_template([asked]) == "<user>of: of</><assistant>"
    begun = [asked, dict(role="assistant", content="The first of")]
    assert lm.apply_chat_template(begun, add_generation_prompt=False) == "<user>of: of</><assistant>The first of"


@pytest.mark.parametrize("new", [0, 32, 200])
def test_lm_evals_requests_leave_room_for_a_prompt(new):
    """Also where lm-eval is not installed."""
    asked = SimpleNamespace(args=("import os", dict(max_gen_toks=new)))
    with pytest.raises(InputError, match=f"max_gen_toks {new} leaves no token of 32 for a prompt: give 1 to 31"):
        KVFast(str(TINY), max_length=32).generate_until([asked], disable_tqdm=True)
