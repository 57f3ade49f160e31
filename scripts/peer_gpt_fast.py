"""The other side of `bench_generate.py --peer gpt-fast:PATH`: gpt-fast's own decode step, in a process of its own.

    python scripts/peer_gpt_fast.py PATH '{"model": {"n_layer": 2, ...}, "batch": 1, "length": 512, "new": 64, ...}'

Imports model.py and generate.py of the checkout PATH, which have the names of ours, as they are: shapes as ours, random
weights, its `setup_caches` filled with random keys and values, its `decode_one_token` compiled as its own main does it
(reduce-overhead, fullgraph), its settings of the compiler. Prints one JSON line when it is ready, then one for every
line it reads: seconds per step. The block mask is made once, outside the time (gpt-fast itself makes it inside).
"""

from __future__ import annotations

import importlib
import json
import sys
import time


def main(path: str, setup: dict) -> None:
    sys.path.insert(0, path)
    import torch

    if setup["threads"]:
        torch.set_num_threads(setup["threads"])
    peer, shapes = importlib.import_module("generate"), importlib.import_module("model")  # gpt-fast's, not ours
    device, dtype = setup["device"], getattr(torch, setup["dtype"])
    batch, length, new = setup["batch"], setup["length"], setup["new"]
    with torch.device("meta"):
        model = shapes.Transformer(shapes.ModelArgs(**setup["model"])).to(dtype)
    model = model.to_empty(device=device).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.02) if p.dim() == 2 else p.fill_(1.0)
        with torch.device(device):
            model.setup_caches(max_batch_size=batch, max_seq_length=length + new)
        step = torch.compile(peer.decode_one_token, mode="reduce-overhead", fullgraph=True)
        size = model.max_seq_length
        mask = peer.create_block_mask(peer.causal_mask, 1, 1, size, size, device=device)

    def wait() -> None:
        if device != "cpu":
            torch.cuda.synchronize()

    @torch.no_grad()
    def run(n: int) -> float:
        """Seconds per step of n steps after `length` tokens."""
        for block in model.layers:
            block.attention.kv_cache.k_cache.normal_()
            block.attention.kv_cache.v_cache.normal_()
        token = torch.ones(batch, 1, dtype=torch.int, device=device)
        pos = torch.tensor([length], dtype=torch.int, device=device)
        wait()
        start = time.perf_counter()
        for _ in range(n):
            token = step(model, token, pos, mask, temperature=0.0)[0].clone()
            pos += 1
        wait()
        return (time.perf_counter() - start) / n

    ready: dict = dict(compiled=True)
    try:
        run(min(4, new))
    except Exception as e:
        if device != "cpu":
            raise
        # inductor's flex_attention for the CPU (torch 2.13) takes no query that is a view, and gpt-fast's is one
        step, ready = peer.decode_one_token, dict(compiled=False, why=f"{type(e).__name__} while compiling")
        run(min(4, new))
    print(json.dumps(ready), flush=True)
    for _ in sys.stdin:
        print(json.dumps(dict(seconds_per_step=run(new))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
