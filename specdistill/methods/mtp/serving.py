"""Multi-token-prediction layers in engines, which load them from the target's checkpoint.

This file does not import torch.
"""

from specdistill.serving.engines.engine import Layout, Serving

SERVING = {"vllm": Serving("mtp", Layout()), "sglang": Serving("NEXTN", Layout())}
