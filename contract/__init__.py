"""The contract of a KV-cache method (cache/base.py) as checks that drive the real model: `python -m contract FILE`."""
