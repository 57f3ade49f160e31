"""One file per analysis: what it measures in a layer, and its table."""

from scripts.eval.analyses import bases, heads, shift

ANALYSES = {"bases": bases.ANALYSIS, "shift": shift.ANALYSIS, "heads": heads.ANALYSIS}
