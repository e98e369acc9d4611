"""eval.engine=llama.cpp: the command that starts its server, from GGUF files and the recipe's
options, and what is refused."""

import json
import shlex
import sys

import gguf
import pytest

from specdistill.common.errors import ExitCode
from specdistill.common.project import PICO, ROOT
from specdistill.evaluation.measurement.in_engine import find_target_file
from specdistill.evaluation.report.files import read_report
from specdistill.recipe.sections import LlamaCppConfig
from specdistill.serving.engines import start
from specdistill.targets.files import TargetFiles, combine_hashes, hash_files
from specdistill.targets.frozen import FrozenTarget
from tests.evaluation.measurement.peer import evaluate_pico
from tests.gguf_writer import write_gguf
from tests.heads import build_head, save_head
from tests.refusals import refused, refused_key

PROGRAM = ROOT / "tests" / "serving" / "engines" / "engine_program.py"
LOOKUP = "eval.lookup_first={method: ngram, min: 2, max: 2, draft_tokens: 1}"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The folder of a head, and pico as a GGUF file."""
    folder = tmp_path_factory.mktemp("files")
    save_head(
        "eagle3",
        build_head("eagle3", FrozenTarget.load("pico"), fc_norm=False, norm_output=False),
        folder / "draft",
    )
    return folder / "draft", write_gguf(PICO, folder / "pico-f16.gguf", "f16")


def evaluate(folder, files, *arguments, lone=False):
    draft, target = files
    settings = [
        f"eval.engine_command={shlex.join([sys.executable, str(PROGRAM), 'llama.cpp'])}",
        "eval.engine=llama.cpp",
    ]
    settings += [
        "eval.max_new_tokens=12",
        "eval.num_prompts=4",
        f"eval.llama_cpp.model={target}",
        "eval.num_speculative_tokens=3",
    ]
    settings += (
        ["method=ngram", "eval.ngram.rule=llama.cpp"]
        if lone
        else ["method=eagle3", f"draft={draft}"]
    )
    return evaluate_pico(
        folder, *settings, *arguments, gate="- {metric: acceptance_length_vllm, min: 1.0}\n"
    )


@pytest.mark.parametrize("lone", [False, True])
def test_the_server_of_llama_cpp_is_started_and_its_drafts_are_counted(
    lone, files, tmp_path, monkeypatch
):
    monkeypatch.setattr(start, "GRACE_SECONDS", 0.2)
    options = ["ctx_size=2048", "threads=2", "cache_type_k=f32", "device=none"]
    options += [] if lone else [f"model_draft={files[1]}", "spec_draft_ngl=0"]
    keys = [f"eval.llama_cpp.{option}" for option in options]
    assert (
        evaluate(
            tmp_path / "report",
            files,
            *keys,
            "eval.sweep.concurrency=[4]",
            *([] if lone else [LOOKUP]),
            lone=lone,
        )
        == 0
    )
    report, samples = read_report(tmp_path / "report")
    row = report["results"][0]
    if lone:
        # nothing was drafted in some rounds, and the server does not count these
        assert "mean_acceptance_length" not in row
    else:
        num_emitted = row["num_new_tokens"] - row["num_prompts"]
        assert (
            row["num_rounds"] == row["num_drafts"]
            and row["mean_acceptance_length"] == num_emitted / row["num_drafts"]
        )
    command, plain = (
        shlex.split(report["engine"][name]) for name in ("command", "baseline_command")
    )
    common = [
        "--parallel",
        "4",
        "--ctx-size",
        "2048",
        "--threads",
        "2",
        "--device",
        "none",
        "--cache-type-k",
        "f32",
    ]
    common += [] if lone else ["--spec-draft-ngl", "0"]
    assert sorted(plain[3:]) == sorted(["-m", files[1].name, *common, "--metrics"])
    drafting = "--spec-type ngram-simple --spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m 3"
    if not lone:
        lookup = (
            "--spec-type ngram-simple,draft-eagle3 --spec-ngram-simple-size-n 2"
            " --spec-ngram-simple-size-m 3"
        )
        drafting = (
            f"-md {files[1].name} {lookup} --spec-draft-n-max 1 --no-spec-draft-backend-sampling"
        )
    assert f" -m {files[1].name} {drafting} --parallel" in shlex.join(command)
    assert report["lossless"]["greedy_identical"] and report["engine"]["name"] == "llama.cpp"
    assert report["target"]["dtype"] == "MOSTLY_F16" and report["target"][
        "weights"
    ] == combine_hashes(hash_files([files[1]]))
    # After the prompt's own token, 3 tokens of a draft are accepted and none in alternation: 4 + 1
    # + 4 + 1 + 1 of 4 tokens.
    assert [sample.counts.accepted_per_position for sample in samples] == [(3, 2, 2)] * 8


@pytest.mark.parametrize(
    ("key", "lone", "arguments"),
    [
        ("eval.llama_cpp.model", False, ["eval.llama_cpp.model=null"]),
        ("eval.llama_cpp.model", False, ["eval.llama_cpp.model=nowhere.gguf"]),
        ("eval.llama_cpp.model", False, [f"eval.llama_cpp.model={PICO}"]),
        ("eval.llama_cpp.model_draft", False, []),
        ("eval.llama_cpp.model_draft", False, ["eval.llama_cpp.model_draft=nowhere.gguf"]),
        ("eval.llama_cpp.cache_type_k", False, ["eval.llama_cpp.cache_type_k=q3"]),
        ("eval.llama_cpp", False, ["eval.engine=vllm"]),
        ("eval.tensor_parallel", False, ["eval.tensor_parallel=2"]),
        ("eval.lookup_first.min", False, [LOOKUP.replace("min: 2", "min: 1")]),
        ("eval.lookup_first.max", False, [LOOKUP.replace("2,", "4,")]),
        (
            "eval.lookup_first.draft_tree",
            False,
            [LOOKUP.replace("draft_tokens: 1", "draft_tree: {branching: [2]}")],
        ),
        (
            "eval.llama_cpp.ctx_size",
            True,
            ["eval.llama_cpp.ctx_size=300", "eval.sweep.concurrency=[4]"],
        ),
        ("eval.llama_cpp.model_draft", True, ["eval.llama_cpp.model_draft=draft.gguf"]),
        ("eval.llama_cpp.spec_draft_ngl", True, ["eval.llama_cpp.spec_draft_ngl=0"]),
        ("eval.ngram.rule", True, ["eval.ngram.rule=specdistill"]),
        ("eval.ngram.max", True, ["eval.ngram.max=4"]),
        ("eval.ngram.max", True, ["eval.ngram.max=3", "eval.sweep.num_speculative_tokens=[2]"]),
    ],
)
def test_settings_that_llama_cpp_cannot_serve_are_refused(
    key, lone, arguments, files, tmp_path, capsys
):
    assert evaluate(tmp_path / "report", files, *arguments, lone=lone) == ExitCode.USER_ERROR
    error = capsys.readouterr().err
    assert (refused_key(error) or "").startswith(key), error
    if arguments == ["eval.llama_cpp.model=null"]:
        assert f"convert_hf_to_gguf.py {PICO}" in error
    if key == "eval.lookup_first.min":
        assert "expected 2, the value of eval.lookup_first.max" in error


def test_a_file_of_another_vocabulary_or_of_none_is_refused(files, tmp_path):
    target, tokenizer = (
        TargetFiles("pico"),
        json.loads((PICO / "tokenizer.json").read_text())["model"]["vocab"],
    )

    class OtherVocabulary:
        def get_vocab(self):
            return {token: (index + 7) % len(tokenizer) for token, index in tokenizer.items()}

    with refused("eval.llama_cpp.model", holds="another vocabulary"):
        find_target_file(LlamaCppConfig(model=str(files[1])), target, OtherVocabulary())
    (tmp_path / "t.gguf").write_bytes(b"GGUF")
    with refused("eval.llama_cpp.model", holds="t.gguf"):
        find_target_file(LlamaCppConfig(model=str(tmp_path / "t.gguf")), target, OtherVocabulary())
    writer = gguf.GGUFWriter(tmp_path / "new.gguf", "llama")
    writer.add_token_list([*tokenizer])
    writer.add_file_type(9999)
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    with refused("eval.llama_cpp.model", holds="9999"):
        find_target_file(
            LlamaCppConfig(model=str(tmp_path / "new.gguf")), target, OtherVocabulary()
        )
