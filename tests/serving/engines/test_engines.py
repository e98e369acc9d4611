"""The table of engines: what each engine offers; reading their names loads nothing heavy."""

import subprocess
import sys

import pytest

from specdistill.serving.engines import list_engines_with


def test_engines_are_offered_where_they_can_serve() -> None:
    assert list_engines_with("serve_command") == ["vllm", "sglang", "speculators", "gguf"]
    assert list_engines_with("loader_version") == ["vllm", "sglang", "trtllm"]
    assert (
        list_engines_with("client")
        == list_engines_with("program")
        == ["vllm", "sglang", "llama.cpp"]
    )


@pytest.mark.long  # starts an interpreter; `make lint` also keeps torch and transformers out
def test_the_table_is_read_without_torch_or_http() -> None:
    heavy = "{'torch', 'transformers', 'httpx2'}"
    code = f"import sys, specdistill.serving.engines; print(sorted({heavy} & sys.modules.keys()))"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )
