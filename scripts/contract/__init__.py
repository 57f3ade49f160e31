"""The contract of a KV-cache method as checks that drive the real model: `python -m scripts.contract FILE`."""
