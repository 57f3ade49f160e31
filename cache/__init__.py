"""What KV-cache methods share: the contract, archetypes, stores of tokens, names and knobs, and calibration."""
