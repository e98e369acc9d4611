"""The table of engines: what each is asked for, and that asking for names loads nothing heavy."""

import subprocess
import sys

import pytest

from specdistill.engines import ENGINES, engines_with


def test_engines_are_offered_where_they_can_serve() -> None:
    assert engines_with("layouts") == ["vllm", "sglang", "speculators", "safeailab", "gguf"]
    assert engines_with("loaders") == ["vllm", "sglang", "trtllm"]
    assert engines_with("client") == engines_with("plain_options") == ["vllm", "sglang"]


@pytest.mark.long  # a fresh interpreter; make lint keeps torch and transformers out
def test_the_table_is_read_without_torch_or_http() -> None:
    heavy = "{'torch', 'transformers', 'requests', 'prometheus_client'}"
    code = f"import sys, specdistill.engines; print(sorted({heavy} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_python_options_of_vllm() -> None:
    vllm = ENGINES["vllm"]
    assert vllm.plain_options is not None
    assert vllm.plain_options("target", "float32", 64) == {
        "model": "target",
        "dtype": "float32",
        "max_model_len": 64,
    }
    eagle3 = {"method": "eagle3", "num_speculative_tokens": 3, "model": "draft"}
    assert vllm.draft_options("eagle3", "draft", 3) == {"speculative_config": eagle3}
    in_target = {"model": "served", "speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}
    assert vllm.draft_options("mtp", "served", 3) == in_target


def test_python_options_of_sglang() -> None:
    sglang = ENGINES["sglang"]
    chain = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
    standalone = {"speculative_algorithm": "STANDALONE", **chain, "speculative_draft_model_path": "draft"}
    assert sglang.draft_options("draft_model", "draft", 3) == standalone
    assert sglang.draft_options("mtp", "served", 3)["model_path"] == "served"
