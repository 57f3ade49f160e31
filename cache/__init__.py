"""What all KV-cache methods share: contract, archetypes, names and knobs, calibration, tests of the contract."""
