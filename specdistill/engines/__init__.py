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


def exporting_engines() -> list[str]:
    """Engines that drafts are exported for."""
    return [name for name, engine in ENGINES.items() if engine.layouts]


def serving_engines() -> list[str]:
    """Engines whose running servers can be measured."""
    return [name for name, engine in ENGINES.items() if engine.client]


def checked_engines() -> list[str]:
    """Engines whose loaders the doctor checks a draft against."""
    return [name for name, engine in ENGINES.items() if engine.loaders]


def callable_engines() -> list[str]:
    """Engines whose Python class drafts are compared in."""
    return [name for name, engine in ENGINES.items() if engine.plain_options]
