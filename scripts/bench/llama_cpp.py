"""llama.cpp as a peer of bench_generate.py: runs llama-bench on a GGUF with our shapes and weights.

`--peer llama.cpp:PATH` takes the path of the program llama-bench. It fills its cache once with a prompt of the same
length (untimed: at 8K it takes minutes), then decodes the same number of tokens after it in each round. Its process is
stopped while others have their turn. A prompt is a separate run in each round. Weights have the same number of bits
(Q4_0, Q8_0, BF16, F32), and so has the output head.

On a CPU it runs with its fastest settings instead of its defaults: -fa off, and a bf16 cache if ours has one. (2
threads of a Xeon with AVX-512, Llama-3.2-1B's shapes, Q4_0, tokens/s after 2048 tokens: bf16 10.4, fp16 9.9; with -fa
auto or on 7.0 and 5.3; prompts are the same.) On a GPU it runs with -fa on and fp16.

The package llama-cpp-python has its sources, with no further download:

    pip download llama-cpp-python --no-deps --no-binary :all:     # needs scikit-build-core to tell its name
    tar xf llama_cpp_python-*.tar.gz && cd llama_cpp_python-*/vendor/llama.cpp
    cmake -B build -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF
    cmake --build build --target llama-bench                      # build/bin/llama-bench

On processors with AMX its prompts may crash with a segmentation fault (ggml_backend_amx_mul_mat, llama.cpp's issue
20824; seen with Q4_0). In that case build with -DCMAKE_C_FLAGS and -DCMAKE_CXX_FLAGS="-mno-amx-tile -mno-amx-int8
-mno-amx-bf16".
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loading.checkpoint import tensors_of
from model import ModelArgs, Transformer
from runtime.errors import InputError
from scripts.bench.peer_runs import Run, Work
from weights import PackedLinear
from weights.gguf import LAYOUTS, NAMES, PARTS
from weights.gguf_file import GGUFFile, type_name

BITS = {32: "F32", 16: "BF16", 8: "Q8_0", 4: "Q4_0"}
OURS = {v: k for k, v in NAMES.items()}, {v: k for k, v in PARTS.items()}  # Hugging Face's names -> GGUF's


def kind_of(model: Transformer) -> str:
    """The ggml type of a model's weights: that of its own file, or of the file to write."""
    linear = model.layers[0].feed_forward.w2
    if file := own_file(model):
        return type_name(file.tensors["blk.0.ffn_down.weight"].type)
    return BITS[linear.bits if isinstance(linear, PackedLinear) else linear.weight.itemsize * 8]


def own_file(model: Transformer) -> GGUFFile | None:
    """The GGUF file whose weights the model holds unchanged, or None."""
    if model.folder is None or not model.folder.is_file():
        return None
    file, linear = GGUFFile(model.folder), model.layers[0].feed_forward.w2
    layout = LAYOUTS.get(file.tensors["blk.0.ffn_down.weight"].type)
    return file if isinstance(linear, PackedLinear) and linear.layout == layout else None


def gguf_name(name: str) -> str:
    """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight"""
    if name in OURS[0]:
        return OURS[0][name]
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    module, _, kind = part.rpartition(".")
    return f"blk.{layer}.{OURS[1][module]}.{kind}"


def architecture(a: ModelArgs) -> str:
    """llama, qwen2 or qwen3. Raises InputError if none of them has these parts."""
    if a.mlp_bias or a.o_bias or (a.qkv_bias and a.qk_norm) or not a.plain:
        raise InputError("llama, qwen2 and qwen3 of llama.cpp do not compute what this model does: give a GGUF file")
    return "qwen3" if a.qk_norm else "qwen2" if a.qkv_bias else "llama"


def write_gguf(model: Transformer, path: Path) -> None:
    """Writes the model's weights, tensor by tensor, as a GGUF that llama.cpp loads, without a tokenizer."""
    import gguf

    a, arch, kinds = model.args, architecture(model.args), gguf.GGMLQuantizationType
    w = gguf.GGUFWriter(path, arch)
    w.add_block_count(a.n_layer)
    w.add_context_length(a.max_seq_len)
    w.add_embedding_length(a.dim)
    w.add_feed_forward_length(a.ffn_dim)
    w.add_head_count(a.n_head)
    w.add_head_count_kv(a.n_kv_head)
    w.add_key_length(a.head_dim)
    w.add_value_length(a.head_dim)
    w.add_rope_dimension_count(a.head_dim)
    w.add_rope_freq_base(a.rope.theta)  # the angles do not change the cost
    w.add_layer_norm_rms_eps(a.norm_eps)
    w.add_vocab_size(a.vocab_size)
    w.add_tokenizer_model("none")
    body, head = kinds[kind_of(model)], model.output
    bits = head.bits if isinstance(head, PackedLinear) else head.weight.itemsize * 8
    headed = ("model.embed_tokens.weight", "lm_head.weight")
    todo = []
    for name, target in tensors_of(model).items():
        kind = kinds.F32 if len(target.shape) < 2 else kinds[BITS[bits]] if name in headed else body
        shape = gguf.quant_shape_to_byte_shape(target.shape, kind) if kind != kinds.F32 else target.shape
        dtype = np.dtype(np.float32 if kind == kinds.F32 else np.uint8)
        size = int(np.prod(shape)) * dtype.itemsize
        w.add_tensor_info(gguf_name(name), shape, dtype, size, raw_dtype=None if kind == kinds.F32 else kind)
        todo.append((name, target, kind))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    for name, target, kind in todo:
        w.write_tensor_data(encoded(turned(target.read().float(), name, a, arch), kind))
    w.close()


def turned(t: Tensor, name: str, a: ModelArgs, arch: str) -> Tensor:
    """Rows of q and k in llama.cpp's order: Hugging Face's channel i next to its channel i + D/2."""
    if arch != "llama" or not name.endswith(("q_proj.weight", "k_proj.weight")):
        return t
    return t.unflatten(0, (-1, 2, a.head_dim // 2)).transpose(1, 2).flatten(0, 2)


def encoded(t: Tensor, kind: Any, rows: int = 4096) -> np.ndarray:
    """fp32 -> the file's bytes, encoded by the gguf package, some rows at a time."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import quantize

    if kind == GGMLQuantizationType.F32:
        return t.numpy()
    return np.concatenate([quantize(part.numpy(), kind).view(np.uint8) for part in t.split(rows)])


ROUNDS = 1000  # the most rounds; llama-bench is killed when no more are needed
DELAY = 2  # seconds that it sleeps before a measurement, in which it is stopped


class LlamaCpp(Run):
    opening = "writing a GGUF and filling llama.cpp's cache"

    def __init__(self, work: Work, program: str, threads: int):
        self.work, self.program, self.threads = work, program, threads or torch.get_num_threads()
        self.name, self.info = f"llama.cpp {kind_of(work.model)}", {}
        self.folder: tempfile.TemporaryDirectory | None = None
        self.decoding: subprocess.Popen[str] | None = None

    def open(self) -> None:
        w = self.work
        if w.batch != 1:
            raise InputError("llama-bench decodes one sequence: use --batch 1")
        self.folder = tempfile.TemporaryDirectory(prefix="kv-fast-")
        self.said = Path(self.folder.name) / "stderr"
        if own := own_file(w.model):
            self.file = own.path
        else:
            self.file = Path(self.folder.name) / "model.gguf"
            with torch.inference_mode():
                write_gguf(w.model, self.file)
        self.info = dict(gguf_bytes=self.file.stat().st_size)
        # measurements at one depth share the filled cache. The process has its own group, which the kernel ends if it
        # is stopped when we are killed
        new = ["1", *[str(w.new)] * ROUNDS]
        self.decoding = self._start("-p", "0", "-n", ",".join(new), "-d", str(w.length), "--delay", str(DELAY))
        self._next()

    def __call__(self) -> dict[str, float]:
        assert self.decoding is not None
        os.killpg(self.decoding.pid, signal.SIGCONT)
        times = dict(step=self._next() / self.work.new)
        if not self.work.synthetic:
            program = self._start("-p", str(self.work.length), "-n", "0")
            try:
                times["prefill"] = self._seconds(program)
            finally:
                end(program)
        return times

    def _start(self, *what: str) -> subprocess.Popen[str]:
        cuda = self.work.device.type == "cuda"
        # llama-bench has no fp32 cache: if ours is fp32, its cache is fp16, half the bytes, which favours it
        fa, kv = ("on", "f16") if cuda else ("off", "f16" if self.work.kv_dtype == torch.float32 else "bf16")
        command = [self.program, "-m", str(self.file), "-t", str(self.threads), "-r", "1", "-o", "jsonl", "-fa", fa,
                   "-ctk", kv, "-ctv", kv, "-ngl", "99" if cuda else "0", *what]  # fmt: skip
        with open(self.said, "w") as said:
            return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True, process_group=0)

    def _next(self) -> float:
        """Seconds of the next measurement of the decoding process, which is stopped afterwards."""
        assert self.decoding is not None
        seconds = self._seconds(self.decoding)
        os.killpg(self.decoding.pid, signal.SIGSTOP)
        return seconds

    def _seconds(self, program: subprocess.Popen[str]) -> float:
        """Seconds by the program's next line. Raises RuntimeError if it has ended instead."""
        assert program.stdout is not None
        line = program.stdout.readline()
        if not line.strip():
            said = self.said.read_text().strip().splitlines()
            raise RuntimeError(f"llama-bench ended: {said[-1] if said else f'without a word, {program.wait()}'}")
        row = json.loads(line)
        self.info |= dict(build=row["build_commit"], processor=row["cpu_info"],
                          flash_attention=row.get("flash_attn"), cache=row.get("type_k"))  # fmt: skip
        return row["samples_ns"][0] / 1e9

    def close(self) -> None:
        if self.decoding is not None:
            end(self.decoding)
            self.decoding = None
        if self.folder is not None:
            self.folder.cleanup()
            self.folder = None


def end(program: subprocess.Popen[str]) -> None:
    """Kills the program, whether it runs, is stopped or has ended."""
    assert program.stdout is not None
    program.kill()
    program.stdout.close()
    program.wait()


def check_program(peer: str, path: str) -> None:
    """Raises InputError if path is not a program."""
    if not (Path(path).is_file() and os.access(path, os.X_OK)):
        raise InputError(f"--peer {peer}: {path} is not a program: give the path of llama-bench (see --help)")
