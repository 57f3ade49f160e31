"""The other side of `bench_generate.py --peer KIND:PATH`: a peer's own decode step, in its own process.

    PYTHONPATH=FOLDER python scripts/bench/peer_decode.py gpt-fast '{"model": {...}, "batch": 1, "length": 512, ...}'

Imports model.py and generate.py of FOLDER, in a checkout, unchanged (ours have the same names, hence the process). The
shapes are ours, the weights random; the peer's `setup_caches` is filled with random keys and values, and its step is
compiled as in its own main, with its compiler settings. Prints one JSON line when it is ready, then one with the
seconds per step for every line it reads.

gpt-fast       `decode_one_token`, fullgraph and reduce-overhead. The block mask is made once, outside the timed part
               (gpt-fast itself makes it inside).
double-sparse  the published Double Sparsity on gpt-fast: `sparse_decode_one_token` of models/generate.py, fullgraph.
               Its kernel holds all selected tokens at once, so their number is a power of two: the largest up to 1/16
               of the tokens (1024 and more take minutes to compile). The label channels are random. It needs bf16 and
               no grouped queries.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

CHANNELS = 32  # the published number of label channels


def build(shapes: Any, setup: dict, **more: int) -> Any:
    """The peer's model with random weights and empty caches."""
    import torch

    with torch.device("meta"):
        model = shapes.Transformer(shapes.ModelArgs(**setup["model"], **more)).to(getattr(torch, setup["dtype"]))
    model = model.to_empty(device=setup["device"]).eval()
    for p in model.parameters():
        p.normal_(0, 0.02) if p.dim() == 2 else p.fill_(1.0)
    with torch.device(setup["device"]):
        model.setup_caches(max_batch_size=setup["batch"], max_seq_length=setup["length"] + setup["new"])
    return model


def gpt_fast(peer: Any, shapes: Any, setup: dict) -> tuple[Any, Callable, dict, tuple]:
    """Model, step, options to compile the step, and its arguments after model, tokens and position."""
    model = build(shapes, setup)
    size = model.max_seq_length
    mask = peer.create_block_mask(peer.causal_mask, 1, 1, size, size, device=setup["device"])
    return model, peer.decode_one_token, dict(mode="reduce-overhead"), (mask,)


def double_sparse(peer: Any, shapes: Any, setup: dict) -> tuple[Any, Callable, dict, tuple]:
    import torch

    heavy = 1 << max(4, (setup["length"] // 16).bit_length() - 1)
    model = build(shapes, setup, heavy_const=heavy, heavy_channel_num=CHANNELS)
    for block in model.layers:
        a = block.attention
        order = torch.rand(a.n_head, a.head_dim, device=setup["device"]).argsort(-1)
        a.sorted_channel = order[:, :CHANNELS].contiguous()
    return model, peer.sparse_decode_one_token, {}, ()


def main(kind: str, setup: dict) -> None:
    import torch

    torch.set_grad_enabled(False)
    if setup["threads"]:
        torch.set_num_threads(setup["threads"])
    peer, shapes = importlib.import_module("generate"), importlib.import_module("model")  # the peer's, not ours
    make = gpt_fast if kind == "gpt-fast" else double_sparse
    model, plain, options, extra = make(peer, shapes, setup)
    step = torch.compile(plain, fullgraph=True, **options)
    device, batch = setup["device"], setup["batch"]

    def wait() -> None:
        if device != "cpu":
            torch.cuda.synchronize()

    def run(n: int) -> float:
        """Seconds per step of n steps after `length` tokens."""
        for block in model.layers:
            for name, buffer in block.attention.kv_cache.named_buffers():
                if name.startswith(("k_", "v_")):  # caches, and the labels of keys
                    buffer.normal_()
        token = torch.ones(batch, 1, dtype=torch.int, device=device)
        pos = torch.tensor([setup["length"]], dtype=torch.int, device=device)
        wait()
        start = time.perf_counter()
        for _ in range(n):
            token = step(model, token, pos, *extra, temperature=0.0)[0].clone()
            pos += 1
        wait()
        return (time.perf_counter() - start) / n

    ready: dict = dict(compiled=True)
    try:
        run(min(4, setup["new"]))
    except Exception as e:
        if device != "cpu":
            raise
        # inductor's flex_attention for the CPU (torch 2.13) accepts no query that is a view, but gpt-fast's is one
        step, ready = plain, dict(compiled=False, why=f"{type(e).__name__} while compiling")
        run(min(4, setup["new"]))
    print(json.dumps(ready), flush=True)
    for _ in sys.stdin:
        print(json.dumps(dict(seconds_per_step=run(setup["new"]))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
