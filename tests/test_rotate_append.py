"""One token's rotation and append in whole models; the operators are in test_operators.py."""

from __future__ import annotations

import pytest
import torch

from scripts.contract.harness import prompt, run, tiny

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.slow
def test_a_subclass_with_an_append_of_its_own_still_gets_the_rotated_key(monkeypatch):
    """quest's bounds are of rotated keys; full never calls `append`. Both give what torch gives."""
    for name in ("full", "quest"):
        out = []
        for backend in ("torch", "triton"):
            monkeypatch.setenv("KV_FAST_BACKEND", backend)
            model = tiny(2, 32)
            model.setup_cache(name, 2, 40)
            model = model.to(DEVICE)
            calls = []
            for method in model.cache:
                append = method.append
                monkeypatch.setattr(
                    method, "append", lambda *args, f=append, calls=calls: (calls.append(1), f(*args))[1]
                )
            out.append(run(model, [prompt(9), prompt(5)], 3))
            assert bool(calls) == (name == "quest")
        (a, _), (b, _) = (o[:2] for o in out)
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
