"""SafeAILab/EAGLE, read in the sources of the release with EAGLE-3.

It reads the target's embedding itself, but not for an EAGLE-1 head, nor for an EAGLE-3 head whose config has a `target_hidden_size`. `fc`
of EAGLE-1 always has a bias.
"""

import shlex

from specdistill.engines.engine import Engine, Served


def serve_command(served: Served) -> str:
    target = (
        f"snapshot_download({served.target!r}, revision={served.revision!r})" if served.revision else repr(served.target_name)
    )
    names = f"base_model_path={target}, ea_model_path={str(served.output)!r}"
    fetch = "from huggingface_hub import snapshot_download; " if served.revision else ""
    code = f"EaModel.from_pretrained({served.serving.name}, {names}, depth={served.num_tokens})"
    return f"python -c {shlex.quote(f'{fetch}from eagle.model.ea_model import EaModel; model = {code}')}"


SAFEAILAB = Engine(
    name="safeailab",
    title="SafeAILab/EAGLE",
    versions="the release with EAGLE-3",
    serve_command=serve_command,
    counters="`eagenerate(…, log=True)` gives new tokens and rounds of drafted trees.",
)
