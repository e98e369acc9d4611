"""Names and shapes of EAGLE heads for the tiny target (64 wide, 260 tokens), written by hand.

They are those that engines and other projects use.
"""

from pathlib import Path

from specdistill.targets.frozen import FrozenTarget
from tests.tiny import write_target

NUM_LAYERS = 8  # layers of the target, whose default auxiliary layers are 2, 4 and 5
Shapes = dict[str, tuple[int, ...]]
EAGLE: Shapes = {
    "fc.weight": (64, 128),
    "layers.0.self_attn.q_proj.weight": (64, 64),
    "layers.0.self_attn.k_proj.weight": (32, 64),
    "layers.0.self_attn.v_proj.weight": (32, 64),
    "layers.0.self_attn.o_proj.weight": (64, 64),
    "layers.0.post_attention_layernorm.weight": (64,),
    "layers.0.mlp.gate_proj.weight": (128, 64),
    "layers.0.mlp.up_proj.weight": (128, 64),
    "layers.0.mlp.down_proj.weight": (64, 128),
}


def saved_target(folder: Path) -> FrozenTarget:
    """Save the tiny target to a folder and return it, loaded from there."""
    write_target(folder, num_layers=NUM_LAYERS)
    return FrozenTarget.load(str(folder))


def eagle3(first: str) -> Shapes:
    """Return the shapes of a head with 25 tokens that reads three layers of width 64.

    `first` is the prefix of its own first layer.
    """
    return {
        "fc.weight": (64, 192),
        f"{first}self_attn.q_proj.weight": (64, 128),
        f"{first}self_attn.k_proj.weight": (32, 128),
        f"{first}self_attn.v_proj.weight": (32, 128),
        f"{first}self_attn.o_proj.weight": (64, 64),
        f"{first}hidden_norm.weight": (64,),
        f"{first}input_layernorm.weight": (64,),
        f"{first}post_attention_layernorm.weight": (64,),
        f"{first}mlp.gate_proj.weight": (128, 64),
        f"{first}mlp.up_proj.weight": (128, 64),
        f"{first}mlp.down_proj.weight": (64, 128),
        "norm.weight": (64,),
        "lm_head.weight": (25, 64),
        "d2t": (25,),
        "t2d": (260,),
    }
