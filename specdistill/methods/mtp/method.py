"""Multi-token prediction as a row of the table: how a layer is created, read, trained, examined and exported."""

from pathlib import Path

from datasets import Dataset

from specdistill.methods.checkpoint import read_config
from specdistill.methods.contract import Implementation
from specdistill.methods.heads.method import LIKELY_CAUSES, proposer_loader, simulation
from specdistill.methods.heads.unroll import objective
from specdistill.methods.mtp.checkpoint import ARCHITECTURE, build_mtp, check_fit, load_mtp, save_mtp
from specdistill.methods.mtp.config import Recipe
from specdistill.methods.mtp.export import export
from specdistill.methods.mtp.mistakes import mistakes
from specdistill.methods.mtp.module import MtpDraft
from specdistill.methods.mtp.plan import planned
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget


def create(recipe: Recipe, target: FrozenTarget, rows: Dataset) -> MtpDraft:
    return build_mtp(target, init=recipe.draft.init, seed=recipe.seed)


def save(draft: MtpDraft, target: FrozenTarget, folder: Path) -> None:
    save_mtp(draft, folder)


def inspect(folder: Path, target: TargetFiles | None) -> None:
    if target is not None:
        check_fit(read_config(folder, "draft"), target.text_config, folder, "draft", target.name)


METHOD = Implementation(
    load_proposer=proposer_loader(load_mtp),
    is_named=lambda config, names: bool(names) and config.get("architectures") == [ARCHITECTURE],
    create=create,
    save=save,
    objective=objective,
    inspect=inspect,
    simulation=simulation(mistakes),
    likely_causes=LIKELY_CAUSES,
    planned=planned,
    num_layers=lambda config: 1,
    export=export,
)
