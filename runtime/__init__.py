"""The machine: errors, devices and memory, ranks, and text that is on every machine. Imports nothing of ours."""
