"""Train a multi-token-prediction layer: `train/eagle.py`, which trains every method, by its own name.

accelerate launch --config_file accelerate_configs/cpu.yaml train/mtp.py recipe=pico/mtp
"""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).with_name("eagle.py")), run_name="__main__")
