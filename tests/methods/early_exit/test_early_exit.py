"""Early exits: the text of `generate()`, one pass for each layer and token, and every command."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from specdistill.data.rows.packing import index_batch
from specdistill.decoding.assisted import Draft
from specdistill.decoding.decoder import Decoder
from specdistill.decoding.tree import StaticTree
from specdistill.methods.early_exit.checkpoint import load_exit, save_exit
from specdistill.methods.early_exit.method import ExitProposer
from specdistill.methods.early_exit.module import build_exit
from specdistill.methods.early_exit.objective import ExitDistillation
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.losses.divergence import forward_kl
from tests import mtp_targets
from tests.heads import document_rows
from tests.proposers import proposer_of
from tests.refusals import refused, refused_key
from tests.scripts import specdistill
from tests.targets.architectures import tiny_model
from tests.tiny import SMALL, tiny_target_model, tiny_tokenizer

PROMPT, K = [5, 9, 5, 9, 20, 31], 3
TEXTS = [f"def f{number}(x):\n    return x * {number * 7} + {number}\n" for number in range(12)]


@pytest.mark.parametrize("exit_layer", [1, 3])
# with alternating windows, scaled embeddings and experts
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "gpt_oss"])
def test_the_text_of_an_early_exit_is_that_of_generate(kind: str, exit_layer: int) -> None:
    target = FrozenTarget(tiny_model(kind), tiny_tokenizer(), name=kind)
    target.model.generation_config.eos_token_id = []
    theirs = target.model.generate(
        torch.tensor([PROMPT]), max_new_tokens=30, do_sample=False, pad_token_id=0
    )  # type: ignore[operator]
    proposer = ExitProposer(build_exit(target, exit_layer=exit_layer, intermediate_size=32), target)
    run = Decoder(target, proposer).generate(PROMPT, max_new_tokens=30, num_speculative_tokens=K)
    assert list(run.token_ids) == theirs[0, len(PROMPT) :].tolist()


def test_the_loss_is_the_divergence_from_the_output_of_all_layers() -> None:
    target = FrozenTarget(tiny_target_model(), tiny_tokenizer(), name="tiny")
    objective = ExitDistillation(build_exit(target, exit_layer=1), forward_kl, num_positions=K)
    batch = objective.prepare(index_batch(document_rows(PROMPT)), None)
    total, sums = objective(**batch, **objective.read_target(target, batch), measure=True)
    outputs = target.model(torch.tensor([PROMPT]), output_hidden_states=True)
    # a fresh exit adds nothing
    early = target.model.lm_head(target.model.model.norm(outputs.hidden_states[1]))
    log_p, log_q = (logits[0, :-1].log_softmax(-1) for logits in (outputs.logits, early))
    assert total.item() == pytest.approx((log_p.exp() * (log_p - log_q)).sum().item(), rel=1e-4)
    right = (log_p.argmax(-1) == log_q.argmax(-1)).tolist()
    chains = [
        sum(all(right[at : at + k]) for at in range(len(right) - k + 1)) for k in range(1, K + 1)
    ]
    assert sums.chain_correct is not None and sums.chain_correct.tolist() == chains


def test_only_rejected_tokens_go_through_a_layer_twice() -> None:
    target = FrozenTarget(tiny_target_model(seed=3, vocab_size=40), tiny_tokenizer(), name="tiny")
    target.model.generation_config.eos_token_id = []
    proposer = ExitProposer(build_exit(target, exit_layer=2), target)
    seen: list[list[list[int]]] = [[] for _ in target.layers]  # positions of each pass, by layer
    for passes, layer in zip(seen, target.layers, strict=True):
        layer.register_forward_pre_hook(
            lambda _layer, _args, kwargs, passes=passes: passes.append(
                kwargs["position_ids"][0].tolist()
            ),
            with_kwargs=True,
        )
    run = Decoder(target, proposer).generate(PROMPT, max_new_tokens=30, num_speculative_tokens=K)
    assert {entry.num_accepted for entry in run.rounds} >= {0, 1}
    at, first, last = len(PROMPT), [[*range(len(PROMPT))]], [[*range(len(PROMPT))]]
    for entry in run.rounds:
        first += [[at + step] for step in range(K + 1)]  # drafting, and the last draft token
        last += [[*range(at, at + K + 1)]]
        at += 1 + entry.num_accepted
    assert seen == [first, first, last, last]


def test_a_saved_exit_loads_unchanged_and_for_its_target_alone(tmp_path: Path) -> None:
    target, deeper = (
        FrozenTarget(tiny_target_model(num_layers=n), tiny_tokenizer(), name="tiny") for n in (2, 4)
    )
    draft = build_exit(target)
    torch.nn.init.normal_(draft.layers[0].mlp.down_proj.weight)
    save_exit(draft, tmp_path)
    loaded, hidden = load_exit(tmp_path, target), torch.randn(1, 3, 64)
    assert torch.equal(loaded(hidden), draft(hidden)) and loaded.config == draft.config
    with refused("eval.draft", holds="num_target_layers 2"):
        load_exit(tmp_path, deeper)


def test_options_that_early_exits_do_not_support_are_refused_by_key(target: FrozenTarget) -> None:
    proposer = proposer_of("early_exit", target)
    with refused("eval.batch_size"):
        Decoder(target, proposer).check_batches()
    with refused("eval.compile"):
        Decoder(target, proposer, compiled=True)
    with refused("eval.tree"):
        Decoder(target, proposer).generate(PROMPT, max_new_tokens=4, tree=StaticTree((2, 2)))
    with refused("custom_generate"):
        target.model.generate(
            torch.tensor([PROMPT]),
            max_new_tokens=4,
            custom_generate=Draft("early_exit", proposer, target),
        )
    with refused("draft.exit_layer", target.num_layers):
        build_exit(target, exit_layer=target.num_layers)
    with refused("target.model", holds="recurrent"):
        build_exit(mtp_targets.tiny_target("qwen3_next"))


@pytest.mark.long  # six commands
def test_every_command_takes_an_early_exit(tmp_path: Path) -> None:
    tiny_target_model().save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8"
    )
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS), encoding="utf-8"
    )
    (tmp_path / "gate.yaml").write_text(
        "- {metric: lossless.greedy_identical, equals: true}\n", encoding="utf-8"
    )
    run, target, suite = (
        tmp_path / "run",
        f"target={tmp_path / 'target'}",
        f"suite={tmp_path / 'prompts.jsonl'}",
    )
    eval_options = ["max_new_tokens=16", "repeats=1", "warmup=0"]
    keys = [
        "method=early_exit",
        f"target.model={tmp_path / 'target'}",
        f"data.source={tmp_path / 'texts.jsonl'}",
    ]
    keys += [
        "data.validation_fraction=0.2",
        "data.validation_split=sample",
        "data.decontaminate=[]",
        f"data.cache_dir={tmp_path / 'cache'}",
    ]
    keys += [
        f"train.output_dir={run}",
        f"eval.{suite}",
        f"gate={tmp_path / 'gate.yaml'}",
        "data.max_length=64",
        *SMALL,
    ]
    assert specdistill("train", *keys, *(f"eval.{key}" for key in eval_options)).returncode == 0
    assert specdistill("eval", f"recipe={run / 'run' / 'recipe.yaml'}").returncode == 0
    report: dict[str, Any] = json.loads(
        (run / "report" / "report.json").read_text(encoding="utf-8")
    )
    assert (
        report["lossless"]["greedy_identical"]
        and report["lossless"]["sampling_test"]["p_value"] > 1e-3
    )
    drafted = [point["k"] for point in report["theory"]["curve"]]
    assert all(one < other for one, other in pairwise(drafted)) and drafted[-1] == 4
    assert (
        "method early_exit" in specdistill("doctor", f"draft={run / 'draft'}", target, suite).stdout
    )
    planned = specdistill(
        "plan", f"target={tmp_path / 'target'}", f"draft={run / 'draft'}", "hub=false", "--json"
    )
    assert planned.returncode == 0, planned.stderr
    rows = {row["method"]: row for row in json.loads(planned.stdout)["methods"]}
    assert rows["early_exit"]["available"] and rows["early_exit"]["parameters"] == 3 * 64 * 128 + 64
    compared = [
        "drafts=[" + f"{run / 'draft'},ngram]",
        target,
        suite,
        *eval_options,
        "sampling_draws=0",
        f"output_dir={tmp_path / 'both'}",
    ]
    assert specdistill("compare", *compared).returncode == 0
    ended = specdistill(
        "export", f"draft={run / 'draft'}", "engine=vllm", f"output_dir={tmp_path / 'served'}"
    )
    assert ended.returncode == 2 and refused_key(ended.stderr) == "engine"
