"""The inference engines. Each has a file of its own; a new one is that file and a row of `ENGINES`.

Nothing here imports torch, and what is slow to import is imported where it is used: the command line asks for the names.
"""

from specdistill.engines.engine import Engine
from specdistill.engines.llama_cpp import LLAMA_CPP
from specdistill.engines.safeailab import SAFEAILAB
from specdistill.engines.sglang import SGLANG
from specdistill.engines.speculators import SPECULATORS
from specdistill.engines.tensorrt_llm import TENSORRT_LLM
from specdistill.engines.vllm import VLLM

ENGINES: dict[str, Engine] = {engine.name: engine for engine in (VLLM, SGLANG, SPECULATORS, SAFEAILAB, LLAMA_CPP, TENSORRT_LLM)}


def engines_with(part: str) -> list[str]:
    """Engines that have a `serve_command` (drafts are exported for them), a `loader_version` (the doctor checks drafts against their
    loaders), a `client` (their servers are measured) or a `program` (which is started here).
    """
    return [name for name, engine in ENGINES.items() if getattr(engine, part)]
