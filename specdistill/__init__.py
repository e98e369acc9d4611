"""Train draft models for speculative decoding, and prove them by decoding with them."""

import os
import sys

__version__ = "0.2.0"

# Threads that wait for one another spin, and where another process is busy they keep the core that the awaited thread needs: a step of a
# small model then takes fifty times as long and more. So they spin briefly, which a quiet machine hardly notices. libgomp reads this when
# torch loads; a user's own settings stand, and those of a vLLM that loads our plugin.
if "OMP_WAIT_POLICY" not in os.environ and "vllm" not in sys.modules:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
