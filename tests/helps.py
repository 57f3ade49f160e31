"""What `python SCRIPT --help` prints, of many scripts in one process: each imports torch, which takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys

RUN = """
import contextlib, io, json, os, runpy, sys
out = {}
for script in sys.argv[1:]:
    sys.argv, text = [script, "--help"], io.StringIO()
    sys.path[0] = os.path.dirname(script)  # as python itself does
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        runpy.run_path(script, run_name="__main__")
    out[script] = text.getvalue()
print(json.dumps(out))
"""


def helps(scripts: list[str]) -> dict[str, str]:
    """Script -> its help. Run from another folder: a script finds the project by itself."""
    done = subprocess.run([sys.executable, "-c", RUN, *scripts], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
