"""Prefill holds the raw keys and values of one layer at a time, loading one tensor: measured, each in a process."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from loading.checkpoint import random_transformer, save_checkpoint_tensors
from loading.config import args_from_hf
from runtime.machine import left_of_groups

ROOT = Path(__file__).parents[1]
TOKENS, HEADS, HEAD_DIM = 2048, 8, 64
RAW = 2 * TOKENS * HEADS * HEAD_DIM * 4  # bytes of one layer's keys and values in fp32

MEASURE = f"""
import sys
import torch
from loading.checkpoint import random_transformer
from model import ModelArgs

def peak_rss():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines["VmHWM"].split()[0]) * 1024

torch.set_num_threads(1)
method, n_layer, chunk = sys.argv[1], *map(int, sys.argv[2:])
args = ModelArgs(dim=64, n_layer=n_layer, n_head={HEADS}, n_kv_head={HEADS}, head_dim={HEAD_DIM}, ffn_dim=32,
                 vocab_size=64, max_seq_len=8192)
model = random_transformer(args, "cpu", torch.float32)
model.setup_cache(method, 1, {TOKENS})
tokens = torch.zeros(1, {TOKENS}, dtype=torch.int64)
model.prefill(tokens[:, :256], torch.tensor([256]))  # what the libraries allocate once
model.reset_cache()
for buffer in model.cache.buffers():  # pages that were never touched do not count as resident
    buffer.fill_(1)
with open("/proc/self/clear_refs", "w") as f:
    f.write("5")  # the peak starts again from here
before = peak_rss()
model.prefill(tokens, torch.tensor([{TOKENS}]), chunk or None)
print(peak_rss() - before)
"""


@functools.cache
def growth(method: str, n_layer: int, chunk: int = 0) -> int:
    """Bytes by which the resident peak of a prefill exceeds what was resident after setup_cache."""
    # big blocks go back to the system at once, so that the peak is what is alive
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = [sys.executable, "-c", MEASURE, method, str(n_layer), str(chunk)]
    done = subprocess.run(run, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    if "clear_refs" in done.stderr:
        pytest.skip("the kernel does not let the peak be reset")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_a_containers_limit_counts(tmp_path):
    """As v1 of control groups has it, and v2."""
    for folder, most, now, cached in ((tmp_path, "memory.max", "memory.current", "inactive_file"),
                                      (tmp_path / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                                       "total_inactive_file")):  # fmt: skip
        folder.mkdir(exist_ok=True)
        (folder / most).write_text("1000\n"), (folder / now).write_text("700\n")
        (folder / "memory.stat").write_text(f"anon 600\n{cached} 100\n")
    assert min(left_of_groups(tmp_path)) == 400 and min(left_of_groups(tmp_path / "none")) == 2**62


pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")


@pytest.mark.slow
def test_prefill_does_not_keep_the_keys_and_values_of_earlier_layers():
    one, four = growth("self_index", 1), growth("self_index", 4)
    assert one > RAW  # the measurement sees the one layer that is alive
    assert four - one < RAW


def test_a_prompt_in_chunks_takes_one_layers_keys_and_values():
    """Without the queries, which `full` does not read: k before and after rotation, v, and a chunk's activations."""
    whole, chunks = growth("full", 2), growth("full", 4, chunk=128)
    assert 1.4 * RAW < chunks < 2.2 * RAW < 0.75 * whole


LOAD = """
import sys, threading
import torch
from loading.checkpoint import load_checkpoint
from runtime.parallel import Ranks
from weights import WeightFormat

def held():  # what is this process's own: pages of the checkpoint's file are not
    return next(int(x.split()[1]) * 1024 for x in open("/proc/self/status") if x.startswith("RssAnon"))

def load():
    return load_checkpoint(sys.argv[1], weight_format=WeightFormat.parse(sys.argv[2]), ranks=Ranks(0, int(sys.argv[3])))

torch.set_num_threads(1)
load()  # what the libraries allocate once
ended, peak, before = threading.Event(), [0], held()
def watch():
    while not ended.wait(0.0005):
        peak[0] = max(peak[0], held())
watcher = threading.Thread(target=watch)
watcher.start()
model = load()
ended.set(), watcher.join()
print(max(peak[0], held()) - before, sum(t.nbytes for t in (*model.parameters(), *model.buffers())))
"""


@pytest.mark.slow
@pytest.mark.parametrize("weights, ranks", [("int4", 1), ("int4", 4)])
def test_quantizing_holds_the_quantized_model_and_part_of_a_tensor(weights, ranks, tmp_path):
    """Of a checkpoint in bf16 of 75 MB, which dense would take 150 MB in fp32; of a rank its share."""
    dim, ffn, n_layer = 512, 4096, 5
    config = dict(model_type="llama", hidden_size=dim, intermediate_size=ffn, num_hidden_layers=n_layer,
                  vocab_size=2048, num_attention_heads=8, num_key_value_heads=4, head_dim=64,
                  tie_word_embeddings=True)  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = random_transformer(args_from_hf(config), "cpu", torch.float32)
    save_file(save_checkpoint_tensors(model, torch.bfloat16), tmp_path / "model.safetensors")
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = [sys.executable, "-c", LOAD, str(tmp_path), weights, str(ranks)]
    done = subprocess.run(run, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    peak, size = map(int, done.stdout.split())
    dense = 4 * sum(p.numel() for p in model.parameters())
    assert size < 0.3 * dense and peak > 0.5 * size, "nothing was measured"
    assert peak < size + ffn * dim * 4, "more is held than the quantized model and part of a tensor being quantized"
