"""KV-cache methods, one idea per file: `mine.py` with one subclass of KVMethod is `--method mine`.

Folders named in KV_FAST_METHODS (separated like PATH) belong to this package too: their files are methods, and import
each other and these by `from kv_methods.name import ...`. A file's PRESETS, {name: knobs}, are names of methods, too.
"""

from cache.grammar import own_folders

__path__ += [str(folder) for folder in own_folders() if str(folder) not in __path__]
