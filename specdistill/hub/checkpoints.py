"""Checkpoints of a training on the Hub, `train.push_to_hub`: on a branch of a private repository, marked as ungated.

The branch holds the draft of the last checkpoint, and its commits those before it. Releases, on the main branch, are `publish`'s.
"""

from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, ModelCardData
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from specdistill.errors import ResourceError, UserError, logger
from specdistill.hub.licenses import CARD
from specdistill.hub.repository import NAMES, Repository, files_at, hub_failures, is_of_a_release
from specdistill.methods.load import draft_files
from specdistill.methods.recipe import TrainedRecipe
from specdistill.training.checkpoints import checkpoint

BRANCH = "checkpoints"
README = """
# Ungated: step {step} of a training

A checkpoint of a draft ({method}) whose training continues. No gate has judged it: it is here to be trained further, with
`draft.init={repository}@{branch}`, and not to be served. Releases, which were measured and judged, are on the main branch.
"""


class PushCheckpoints(TrainerCallback):
    """Commits each checkpoint's draft to the branch. A Hub that fails is warned of: the training is worth more than one upload."""

    def __init__(self, repository: str, method: str) -> None:
        self.repository, self.method = repository, method

    @classmethod
    def of(cls, recipe: TrainedRecipe) -> "PushCheckpoints | None":
        """None where `train.push_to_hub` does not ask for it.

        Raises UserError for a repository that others see, ResourceError when the Hub fails or has no token.
        """
        if not recipe.train.get("push_to_hub"):
            return None
        name = recipe.train.get("hub_model_id")
        if not isinstance(name, str) or name.count("/") != 1:
            raise UserError("train.hub_model_id", got=name or "nothing", expected=NAMES)
        with hub_failures(name, "train.hub_model_id"):
            HfApi().whoami()
        there = Repository.read(name)
        if there.commits and not there.private:
            expected = "a private or a new repository: what no gate has judged is not shown to others"
            raise UserError("train.hub_model_id", got=f"{name}, which is public", expected=expected)
        return cls(name, recipe.method)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            with hub_failures(self.repository, "train.hub_model_id"):
                HfApi().create_repo(self.repository, private=True, exist_ok=True)
                HfApi().create_branch(self.repository, branch=BRANCH, exist_ok=True)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        step, named = state.global_step, {"method": self.method, "repository": self.repository, "branch": BRANCH}
        card = ModelCard(f"---\n{ModelCardData(tags=['specdistill', 'ungated'])}\n---\n{README.format(step=step, **named)}")
        files = draft_files(checkpoint(Path(str(args.output_dir)), step) / "draft")
        added = [CommitOperationAdd(path.name, str(path)) for path in files]
        added.append(CommitOperationAdd(CARD, str(card).encode()))
        try:
            with hub_failures(self.repository, "train.hub_model_id"):
                others = set(files_at(self.repository, BRANCH)) - {path.name for path in files}  # of a release on main
                removed = [CommitOperationDelete(path) for path in sorted(others) if is_of_a_release(path)]
                message = f"Step {step}, ungated"
                HfApi().create_commit(self.repository, [*added, *removed], commit_message=message, revision=BRANCH)
        except ResourceError as error:
            logger.warning(f"checkpoint-{step} was not pushed ({error}); the training continues")
