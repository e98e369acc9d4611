"""TensorRT-LLM's PyTorch backend, read at 00679c6 (2026): modeling_speculative.py, speculative/eagle3.py. Drafts are checked, not exported.

It reads what ModelOpt writes: `layers.0.*`, without t2d and embedding; SpecForge's names, too. The layers that a head reads are an
argument of its own. A tensor that is missing is an error, one that is unknown is not.
"""

from specdistill.engines.engine import Engine

VERSION = "PyTorch backend at 00679c6"
TENSORRT_LLM = Engine(name="trtllm", title="TensorRT-LLM", versions=VERSION, loader_version=VERSION)
