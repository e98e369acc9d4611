"""speculators, read in the sources of 0.9. Its folder holds embedding and head and names the target, so that vLLM serves it alone."""

from typing import Any

from specdistill.engines import limits
from specdistill.engines.engine import NORMS, Engine, HeadExport, Layout, Served
from specdistill.engines.limits import AUX_LAYERS
from specdistill.engines.vllm import VLLM

VERSION = "0.9.0"


def eagle3(export: HeadExport) -> dict[str, Any]:
    """The config.json of `Eagle3Speculator`, from which vLLM takes the target and how many tokens to draft."""
    head, target, num = export.head, export.target, export.num_speculative_tokens
    proposal = {"proposal_type": "greedy", "speculative_tokens": num, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    # vLLM carries over what stands in there, and counts three states otherwise, whatever layers are listed.
    counted = {} if len(head.aux_layers) == 3 else {"num_aux_hidden_states": len(head.aux_layers)}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target.name, "architectures": target.config.get("architectures") or []},
        },
        "transformer_layer_config": {**export.llama, **counted},
        "draft_vocab_size": head.draft_vocab_size,
        "target_hidden_size": None if head.hidden_size == head.target_hidden_size else head.target_hidden_size,
        "norm_before_residual": head.norm_before_residual,
        **{norm: getattr(head, norm) for norm in NORMS},
        AUX_LAYERS: list(head.aux_layers),
        "embed_requires_grad": head.owns_embedding,
        "tie_word_embeddings": False,
        "dtype": export.llama["torch_dtype"],
    }


def serve_command(served: Served) -> str:
    return f"vllm serve {served.quoted_output}   # names its target, and {served.num_tokens} draft tokens"


SPECULATORS = Engine(
    name="speculators",
    title="speculators, served by vLLM",
    versions=f"speculators 0.9; vLLM {VLLM.versions}",
    layouts={
        "eagle3": Layout(
            eagle3,
            limits=(limits.LAYERS_OUT_OF_ORDER,),
            first_layer="layers.0.",
            needs_target="speculators' config.json names it",
        )
    },
    serve_command=serve_command,
    counters=VLLM.counters,
)
