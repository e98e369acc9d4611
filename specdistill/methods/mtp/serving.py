"""How engines are given layers for multi-token prediction: in the target's checkpoint. No torch."""

from specdistill.engines.engine import Layout, Serving

SERVING = {"vllm": Serving("mtp", Layout()), "sglang": Serving("NEXTN", Layout())}
