"""Published vocabularies, chat templates and Mistral's tokenizers, which other packages ship. To get them:

    pip download --no-deps --no-binary :all: --no-build-isolation llama-cpp-python    # and unpack it
    pip download --no-deps mistral-common                                            # and unzip it
    KV_FAST_LLAMA_CPP=llama_cpp_python-*/vendor/llama.cpp KV_FAST_MISTRAL=mistral_common/data make test-real

A file that this project does not read is named here with the reason, so that another one is a failure.
"""

import os
import re
from pathlib import Path

import pytest

from tests.audit.real_files import CHECKS, files, refused_or

pytestmark = pytest.mark.real
FOLDERS = {"vocabularies": ("KV_FAST_LLAMA_CPP", "models"), "templates": ("KV_FAST_LLAMA_CPP", "models/templates"),
           "mistral": ("KV_FAST_MISTRAL", ".")}  # fmt: skip
REFUSED = {"bert-bge": "'bert'", "gemma-4": "'gemma4'", "nomic-bert-moe": "'t5'"}  # encoders, and a model of its own


def cases():
    for kind, (variable, folder) in FOLDERS.items():
        if variable not in os.environ:
            skip = pytest.mark.skip(reason=f"set {variable}: the top of this file says how")
            yield pytest.param(kind, Path(variable), marks=skip, id=kind)
        else:
            found = files(kind, Path(os.environ[variable]) / folder)
            assert found, f"{variable}: {os.environ[variable]} holds no {CHECKS[kind][0]} in {folder}"
            for file in found:
                yield pytest.param(kind, file, id=f"{kind}-{file.name}")


@pytest.mark.parametrize(("kind", "file"), list(cases()))
def test_a_published_file(kind, file):
    row = refused_or(CHECKS[kind][1], file)
    name = re.sub("^ggml-vocab-|.gguf$", "", file.name)
    if name in REFUSED:
        assert "is " + REFUSED[name] + ", which is not supported" in row["refused"]
    elif row["exact"] is None:
        assert row["tokens"] > 0 and row["stop_ids"]
    else:
        assert row["exact"] and row.get("told_apart", True), row
