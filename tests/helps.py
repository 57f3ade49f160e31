"""What --help of many scripts prints, in one process: each imports torch, which takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys

from runtime.machine import ROOT

RUN = """
import contextlib, io, json, os, runpy, sys, warnings
out = {}
warnings.simplefilter("ignore", RuntimeWarning)  # one script may have imported another that runs later
for script in sys.argv[1:]:
    sys.argv, text = [script, "--help"], io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        if os.path.isabs(script):
            sys.path[0] = os.path.dirname(script)  # as python itself does
            runpy.run_path(script, run_name="__main__")
        else:
            sys.path[0] = os.getcwd()
            runpy.run_module(script, run_name="__main__", alter_sys=True)
    out[script] = text.getvalue()
print(json.dumps(out))
"""


def helps(scripts: list[str]) -> dict[str, str]:
    """Script -> its help: of a module by its name, or of a file, which is run from another folder."""
    cwd = "/" if scripts[0].startswith("/") else ROOT
    done = subprocess.run([sys.executable, "-c", RUN, *scripts], capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
