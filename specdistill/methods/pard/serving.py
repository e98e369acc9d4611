"""How engines are given draft models that draft in one pass: vLLM takes the mask, `pard_token`, from config.json. No torch.

Other engines would draft with them token by token, which they have not learned.
"""

from specdistill.engines.engine import Layout, Serving

SERVING = {
    "vllm": Serving("draft_model", Layout(), options=lambda config: {"parallel_drafting": True})
}
