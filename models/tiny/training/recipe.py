"""The shipped model's shape, and the stages of its training."""

from __future__ import annotations

from dataclasses import dataclass

from model import ModelArgs
from models.tiny.training.data import VOCAB

ARGS = ModelArgs(dim=256, n_layer=6, n_head=8, n_kv_head=4, head_dim=64, ffn_dim=512, vocab_size=VOCAB,
                 max_seq_len=8192, norm_eps=1e-5, tie_embeddings=True)  # fmt: skip


@dataclass
class Stage:
    seq_len: int
    batch: int
    tokens: float  # millions
    theta: float
    mix: dict[str, float]
    n_layer: int = 6  # the first n layers are trained; layers added later start as the identity
    answers: float = 1.0  # weight of the answers' loss; text has weight 1
    repeats: float = 0.5  # weight of the repeats' loss
    context: float = 0.0  # weight of an auxiliary loss: the second layer predicts the tokens 1 to 4 back
    until: float = 2.0  # the stage ends early at this accuracy on repeats


def _mix(text: float, rep: float, kv: float, inter: float, hay: float, recall: float = 0) -> dict[str, float]:
    return dict(plain_text=text, repeats=rep, key_values=kv, interleaved=inter, haystack=hay, recall=recall)


SHORT = _mix(0, 0.45, 0.15, 0, 0, recall=0.4)
RECIPES: dict[str, list[Stage]] = {
    "cpu": [
        Stage(64, 64, 4, 1e4, SHORT, n_layer=3, repeats=1, context=0.5, until=0.8),
        Stage(128, 32, 0.8, 1e4, _mix(0.15, 0.2, 0.2, 0.15, 0, recall=0.3), repeats=1, context=0.3),
        Stage(256, 16, 1.25, 1e5, _mix(0.4, 0.2, 0.1, 0.2, 0, recall=0.1), context=0.2),
        Stage(512, 8, 1.2, 5e5, _mix(0.45, 0.15, 0.05, 0.2, 0.1, recall=0.05), context=0.1),
        Stage(1024, 8, 0.9, 5e5, _mix(0.45, 0.15, 0.05, 0.2, 0.15)),
        Stage(2048, 4, 1.3, 5e5, _mix(0.45, 0.15, 0.05, 0.15, 0.2)),
        Stage(4096, 2, 0.6, 5e5, _mix(0.45, 0.15, 0.05, 0.15, 0.2)),
    ],
    "gpu": [
        Stage(64, 128, 20, 1e4, SHORT, n_layer=3, repeats=1, context=0.5, until=0.9),
        Stage(128, 128, 10, 1e4, _mix(0.15, 0.2, 0.2, 0.15, 0, recall=0.3), repeats=1, context=0.3),
        Stage(256, 128, 30, 1e5, _mix(0.4, 0.2, 0.1, 0.2, 0, recall=0.1), context=0.2),
        Stage(512, 64, 60, 5e5, _mix(0.45, 0.15, 0.05, 0.2, 0.1, recall=0.05), context=0.1),
        Stage(1024, 32, 80, 5e5, _mix(0.45, 0.15, 0.05, 0.2, 0.15)),
        Stage(2048, 16, 100, 5e5, _mix(0.45, 0.15, 0.05, 0.15, 0.2)),
        Stage(4096, 8, 60, 5e5, _mix(0.45, 0.15, 0.05, 0.15, 0.2)),
        Stage(8192, 4, 40, 5e5, _mix(0.45, 0.15, 0.05, 0.15, 0.2)),
        Stage(16384, 2, 15, 5e5, _mix(0.45, 0.15, 0.05, 0.15, 0.2)),
    ],
}
