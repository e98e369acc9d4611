"""speculators, read in the sources of 0.9. Its folder holds embedding and head and names the target, so that vLLM serves it alone."""

from specdistill.engines.engine import Engine, Served
from specdistill.engines.vllm import VLLM

VERSION = "0.9.0"


def serve_command(served: Served) -> str:
    return f"vllm serve {served.quoted_output}   # names its target, and {served.num_tokens} draft tokens"


SPECULATORS = Engine(
    name="speculators",
    title="speculators, served by vLLM",
    versions=f"speculators 0.9; vLLM {VLLM.versions}",
    serve_command=serve_command,
    counters=VLLM.counters,
)
