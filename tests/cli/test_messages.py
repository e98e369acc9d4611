"""An error of a wrong command line names the typed key and says in words what to type.

It is the only error, and the exit code is 2.
"""

import re
import runpy
import shlex
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from specdistill.common.errors import ResourceError, UserError, make_unused_key_error
from specdistill.common.project import ROOT
from specdistill.recipe.short_keys import SHORTHANDS, rename_keys_as_typed
from tests.refusals import refused_key
from tests.scripts import specdistill

# What no message may show: private phrases, and messages of transformers, pydantic, OmegaConf,
# torch and Python.
RAW = (
    "no such key", "got null", "got None", "NoneType", "got a value", "accepts together",
    "Traceback", "This is a bug",
    "IntervalStrategy", "--load", "keyword argument", "unpack", "object has no attribute",
    "Interpolation key", "raised while",
    "Input should be", "<class", "1e+06",
)  # fmt: skip
TRAIN = "train recipe=pico/eagle3 train.output_dir=run"
ADAMW = f"{TRAIN} optimizer=adamw train.weight_decay=0"
NGRAM = "eval target=pico method=ngram"
DOCTOR = "doctor draft=runs/x"
COMPARE = "compare target=pico drafts=ngram,suffix output_dir=out"
# The command line, the key that the error begins with, and what it tells the user to type or choose
# from.
WRONG = [
    # Shorthands, and keys that were typed in full
    (f"{NGRAM} suite=nope", "suite", "one of gsm8k"),
    (f"{NGRAM} eval.suite=nope", "eval.suite", "one of gsm8k"),
    (f"{NGRAM} suite=pico eval.suite=nope", "eval.suite", "one of gsm8k"),
    (f"{NGRAM} suite=[1]", "suite", "str or null"),
    (f"{NGRAM} draft=runs/x", "draft", "Remove draft=runs/x."),
    (f"{NGRAM} eval.draft=runs/x", "eval.draft", "Remove eval.draft=runs/x."),
    ("eval suite pico", "suite", "key=value"),
    ("eval target= method=eagle3", "target", "expected str"),
    ("eval target=nowhere/at/all method=ngram suite=pico", "target", "a folder or a Hub id"),
    ("eval target=pico method=eagle3 draft=./nope", "draft", "Hub id of a draft"),
    ("eval/run.py target=pico method=ngram suite=nope", "suite", "one of gsm8k"),
    ("eval/run.py target=pico method=ngram launch=ddp", "launch",
        "accelerate launch --config_file"),
    (f"{DOCTOR} suite=pico", "suite", "target=PATH"),
    (f"{DOCTOR} eval.num_prompts=3", "eval.num_prompts", "target=PATH"),
    (f"{DOCTOR} target=pico decode=false suite=pico", "suite", "decode=true"),
    (f"{DOCTOR} target=pico decode=false target.dtype=bfloat16", "target.dtype",
        "Remove target.dtype=bfloat16."),
    (f"{DOCTOR} target=pico eval.lookup_first.nope=1", "eval.lookup_first.nope", "one of"),
    ("plan target=", "target", "expected str"),
    ("plan target=./nope", "target", "a folder or a Hub id"),
    ("plan target=pico training.max_length=4", "training.max_length", "at most 1048576"),
    ("acquire target= method=eagle3 draft=x/y", "target", "expected str"),
    ("acquire target=pico method=eagle3 target.adapter=x", "target.adapter", "add draft=PATH"),
    ("acquire target=pico method=eagle3", "draft", "specdistill plan target=pico"),
    ("export engine=vllm target=./nope draft=./nope output_dir=out", "draft", "Hub id of a draft"),
    ("export engine=vllm recipe=pico/eagle3 output_dir=out", "recipe", "dry_run=true"),
    ("export engine=vllm output_dir=out", "draft", "draft=PATH"),
    (f"{COMPARE} temperature=-1", "temperature", "at least 0"),
    (f"{COMPARE} eval.temperature=-1", "eval.temperature", "at least 0"),
    (f"{COMPARE} eval.suite=nope", "eval.suite", "one of gsm8k"),
    (f"{COMPARE} suite=nope", "suite", "one of gsm8k"),
    (f"{COMPARE} top_p=0.5", "top_p", "Remove top_p=0.5."),
    ("compare target=pico drafts= output_dir=out", "drafts", "list of str"),
    ("compare target=pico drafts=ngram,./nope output_dir=out", "drafts",
        "a Hub id or ngram or suffix"),
    ("compare published=vllm-ci-qwen3-8b-eagle3 suite=nope", "suite", "one of gsm8k"),
    ("eval/compare.py target=pico drafts=ngram output_dir=out", "drafts", "two or more"),
    ("gate report=", "report", "expected str"),
    ("gate report=runs gates=nope", "gates", "one of default"),
    ("eval/gate.py report=runs gates=nope", "gates", "one of default"),
    ("publish run=", "run", "expected str"),
    ("monitor server=", "server", "expected str"),
    # Keys that have no effect, and who reads them
    (f"{NGRAM} data.source=pico", "data.source", "method=ngram"),
    (f"{NGRAM} eval.suffix.max_spec_factor=2", "eval.suffix.max_spec_factor",
        "method=ngram, only with suffix"),
    (f"{NGRAM} train.max_steps=4", "train.max_steps", "Remove train.max_steps=4."),
    (f"{NGRAM} 'eval.tree={{branching: [2]}}'", "eval.tree", "Remove eval.tree."),
    (f"{NGRAM} eval.lookup_first={{}}", "eval.lookup_first", "Remove eval.lookup_first."),
    (f"{NGRAM} eval.sweep.concurrency=4", "eval.sweep.concurrency", "eval.engine=vllm"),
    (f"{NGRAM} target.revision=v1", "target.revision", "Remove target.revision=v1."),
    (f"{NGRAM} num_processes=2", "num_processes", "launch=NAME"),
    (f"{NGRAM} launch=cpu machine_rank=1", "machine_rank", "add num_machines=2"),
    (f"{NGRAM} launch=cpu num_machines=2 num_processes=2", "machine_rank", "rank of this machine"),
    (f"{COMPARE} target.dtype=float32 heterogeneous_vocab=true", "heterogeneous_vocab",
        "only with"),
    ("demo method=ngram", "data.source", "method=ngram"),
    (f"{TRAIN} on_policy.fraction=0.5", "on_policy.fraction", "draft_model"),
    (f"{TRAIN} hidden_states.path=a", "hidden_states.path",
        "Remove hidden_states.path=a, or set hidden_states.mode=offline."),
    (f"{TRAIN} hidden_states.mode=offline hidden_states.path=a hidden_states.max_bytes=9",
        "hidden_states.max_bytes", "or set hidden_states.mode=hybrid."),
    (f"{TRAIN} selection.suite=pico-dev", "selection.suite",
        "train.metric_for_best_model=decoded_acceptance_length"),
    (f"{TRAIN} train.metric_for_best_model=decoded_acceptance_length", "selection.suite",
        "jsonl file"),
    (f"{TRAIN} draft=null", "draft", "draft.init"),
    ("data merge recipe=pico/eagle3 data.shard=0/2", "data.shard", "Remove data.shard=0/2."),
    ("data make recipe=pico/eagle3 data.shard=0/2 on=ray", "data.shard", "Remove data.shard=0/2."),
    # Values that transformers or its Trainer refuses
    (f"{TRAIN} train.max_steps=null", "train.max_steps", "expected int"),
    (f"{TRAIN} train.report_to=null", "train.report_to", "one of all, none"),
    (f"{TRAIN} train.seed=99999999999", "train.seed", "4294967295"),
    (f"{TRAIN} train.warmup_steps=-1", "train.warmup_steps", "warmup_steps >= 0"),
    (f"{TRAIN} train.logging_steps=2.5", "train.logging_steps", "an integer"),
    (f"{TRAIN} train.torch_empty_cache_steps=0", "train.torch_empty_cache_steps", "bigger than 0"),
    (f"{TRAIN} train.eval_do_concat_batches=false", "train.eval_do_concat_batches", "true"),
    (f"{TRAIN} train.batch_eval_metrics=true", "train.batch_eval_metrics", "Remove"),
    (f"{TRAIN} train.label_smoothing_factor=0.1", "train.label_smoothing_factor", "Remove"),
    (f"{TRAIN} train.push_to_hub=true", "train.push_to_hub", "specdistill publish"),
    (f"{TRAIN} train.optim=sgd", "train.optim", "add optimizer=adamw"),
    (f"{ADAMW} train.optim_args=xx", "train.optim_args", "NAME=VALUE"),
    (f"{TRAIN} train.dataloader_prefetch_factor=2", "train.dataloader_prefetch_factor",
        "when train.dataloader_num_workers > 0"),
    (f"{TRAIN} train.bf16=true train.fp16=true", "train.fp16", "train.bf16"),
    (f"{TRAIN} train.tf32=true", "train.tf32", "Remove train.tf32=true."),
    (f"{TRAIN} train.eval_strategy=no", "train.load_best_model_at_end", "train.save_strategy"),
    (f"{TRAIN} train.save_steps=3 train.eval_steps=2", "train.save_steps", "train.eval_steps=2"),
    (f"{TRAIN} train.load_best_model_at_end=false train.eval_strategy=no"
     " train.lr_scheduler_type=greedy",
     "train.lr_scheduler_type", "train.eval_strategy=steps"),
    (f"{TRAIN} train.lr_scheduler_type=cosine_with_min_lr", "train.lr_scheduler_kwargs",
        "min_lr_rate"),
    (f"{TRAIN} train.lr_scheduler_kwargs='{{nope: 1}}'", "train.lr_scheduler_kwargs",
        "it has none"),
    (f"{TRAIN} train.lr_scheduler_type=polynomial train.lr_scheduler_kwargs='{{power: a}}'",
     "train.lr_scheduler_kwargs", "lr_end, power"),
    ("train/eagle.py recipe=pico/eagle3 train.output_dir=run train.max_steps=null",
        "train.max_steps", "expected int"),
    ("train/target.py recipe=pico/target train.output_dir=", "train.output_dir", "a folder"),
    # Values that OmegaConf or pydantic refuses
    (f"{TRAIN} 'data.max_length=${{nope}}'", "data.max_length", "${nope}, which names no key"),
    (f"{TRAIN} 'data.max_length=${{oc.env:NOPE}}'", "data.max_length", "HOME"),
    (f"{TRAIN} eval.temperature=null", "eval.temperature", "at least 0"),
    (f"{TRAIN} train=null", "train", "mapping"),
]  # fmt: skip


def run_line(line: str) -> tuple[int, str]:
    """Run a command or a script in this process; return its exit code and its stderr."""
    words = shlex.split(line)
    if not words[0].endswith(".py"):
        done = specdistill(*words)
        return done.returncode, done.stderr
    err = StringIO()
    argv = sys.argv
    sys.argv = [str(ROOT / words[0]), *words[1:]]
    try:
        with redirect_stdout(StringIO()), redirect_stderr(err), pytest.raises(SystemExit) as end:
            runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        sys.argv = argv
    return int(end.value.code or 0), err.getvalue()


@pytest.mark.parametrize(("line", "key", "typed"), WRONG, ids=[line for line, *_ in WRONG])
def test_a_wrong_command_line_names_the_typed_key_and_what_to_type(
    line: str, key: str, typed: str, in_empty_folder: Path
) -> None:
    code, stderr = run_line(line)
    assert code == 2, stderr
    (error,) = (said for said in stderr.splitlines() if said.startswith("error: "))
    assert refused_key(stderr) == key
    assert typed in error
    assert [raw for raw in RAW if raw in error] == []
    assert list(in_empty_folder.iterdir()) == []


@pytest.mark.parametrize("sharing", ["", "with train.bf16=true"])
def test_an_unknown_message_of_transformers_names_our_keys(sharing: str) -> None:
    from specdistill.training.arguments import make_trainer_error

    error = make_trainer_error(ValueError(f"--some_field needs `args.other`\n{sharing}"), {})
    assert "train.some_field needs `train.other`" in str(error) and "--" not in str(error)


def test_an_error_names_the_last_of_several_names_of_a_key() -> None:
    for typed, name in (
        (["suite=a", "eval.suite=b"], "eval.suite"),
        (["eval.suite=b", "suite=a"], "suite"),
    ):
        with pytest.raises(UserError) as caught, rename_keys_as_typed(typed, SHORTHANDS):
            raise UserError(
                "eval.suite",
                got="b",
                expected="another value of eval.suite, but not of eval.suites",
            )
        assert caught.value.key == name
        assert (
            str(caught.value)
            == f"{name}: got b, expected another value of {name}, but not of eval.suites"
        )


def test_a_resource_error_names_the_typed_key() -> None:
    with (
        pytest.raises(ResourceError, match=r"^target: org/name is gone"),
        rename_keys_as_typed(["target=org/name"], SHORTHANDS),
    ):
        raise ResourceError("target.model: org/name is gone", next_step="wait")


def test_a_structured_value_is_not_repeated_in_the_advice() -> None:
    assert (
        str(make_unused_key_error("eval.tree", '{"budget": 4}', "no trees"))
        == "eval.tree: no trees. Remove eval.tree."
    )
    assert re.search(
        r"Remove a=1, or add b\.$", str(make_unused_key_error("a", 1, "no", alternative="add b"))
    )
