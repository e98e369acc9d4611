"""A process that is told not to train on the CPU. Run by test_arguments.py: accelerate launch … without_cpu.py FOLDER"""

import sys
from pathlib import Path

from specdistill.training.arguments import training_arguments

if __name__ == "__main__":
    training_arguments({"output_dir": sys.argv[1], "report_to": "none", "use_cpu": False})
    (Path(sys.argv[1]) / "accepted").touch()
