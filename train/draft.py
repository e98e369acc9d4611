"""Train a draft model by distillation: a smaller language model with the target's own vocabulary (DistillSpec, arXiv 2310.08461).
`train/eagle.py`, which trains every method, by its own name.

accelerate launch --config_file accelerate_configs/cpu.yaml train/draft.py recipe=pico/draft
"""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).with_name("eagle.py")), run_name="__main__")
