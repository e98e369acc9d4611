"""Train draft models for speculative decoding, and prove them by decoding with them."""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdistill.api import *

__version__ = "0.2.0"

# The Python interface. These names are defined in specdistill/api.py, which imports torch. So that
# `import specdistill` is fast, the module is only imported when one of the names is used.
__all__ = [
    "Draft",
    "DraftConfig",
    "DraftTrainer",
    "Report",
    "acquire",
    "compare",
    "generate",
    "judge",
]
__all__ += ["load_draft", "load_target", "measure", "publish", "train"]

# libgomp, the OpenMP library of torch on Linux, lets a waiting thread spin for long. If another
# process is busy too, the spinning thread keeps the core that the awaited thread needs, and a step
# of a small model takes fifty times as long or more. With this setting threads spin only briefly,
# which costs little on a quiet machine. libgomp reads it when torch is loaded. Settings of the user
# are kept, and so are those of vLLM when it loads specdistill's plugin.
if "OMP_WAIT_POLICY" not in os.environ and "vllm" not in sys.modules:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def __getattr__(name: str) -> Any:
    """Import a name of the Python interface when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("specdistill.api"), name)


def __dir__() -> list[str]:
    """List the names of the Python interface too, although they may not be imported yet."""
    return [*globals(), *__all__]
