"""The other side of `bench_generate.py --peer gpt-fast:PATH`: gpt-fast's own decode step, in its own process.

    PYTHONPATH=PATH python scripts/bench/peer_decode.py '{"model": {...}, "batch": 1, "length": 512, ...}'

Imports model.py and generate.py of the checkout, unchanged (ours have the same names, hence the process). The shapes
are ours, the weights random; `setup_caches` is filled with random keys and values, and `decode_one_token` is compiled
as in its main, fullgraph and reduce-overhead. The block mask is made once, outside the timed part (gpt-fast itself
makes it inside). Prints one JSON line when it is ready, then one with the seconds per step for every line it reads.
"""

from __future__ import annotations

import importlib
import json
import sys
import time


def main(setup: dict) -> None:
    import torch

    torch.set_grad_enabled(False)
    if setup["threads"]:
        torch.set_num_threads(setup["threads"])
    peer, shapes = importlib.import_module("generate"), importlib.import_module("model")  # the peer's, not ours
    device, batch = setup["device"], setup["batch"]
    with torch.device("meta"):
        model = shapes.Transformer(shapes.ModelArgs(**setup["model"])).to(getattr(torch, setup["dtype"]))
    model = model.to_empty(device=device).eval()
    for p in model.parameters():
        p.normal_(0, 0.02) if p.dim() == 2 else p.fill_(1.0)
    with torch.device(device):
        model.setup_caches(max_batch_size=batch, max_seq_length=setup["length"] + setup["new"])
    size = model.max_seq_length
    mask = peer.create_block_mask(peer.causal_mask, 1, 1, size, size, device=device)
    step = torch.compile(peer.decode_one_token, fullgraph=True, mode="reduce-overhead")

    def wait() -> None:
        if device != "cpu":
            torch.cuda.synchronize()

    def run(n: int) -> float:
        """Seconds per step of n steps after `length` tokens."""
        for block in model.layers:
            for name, buffer in block.attention.kv_cache.named_buffers():
                if name.startswith(("k_", "v_")):
                    buffer.normal_()
        token = torch.ones(batch, 1, dtype=torch.int, device=device)
        pos = torch.tensor([setup["length"]], dtype=torch.int, device=device)
        wait()
        start = time.perf_counter()
        for _ in range(n):
            token = step(model, token, pos, mask, temperature=0.0)[0].clone()
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
        step, ready = peer.decode_one_token, dict(compiled=False, why=f"{type(e).__name__} while compiling")
        run(min(4, setup["new"]))
    print(json.dumps(ready), flush=True)
    for _ in sys.stdin:
        print(json.dumps(dict(seconds_per_step=run(setup["new"]))), flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print("error: bench_generate --peer gpt-fast:PATH starts this file", file=sys.stderr)
        sys.exit(2)
    main(json.loads(sys.argv[1]))
