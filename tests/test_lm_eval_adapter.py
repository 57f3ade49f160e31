"""scripts/eval/lm_eval_adapter.py: lm-eval's requests and a local task file; skipped where lm-eval is not installed."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from engine import LLM
from runtime.errors import InputError
from runtime.machine import TINY
from scripts.eval import lm_eval_adapter

lm_eval = pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance  # noqa: E402


def request(kind, *args):
    return Instance(kind, {}, args, 0)


@pytest.fixture(scope="module", params=["checkpoint", "transformers"])
def full(request):
    return lm_eval_adapter.KVFast(**{request.param: str(TINY)}, batch_size=2)


def forced(model, context, said):
    """The log-probability of `said` by teacher forcing, and whether greedy decoding says the same."""
    with torch.inference_mode():
        logp = model(torch.tensor([context + said]))[0].log_softmax(-1)[len(context) - 1 : -1]
    ids = torch.tensor(said)
    return logp.gather(1, ids[:, None]).sum().item(), bool((logp.argmax(-1) == ids).all())


PAIRS = [
    ("def f(x):\n    return", " x"),
    ("import", " os\nimport sys"),
    ("def f(x):\n    return", " self"),
    ("", "import os"),
]


def test_log_likelihoods_of_full_are_those_of_teacher_forcing(full):
    found = full.loglikelihood([request("loglikelihood", *p) for p in PAIRS], disable_tqdm=True)
    for (context, said), (logp, greedy) in zip(PAIRS, found, strict=True):
        pair = full._encode_pair(context, said) if context else ([full.prefix_token_id], full.tok_encode(said, False))
        wanted = forced(full.model, *pair)
        assert logp == pytest.approx(wanted[0], abs=1e-3) and greedy == wanted[1]


def test_a_whole_text_is_decoded_from_its_first_token(full):
    text = "import os\nimport sys\n" * 12
    (found,) = full.loglikelihood_rolling([request("loglikelihood_rolling", text)], disable_tqdm=True)
    assert found == pytest.approx(forced(full.model, [full.prefix_token_id], full.tok_encode(text, False))[0], abs=1e-2)


def test_a_method_changes_what_comes_after_a_long_context(full):
    context, said = "The number is 4821. " + "import os\n" * 40, "The number is 4821."
    forgets = lm_eval_adapter.KVFast(str(TINY), "streaming", recent="16", sinks="1")
    pair = [request("loglikelihood", context, said)]
    ((a, _),), ((b, _),) = full.loglikelihood(pair, True), forgets.loglikelihood(pair, True)
    assert a > b + 1


def test_answers_end_at_a_stop_string(full):
    asked = dict(until=["\n"], max_gen_toks=12, do_sample=False, temperature=0.0)
    (said,) = full.generate_until([request("generate_until", "import os\nimport", asked)], disable_tqdm=True)
    whole = LLM(TINY).generate("import os\nimport", 12)[0].text
    assert said == whole.split("\n")[0] and "\n" not in said
    for asked in (dict(temperature=1.0), dict(num_beams=4)):
        with pytest.raises(InputError, match="greedily"):
            full.generate_until([request("generate_until", "a", asked)], disable_tqdm=True)


@pytest.mark.parametrize("name", ["max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"])
def test_a_limit_has_any_of_lm_evals_names(full, name):
    (said,) = full.generate_until([request("generate_until", "import os\nimport", {name: 3})], disable_tqdm=True)
    assert said == LLM(TINY).generate("import os\nimport", 3)[0].text


@pytest.mark.parametrize("more, said", [
    (dict(max_length="x"), "max_length is 'x', a str: give a whole number, 2 or more"),
    (dict(max_length=1), "max_length 1 is below 2"), (dict(max_gen_toks=0), "max_gen_toks 0 is below 1"),
    (dict(batch_size=-3), "batch_size -3 is below 1"), (dict(batch_size="4097"), "batch_size 4097 is above 4096"),
])  # fmt: skip
def test_a_number_that_is_none_is_refused(more, said):
    with pytest.raises(InputError, match=said):
        lm_eval_adapter.KVFast(str(TINY), **more)


def test_a_local_task_by_the_command(tmp_path, monkeypatch, capsys):
    rows = [
        dict(q=f"import os\nimport sys\nimport{' ' * (i % 2)}", choices=[" os", " zebra"], gold=0) for i in range(4)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "mine.yaml").write_text(
        f"task: mine\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {tmp_path / 'rows.jsonl'}\n"
        'test_split: test\noutput_type: multiple_choice\ndoc_to_text: "{{q}}"\ndoc_to_choice: "{{choices}}"\n'
        "doc_to_target: gold\nmetric_list:\n  - metric: acc\nmetadata:\n  version: 1\n"
    )
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = f"checkpoint={TINY},method=kivi,bits=4"
    argv = ("--model", "kvfast", "--model_args", model, "--include_path", str(tmp_path), "--tasks", "mine",
            "--batch_size", "2", "--json")  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["lm_eval_adapter", *argv])
    lm_eval_adapter.main()
    assert json.loads(capsys.readouterr().out)["mine"]["acc,none"] == 1.0
    monkeypatch.setattr(sys, "argv", ["lm_eval_adapter", *argv[:3], f"{model},device=cpu", *argv[4:]])
    with pytest.raises(InputError, match="give --device"):
        lm_eval_adapter.main()
