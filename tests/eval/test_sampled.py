"""A good draft that samples passes the gates that ship, measured and judged by the commands."""

import copy
import json
import time
from pathlib import Path

import pytest
import torch

from specdistill.cli.command import run
from specdistill.common.errors import ExitCode
from tests.scripts import evaluate, load_script
from tests.tiny import tiny_target_model, tiny_tokenizer

eval_gate = load_script("eval/gate.py")


@pytest.fixture
def processor_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count only the time in which this process computed, so that its neighbours do not count."""
    monkeypatch.setattr(time, "perf_counter", time.process_time)


def save_pair(folder: Path) -> None:
    """Save a target whose first layer does nearly all, and a draft of this layer alone."""
    target = tiny_target_model(num_layers=8)
    for layer in target.model.layers[1:]:
        layer.self_attn.o_proj.weight.data *= 0.1
        layer.mlp.down_proj.weight.data *= 0.1
    target.generation_config.eos_token_id = target.config.eos_token_id = None
    draft = copy.deepcopy(target)
    draft.model.layers = torch.nn.ModuleList([draft.model.layers[0]])
    draft.config.num_hidden_layers = 1
    for name, model in {"target": target, "draft": draft}.items():
        model.save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)


@pytest.mark.long  # an eight-layer target, timed, and four hundred draws
@pytest.mark.usefixtures("processor_clock")
def test_at_temperature_1_a_good_draft_passes_every_gate_of_this_decoder(tmp_path: Path) -> None:
    save_pair(tmp_path)
    prompts = [{"id": str(number), "prompt": f"def f{number}(x): return "} for number in range(8)]
    (tmp_path / "suite.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    folder = tmp_path / "report"
    named = [
        f"target={tmp_path / 'target'}",
        f"draft={tmp_path / 'draft'}",
        f"suite={tmp_path / 'suite.jsonl'}",
    ]
    settings = [
        "eval.temperature=1",
        "eval.max_new_tokens=32",
        "eval.repeats=2",
        "eval.sampling_draws=200",
    ]
    assert (
        evaluate(*named, "method=draft_model", f"output_dir={folder}", "gate=default", *settings)
        == ExitCode.DONE
    )
    report = json.loads((folder / "report.json").read_text())
    assert report["gate"]["verdict"] == "passed"
    assert (report["settings"]["temperature"], report["settings"]["draft_sampling"]) == (
        1,
        "probabilistic",
    )
    for gate in ("pico", "release"):
        first = ["baseline=none"] if gate == "release" else []
        arguments = [f"report={folder}", f"gates={gate}", *first]
        assert run(eval_gate.main, eval_gate.GateOptions, arguments) == ExitCode.DONE, gate
        judged = json.loads((folder / gate / "report.json").read_text())["gate"]
        decisive = {rule["metric"] for rule in judged["rules"] if rule["severity"] == "fail"}
        assert {
            "speedup",
            "baseline_over_hf_generate",
            "lossless.sampling_test.p_value",
        } <= decisive
