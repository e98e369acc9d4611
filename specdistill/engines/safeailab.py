"""SafeAILab/EAGLE, read in the sources of the release with EAGLE-3.

It reads the target's embedding itself, but not for an EAGLE-1 head, nor for an EAGLE-3 head whose config has a `target_hidden_size`. `fc`
of EAGLE-1 always has a bias.
"""

import shlex

from specdistill.engines import limits
from specdistill.engines.engine import Engine, Layout, Served, eagle3_config


def serve_command(served: Served) -> str:
    names = f"base_model_path={served.target or 'TARGET'!r}, ea_model_path={str(served.output)!r}"
    code = f"EaModel.from_pretrained(use_eagle3={served.method == 'eagle3'}, {names}, depth={served.num_tokens})"
    return f"python -c {shlex.quote(f'from eagle.model.ea_model import EaModel; model = {code}')}"


SAFEAILAB = Engine(
    name="safeailab",
    title="SafeAILab/EAGLE",
    versions="the release with EAGLE-3",
    layouts={
        "eagle3": Layout(
            lambda export: eagle3_config(export, architecture="LlamaForCausalLM"),
            limits=(
                limits.NORM_BEFORE_RESIDUAL,
                limits.FC_NORM,
                limits.NORM_OUTPUT,
                limits.NORM_BEFORE_FC,
                limits.SEVERAL_LAYERS,
                limits.SLIDING_WINDOW,
                limits.OWN_EMBEDDING,
                limits.NOT_THREE_LAYERS_READ,
                limits.CHOSEN_LAYERS_READ,
                limits.LAYERS_OUT_OF_ORDER,
                limits.WIDTH_OF_FC_INPUT,
                limits.SCALED_ROPE,
            ),
        ),
        "eagle": Layout(
            lambda export: {"architectures": ["LlamaForCausalLM"], **export.llama},
            limits=(limits.SLIDING_WINDOW, limits.WIDTH_OF_HEADS, limits.SCALED_ROPE),
            needs_target="SafeAILab's heads repeat its embedding",
            fc_bias=True,
        ),
    },
    serve_command=serve_command,
    counters="`eagenerate(…, log=True)` gives new tokens and rounds of drafted trees.",
)
