"""Train draft models for speculative decoding, and prove them by decoding with them."""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdistill.api import *

__version__ = "0.2.0"

# The Python interface: names of specdistill/api.py, which is imported, and torch with it, when the
# first of them is used.
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

# Threads that wait for one another spin, and where another process is busy they keep the core that
# the awaited thread needs: a step of a small model then takes fifty times as long and more. So they
# spin briefly, which a quiet machine hardly notices. libgomp reads this when torch loads; a user's
# own settings stand, and those of a vLLM that loads our plugin.
if "OMP_WAIT_POLICY" not in os.environ and "vllm" not in sys.modules:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("specdistill.api"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
