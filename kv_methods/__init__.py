"""KV-cache methods, one idea a file: `mine.py` holding one subclass of KVMethod is `--method mine`.

Folders named in KV_FAST_METHODS (separated like PATH) belong to this package too: their files are methods, and import
each other and these as `from kv_methods.name import ...`. A method's PRESETS, {name: knobs}, are names like its own.
"""

from runtime import own_folders

__path__ += [str(folder) for folder in own_folders() if str(folder) not in __path__]
