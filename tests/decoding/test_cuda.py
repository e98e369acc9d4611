"""A GPU decodes and trains as a CPU does; the tests are skipped where there is none."""

from pathlib import Path

import pytest
import torch
from datasets import Dataset

from specdistill.decoding.decoder import Decoder
from specdistill.decoding.sampling import Sampling
from specdistill.decoding.tree import build_tree_shape
from specdistill.methods.chains.objective import TrainingTimeTest
from specdistill.methods.chains.proposer import HeadProposer
from specdistill.methods.eagle3.checkpoint import save_eagle3
from specdistill.methods.eagle3.module import build_eagle3
from specdistill.methods.models.proposer import DraftModelProposer
from specdistill.recipe.sections import TreeConfig
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.arguments import build_training_arguments
from specdistill.training.losses.divergence import forward_kl
from specdistill.training.trainer import DistillationTrainer
from tests.proposers import ngram_proposer, proposer_of
from tests.tiny import tiny_target_model, tiny_tokenizer

pytestmark = pytest.mark.gpu
PROMPT = [5, 9, 5, 9, 20, 31]


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    model = tiny_target_model().to("cuda")
    model.generation_config.eos_token_id = []
    return FrozenTarget(model, tiny_tokenizer(), name="tiny")


def test_greedy_output_is_the_plain_output(target: FrozenTarget) -> None:
    plain = Decoder(target).generate(PROMPT, max_new_tokens=60)
    for proposer in (HeadProposer(build_eagle3(target)), ngram_proposer()):
        fast = Decoder(target, proposer).generate(
            PROMPT, max_new_tokens=60, num_speculative_tokens=4
        )
        assert fast.token_ids == plain.token_ids


def test_batches_write_what_each_row_writes_alone(target: FrozenTarget) -> None:
    prompts = [[*PROMPT[: 1 + index % 6], 40 + index] for index in range(16)]
    plain = [Decoder(target).generate(prompt, max_new_tokens=60).token_ids for prompt in prompts]
    for proposer in (
        None,
        HeadProposer(build_eagle3(target)),
        DraftModelProposer(target.model),
        ngram_proposer(),
    ):
        k = 4 if proposer else 0
        generations = Decoder(target, proposer).generate_all(
            prompts, max_new_tokens=60, num_speculative_tokens=k
        )
        assert [generation.token_ids for generation in generations] == plain


@pytest.mark.parametrize("name", ["eagle3", "eagle", "mtp", "draft_model"])
def test_trees_write_the_plain_output(target: FrozenTarget, name: str) -> None:
    plain = Decoder(target).generate(PROMPT, max_new_tokens=40)
    tree = build_tree_shape(TreeConfig(budget=8, depth=3, top_k=3))
    assert (
        Decoder(target, proposer_of(name, target))
        .generate(PROMPT, max_new_tokens=40, tree=tree)
        .token_ids
        == plain.token_ids
    )


@pytest.mark.parametrize("name", [None, "eagle3", "ngram"])
def test_compiled_passes_write_the_plain_output(target: FrozenTarget, name: str | None) -> None:
    plain = Decoder(target).generate(PROMPT, max_new_tokens=40)
    proposer = name and proposer_of(name, target)
    if hasattr(proposer, "compiled"):
        proposer.compiled = True
    decoder = Decoder(target, proposer, compiled=True)
    k = 4 if name else 0
    assert (
        decoder.generate(PROMPT, max_new_tokens=40, num_speculative_tokens=k).token_ids
        == plain.token_ids
    )


def test_sampling_is_reproducible_by_its_generator(target: FrozenTarget) -> None:
    decoder = Decoder(target, HeadProposer(build_eagle3(target)))
    first, second = (
        decoder.generate(
            PROMPT,
            max_new_tokens=20,
            num_speculative_tokens=3,
            sampling=Sampling(1.0, top_p=0.9),
            generator=torch.Generator().manual_seed(1),
        ).token_ids
        for _ in range(2)
    )
    assert first == second


@pytest.mark.parametrize("bf16", [False, True])
def test_a_training_step_runs_and_lowers_the_loss(
    target: FrozenTarget, tmp_path: Path, bf16: bool
) -> None:
    ids = torch.randint(3, 200, (4, 64), generator=torch.Generator().manual_seed(0)).tolist()
    rows = {
        "input_ids": ids,
        "loss_mask": [[1] * 64] * 4,
        "document_ids": [[0] * 64] * 4,
        "position_ids": [list(range(64))] * 4,
    }
    data = Dataset.from_dict(rows)
    settings = {
        "max_steps": 20,
        "learning_rate": 1e-3,
        "bf16": bf16,
        "save_strategy": "no",
        "report_to": "none",
    }
    arguments = build_training_arguments(
        {"output_dir": str(tmp_path), "per_device_train_batch_size": 4, **settings}
    )
    draft = build_eagle3(target)
    objective = TrainingTimeTest(draft, forward_kl, 3)
    trainer = DistillationTrainer(objective, target, arguments, data, data, save=save_eagle3)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
