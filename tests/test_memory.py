"""Prefill holds the raw keys and values of one layer at a time: measured, in a process of its own."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOKENS, HEADS, HEAD_DIM = 2048, 8, 64
RAW = 2 * TOKENS * HEADS * HEAD_DIM * 4  # bytes of one layer's keys and values in fp32

MEASURE = f"""
import sys
import torch
from model import ModelArgs, random_transformer

def peak_rss():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines["VmHWM"].split()[0]) * 1024

torch.set_num_threads(1)
method, n_layer = sys.argv[1], int(sys.argv[2])
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
model.prefill(tokens, torch.tensor([{TOKENS}]))
print(peak_rss() - before)
"""

HOARDER = """
from kv_methods.self_index import SelfIndex

class Hoarder(SelfIndex):
    def compress(self, q, k, v, lengths):
        super().compress(q, k, v, lengths)
        self.hoard = k, v
"""


@functools.cache
def growth(method: str, n_layer: int, methods: Path | None = None) -> int:
    """Bytes by which the resident peak of a prefill exceeds what was resident after setup_cache."""
    # big blocks go back to the system at once, so that the peak is what is alive
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if methods:
        env["KV_FAST_METHODS"] = str(methods)
    run = [sys.executable, "-c", MEASURE, method, str(n_layer)]
    done = subprocess.run(run, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    if "clear_refs" in done.stderr:
        pytest.skip("the kernel does not let the peak be reset")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")


def test_prefill_does_not_keep_the_keys_and_values_of_earlier_layers():
    one, four = growth("self_index", 1), growth("self_index", 4)
    assert one > RAW  # the measurement sees the one layer that is alive
    assert four - one < RAW


@pytest.mark.slow
def test_the_measurement_sees_a_method_that_keeps_them(tmp_path):
    (tmp_path / "hoarder.py").write_text(HOARDER)
    assert growth("hoarder", 2, tmp_path) - growth("self_index", 2) > RAW
