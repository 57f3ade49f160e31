"""What the kernel report asks for: a file for each of kernels/ that launches Triton kernels, by the same name.

aot(n_head, n_kv_head, head_dim) lists its kernels as a model of that shape launches them, the main one first, to be
compiled without a GPU. account(n_head, n_kv_head, head_dim, batch, length), where there is one, says of each operation
that one decode step of a layer does with them dict(op=its name, bytes=read and written in bf16, launches=kernels), from
sizes alone; and bandwidth= bytes/s where they do not go through the GPU's memory.
"""

from __future__ import annotations

from typing import Any

# (name, function, argument -> type or "constexpr", constexprs, options)
Aot = tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]
