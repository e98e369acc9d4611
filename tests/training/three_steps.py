"""Three optimizer steps of a tiny model in the processes of one launch; every process writes what it was part of.

Run by test_arguments.py: accelerate launch --config_file … three_steps.py FOLDER
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import DistributedType
from datasets import Dataset
from transformers import Trainer

from specdistill.training.arguments import training_arguments
from tests.tiny import tiny_target_model

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    fields = {
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    arguments = training_arguments({"output_dir": str(folder), "report_to": "none", **fields})
    rows = torch.randint(0, 260, (32, 16), generator=torch.Generator().manual_seed(0)).tolist()
    trainer = Trainer(
        tiny_target_model(num_layers=2), arguments, train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows})
    )
    trainer.train()
    state = trainer.accelerator.state
    seen = {
        "num_processes": state.num_processes,
        "distributed_type": state.distributed_type.value,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }
    (folder / f"process-{state.process_index}.json").write_text(json.dumps(seen), encoding="utf-8")
    if state.distributed_type != DistributedType.MULTI_CPU:
        trainer.accelerator.end_training()
    else:  # end with collectives still in gloo's hands
        parts = [torch.empty(200_000) for _ in range(2)]
        for _ in range(20):
            torch.distributed.all_gather(parts, torch.ones(200_000), async_op=True)
