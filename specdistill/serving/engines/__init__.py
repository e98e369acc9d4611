"""The inference engines by name. A new engine is a file and a row of `ENGINES`.

The command line asks for the names, so nothing here imports torch, and other modules that are slow
to import are imported where they are used.
"""

from specdistill.serving.engines.engine import Engine
from specdistill.serving.engines.llama_cpp import GGUF, LLAMA_CPP
from specdistill.serving.engines.sglang import SGLANG
from specdistill.serving.engines.vllm import SPECULATORS, VLLM

# TensorRT-LLM's PyTorch backend. The facts were read in modeling_speculative.py and
# speculative/eagle3.py. Drafts are checked for it, not exported. It reads the tensor names that
# ModelOpt writes (`layers.0.*`, without t2d and embedding) and those of SpecForge. The layers that
# a head reads are given by a separate argument. A missing tensor is an error, an unknown one is
# not.
TENSORRT_LLM = Engine(
    name="trtllm",
    title="TensorRT-LLM",
    versions="PyTorch backend at 00679c6 (2026)",
    loader_version="PyTorch backend at 00679c6",
)
ENGINES: dict[str, Engine] = {
    engine.name: engine for engine in (VLLM, SGLANG, SPECULATORS, GGUF, LLAMA_CPP, TENSORRT_LLM)
}


def list_engines_with(part: str) -> list[str]:
    """Return the names of the engines that support a feature, given by a field of `Engine`.

    Args:
        part: a field of `Engine`: `serve_command` (drafts are exported for the engine),
            `loader_version` (`specdistill doctor` checks drafts against the engine's loading
            code), `client` (servers of the engine can be measured) or `program` (specdistill can
            start a server of the engine).
    """
    return [name for name, engine in ENGINES.items() if getattr(engine, part)]
