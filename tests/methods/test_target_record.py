"""A draft's config.json records its target; exports keep it, and other targets are refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from specdistill.cli.command import run
from specdistill.cli.main import main
from specdistill.common.errors import ExitCode
from specdistill.methods.load import create_draft, load_method, load_proposer
from specdistill.methods.models.create import create_draft_model
from specdistill.methods.recipe import Recipe
from specdistill.methods.target_record import SECTION, save_draft
from specdistill.recipe.load import load_recipe
from specdistill.targets.frozen import FrozenTarget
from tests.heads import build_head
from tests.loopback_hub import loopback_hub
from tests.mtp_targets import write_checkpoint
from tests.refusals import refused, refused_key
from tests.scripts import load_script
from tests.tiny import packed_rows, tiny_target_model, tiny_tokenizer

METHODS = ("eagle3", "eagle", "mtp", "draft_model", "pard")
eval_run = load_script("eval/run.py")


def build_draft(method: str, target: FrozenTarget) -> Any:
    if method in ("draft_model", "pard"):
        draft = create_draft_model(target, init="layers", num_layers=1)
        draft.config.update({"spd_type": "pard", "pard_token": 3} if method == "pard" else {})
        return draft
    return build_head(method, target)


@pytest.fixture(scope="module")
def drafts_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, a draft of each method for it, and another target.

    `other` differs from `target` in its weights alone.
    """
    path = tmp_path_factory.mktemp("records")
    for seed, name in enumerate(("target", "other")):
        tiny_target_model(seed=seed).save_pretrained(path / name)
        tiny_tokenizer().save_pretrained(path / name)
    target = FrozenTarget.load(str(path / "target"))
    for method in METHODS:
        save_draft(load_method(method), target, build_draft(method, target), path / method)
    return path


def read_record(draft: Path) -> Any:
    return json.loads((draft / "config.json").read_text()).get(SECTION)


@pytest.mark.parametrize("method", METHODS)
def test_a_draft_loads_for_its_target_and_for_no_other(
    method: str, drafts_folder: Path, tmp_path: Path
) -> None:
    draft, other = drafts_folder / method, FrozenTarget.load(str(drafts_folder / "other"))
    assert read_record(draft)["target"]["name_or_path"] == "target"  # no path of this machine
    shutil.copytree(drafts_folder / "target", tmp_path / "moved")
    load_proposer(method, draft, FrozenTarget.load(str(tmp_path / "moved")))
    with refused("eval.draft", f"{draft}, a draft for target (weights"):
        load_proposer(method, draft, other)
    draft_without_record = shutil.copytree(draft, tmp_path / "without")
    config = json.loads((draft_without_record / "config.json").read_text())
    (draft_without_record / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if name != SECTION})
    )
    load_proposer(method, draft_without_record, other)  # drafts of other projects have no record


@pytest.mark.parametrize("method", METHODS)
def test_every_command_names_both_targets_of_a_refused_draft(
    method: str, drafts_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft, other, out = drafts_folder / method, drafts_folder / "other", tmp_path / "out"
    assert (
        main(["doctor", f"draft={draft}", f"target={drafts_folder / 'target'}", "decode=false"])
        == ExitCode.DONE
    )
    capsys.readouterr()
    assert main(["doctor", f"draft={draft}", f"target={other}"]) == ExitCode.CHECK_FAILED
    output = capsys.readouterr().out
    assert (
        f"{draft}, a draft for target (" in output
        and f"a draft for {other} (" in output
        and "1 problem" in output
    )
    assert "acceptance length" not in output
    assert (
        main(["export", f"draft={draft}", f"target={other}", "engine=vllm", f"output_dir={out}"])
        == ExitCode.USER_ERROR
    )
    keys = [
        f"target={other}",
        f"draft={draft}",
        f"method={method}",
        "suite=pico-short",
        f"output_dir={out}",
    ]
    options = {"shorthands": eval_run.SHORTHANDS, "without_recipe": ["train.output_dir=runs/eval"]}
    assert run(eval_run.main, Recipe, keys, **options) == ExitCode.USER_ERROR
    in_export, in_eval = capsys.readouterr().err.strip().splitlines()[-2:]
    assert (refused_key(in_export), refused_key(in_eval)) == ("draft", "draft")
    assert not out.exists()


@pytest.mark.parametrize(
    ("method", "engine"),
    [
        ("eagle3", "vllm"),
        ("eagle3", "sglang"),
        ("eagle3", "speculators"),
        ("eagle", "vllm"),
        ("draft_model", "sglang"),
        ("pard", "vllm"),
    ],
)
def test_an_export_keeps_the_record(
    method: str, engine: str, drafts_folder: Path, tmp_path: Path
) -> None:
    keys = [
        f"draft={drafts_folder / method}",
        f"target={drafts_folder / 'target'}",
        f"engine={engine}",
        f"output_dir={tmp_path / 'out'}",
    ]
    assert main(["export", *keys]) == ExitCode.DONE
    assert read_record(tmp_path / "out") == read_record(drafts_folder / method) is not None
    if engine != "speculators" and method != "eagle":  # transformers knows no config of these
        assert getattr(AutoConfig.from_pretrained(tmp_path / "out"), SECTION) == read_record(
            drafts_folder / method
        )


def test_a_layer_merged_into_its_target_keeps_the_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = write_checkpoint("qwen3_next", tmp_path / "target", with_mtp=False)
    write_checkpoint("qwen3_next", tmp_path / "other", dtype=torch.bfloat16)
    save_draft(load_method("mtp"), target, build_draft("mtp", target), tmp_path / "draft")
    keys = [
        f"draft={tmp_path / 'draft'}",
        f"target={tmp_path / 'target'}",
        "engine=vllm",
        f"output_dir={tmp_path / 'out'}",
    ]
    assert main(["export", *keys]) == ExitCode.DONE
    assert read_record(tmp_path / "out") == read_record(tmp_path / "draft") is not None
    assert getattr(AutoConfig.from_pretrained(tmp_path / "out"), SECTION) == read_record(
        tmp_path / "out"
    )
    FrozenTarget.load(str(tmp_path / "out"))
    assert (
        main(
            ["doctor", f"draft={tmp_path / 'out'}", f"target={tmp_path / 'other'}", "decode=false"]
        )
        == ExitCode.CHECK_FAILED
    )
    assert f"{tmp_path / 'out'}, a draft for target (" in capsys.readouterr().out


@pytest.mark.parametrize("method", METHODS)
def test_a_trained_draft_continues_in_float32_whatever_its_file_holds(
    method: str, drafts_folder: Path, tmp_path: Path
) -> None:
    target = FrozenTarget.load(str(drafts_folder / "target"))
    draft = tmp_path / "bfloat16"
    trained = build_draft(method, target).bfloat16()
    save_draft(load_method(method), target, trained, draft)
    keys = [
        f"method={method}",
        f"target.model={drafts_folder / 'target'}",
        f"train.output_dir={tmp_path / 'run'}",
    ]
    rows = packed_rows([[5, 6, 7, 8]])
    draft_parameters = {
        name: tensor
        for name, tensor in trained.named_parameters()
        if name not in getattr(trained, "shared", ())
    }
    with loopback_hub(tmp_path / "hub") as hub, hub.client(tmp_path / "home"):
        hub.create("org/draft", {path.name: path for path in draft.iterdir()})
        hub.tag("org/draft", "v1")
        hub.commit("org/draft", {"config.json": b"{}"})
        for init in (draft, "org/draft@v1"):
            continued = create_draft(
                load_recipe(Recipe, [*keys, f"draft.init={init}"]), target, rows
            )
            assert {tensor.dtype for tensor in continued.parameters()} == {torch.float32}
            assert all(
                torch.equal(continued.get_parameter(name), tensor.float())
                for name, tensor in draft_parameters.items()
            )


def test_a_draft_is_recorded_for_the_target_that_it_was_trained_on_last(
    drafts_folder: Path, tmp_path: Path
) -> None:
    other = FrozenTarget.load(str(drafts_folder / "other"))
    method = load_method("draft_model")
    draft = create_draft_model(other, init=str(drafts_folder / "draft_model"))
    save_draft(method, other, draft, tmp_path / "draft")
    assert read_record(tmp_path / "draft")["target"]["name_or_path"] == "other"
    in_memory = FrozenTarget(tiny_target_model(), tiny_tokenizer(), name="tiny")
    save_draft(method, in_memory, draft, tmp_path / "unknown")
    assert read_record(tmp_path / "unknown") is None


def test_the_doctor_finds_another_tokenizer_without_decoding(
    shared_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [
        "doctor",
        f"draft={shared_data / 'models' / 'stories260K-hf'}",
        "target=pico",
        "decode=false",
    ]
    assert main(keys) == ExitCode.CHECK_FAILED
    assert "512 tokens" in capsys.readouterr().out
    assert main([*keys, "heterogeneous_vocab=true"]) == ExitCode.DONE
    assert main([*keys[:2], "decode=false", "heterogeneous_vocab=true"]) == ExitCode.USER_ERROR
    assert main([*keys, "ngram.max=5"]) == ExitCode.USER_ERROR


NO_TEXT = {
    "name_or_path": ["pico"],
    "revision": None,
    "adapter": None,
    "weights": "1",
    "tokenizer": "2",
}


@pytest.mark.parametrize(
    "section", ["pico", {}, {"target": {"weights": "1"}}, {"target": "pico"}, {"target": NO_TEXT}]
)
def test_an_invalid_record_is_refused(section: Any, drafts_folder: Path, tmp_path: Path) -> None:
    draft = shutil.copytree(drafts_folder / "eagle", tmp_path / "draft")
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, SECTION: section}))
    with refused("eval.draft"):
        load_proposer("eagle", draft, FrozenTarget.load(str(drafts_folder / "target")))
