"""The inference engines. A new one is a file and a row of `ENGINES`.

Nothing here imports torch, and what is slow to import is imported where it is used: the command line asks for the names.
"""

from specdistill.engines.engine import Engine
from specdistill.engines.llama_cpp import GGUF, LLAMA_CPP
from specdistill.engines.sglang import SGLANG
from specdistill.engines.vllm import SPECULATORS, VLLM

# Its PyTorch backend: modeling_speculative.py, speculative/eagle3.py. Drafts are checked, not exported. It reads what ModelOpt writes:
# `layers.0.*`, without t2d and embedding; SpecForge's names, too. The layers that a head reads are an argument of its own. A tensor that is
# missing is an error, one that is unknown is not.
TENSORRT_LLM = Engine(
    name="trtllm",
    title="TensorRT-LLM",
    versions="PyTorch backend at 00679c6 (2026)",
    loader_version="PyTorch backend at 00679c6",
)
ENGINES: dict[str, Engine] = {
    engine.name: engine for engine in (VLLM, SGLANG, SPECULATORS, GGUF, LLAMA_CPP, TENSORRT_LLM)
}


def engines_with(part: str) -> list[str]:
    """Engines that have a `serve_command` (drafts are exported for them), a `loader_version` (the doctor checks drafts against their
    loaders), a `client` (their servers are measured) or a `program` (which is started here).
    """
    return [name for name, engine in ENGINES.items() if getattr(engine, part)]
