"""A model whose weights are allocated and not yet filled."""

from __future__ import annotations

import torch

from kernels.native import OnePiece, in_huge_pages
from model import ModelArgs, Transformer
from runtime.machine import require_memory
from weights import Choose, Linear, PackedEmbedding, PackedLinear, pack
from weights.codes import BF16


def empty_transformer(
    args: ModelArgs, device: str | torch.device, dtype: torch.dtype, choose: Choose | None = None
) -> Transformer:
    """A model with its weights allocated on the device but not filled. choose: the format of each matrix. Raises
    InputError if they do not fit in memory."""
    device, meta = torch.device(device), torch.device("meta")
    with meta:
        model = Transformer(args).to(dtype)
    if choose:
        pack(model, choose, meta)
        # with several ranks the head is not tied, but the embedding keeps the format it has in one process
        rows = choose("output" if args.tie_embeddings else "tok_embeddings", 0, args.dim)
        if model.tied:
            if isinstance(model.output, PackedLinear):
                model.tok_embeddings = PackedEmbedding(model.output, dtype, tied=True)
        elif rows == BF16:
            model.tok_embeddings = model.tok_embeddings.to(torch.bfloat16)
        elif rows:
            matrix = PackedLinear(args.dim, args.vocab_size, False, rows, meta)
            model.tok_embeddings = PackedEmbedding(matrix, dtype, tied=False)
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}  # counts a tied embedding once
    need = sum(t.numel() * t.element_size() for t in tensors.values())
    require_memory(need, device, "the model", "use --weights int4 or --dtype bf16, a smaller model, or a device with "
                   "more memory")  # fmt: skip
    if device.type == "cpu":  # weights that every step reads, laid out in the order of reading
        layers = [t for block in model.layers for t in (*block.parameters(), *block.buffers())]
        model.layers._apply(OnePiece(t.nbytes for t in layers).take)
    for name, part in model.named_children():
        if device.type != "cpu" or name != "layers":
            # as to_empty does, which imports sympy for tensors of `meta`: a second of every start
            part._apply(lambda t: torch.empty(t.shape, dtype=t.dtype, device=device))
    if model.tied and isinstance(model.output, Linear):  # that unties them
        model.output.weight = model.tok_embeddings.weight
    for t in (*model.parameters(), *model.buffers()):
        in_huge_pages(t.data)
    return model
