"""Draft models that draft in one pass, in engines. This file does not import torch.

vLLM takes the mask, `pard_token`, from config.json. Other engines would draft token by token, which
such models have not learned.
"""

from specdistill.serving.engines.engine import Layout, Serving

SERVING = {
    "vllm": Serving("draft_model", Layout(), options=lambda config: {"parallel_drafting": True})
}
