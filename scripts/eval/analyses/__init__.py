"""One file per analysis: what it measures in a layer, and its table."""

from scripts.eval.analyses import adjacent, bases, channels, heads, latent_scores, shift, signs, spectra

ANALYSES = {
    "spectra": spectra.ANALYSIS,
    "overlap": latent_scores.OVERLAP,
    "recall": latent_scores.RECALL,
    "bases": bases.ANALYSIS,
    "channels": channels.ANALYSIS,
    "adjacent": adjacent.ANALYSIS,
    "shift": shift.ANALYSIS,
    "heads": heads.ANALYSIS,
    "signs": signs.ANALYSIS,
}
