"""ResumableTrainer: transformers' Trainer whose runs can be killed at any moment, or asked to stop, and resumed to the same weights."""

from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import Trainer

from specdistill.training.checkpoints import ASIDE, STATE, checkpoint, launch, prune, publish, saving
from specdistill.training.stopping import Stopping, StopSignals


class ResumableTrainer(Trainer):
    """Writes checkpoints aside and renames them, and stops between two steps (see `stopping`).

    micro_batch_losses: of the step under way.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._run_dir: str | None = None
        self.micro_batch_losses: list[Tensor] = []
        super().__init__(*args, **kwargs)
        self.stop_signals = StopSignals()
        self.add_callback(Stopping(self, self.stop_signals))

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)
        self.micro_batch_losses.append(loss)
        return loss

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """The Trainer's own, with the order of this epoch's rows, and not one step more where only the end of the run was lost."""
        if self.state.global_step == self.state.max_steps:
            return
        sampler = kwargs["train_dataloader"].batch_sampler
        while hasattr(
            sampler, "batch_sampler"
        ):  # of the part of an epoch that is left, accelerate does not reach the innermost
            sampler = sampler.batch_sampler
        if hasattr(getattr(sampler, "sampler", None), "set_epoch"):
            sampler.sampler.set_epoch(kwargs["epoch"])
        run_epoch: Any = super()._run_epoch
        run_epoch(*args, **kwargs)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """The best that is to be loaded at the end is saved, also between two steps of `train.save_steps`."""
        is_best = super()._determine_best_metric(metrics, trial)
        if is_best and self.args.load_best_model_at_end:
            self.control.should_save = True
        return is_best

    def _get_output_dir(self, trial: Any) -> str:
        return self._run_dir or str(super()._get_output_dir(trial))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """The Trainer's own, into a folder aside; its place when every process is done; then older ones go."""
        run, step = Path(str(self.args.output_dir)), self.state.global_step
        self._run_dir = str(run / ASIDE)
        aside = checkpoint(run / ASIDE, step)
        with saving(str(checkpoint(run, step))):
            super()._save_checkpoint(model, trial)
        self._run_dir = None
        if self.state.best_global_step == step:
            self.state.best_model_checkpoint = str(checkpoint(run, step))
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            with saving(str(checkpoint(run, step))):
                self.state.save_to_json(str(aside / STATE))  # which names the best by its place
                publish(aside, run, launch(self.args))
            best = self.state.best_model_checkpoint
            prune(run, self.args.save_total_limit, {checkpoint(run, step), *([Path(best)] if best else [])})
        self.accelerator.wait_for_everyone()
