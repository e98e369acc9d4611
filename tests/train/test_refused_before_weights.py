"""Mistakes that files show are refused before weights are loaded, in every command."""

import json

import pytest

from specdistill.cli.main import main
from specdistill.targets.frozen import FrozenTarget
from tests.refusals import refused_key
from tests.tiny import write_target

TRAIN = (
    "train",
    "method=eagle3",
    "data.source={text}",
    "data.regenerate=null",
    "data.max_length=64",
    "output_dir={folder}/run",
)
EVAL = ("eval", "method=ngram", "suite={text}", "output_dir={folder}/report")
COMPARE = ("compare", "drafts=[ngram,suffix]", "suite={text}", "output_dir={folder}/report")
MAKE = (
    "data",
    "make",
    "method=eagle3",
    "data.source={text}",
    "data.rows={folder}/rows",
    "data.regenerate=null",
    "data.max_length=64",
)
# The command, its wrong arguments, the refused key, and text of the message.
WRONG = [
    (TRAIN, "data.source={folder}/nowhere.jsonl", "data.source", "nowhere.jsonl"),
    (TRAIN, "data.source={column}", "data.source", "with columns q"),
    (TRAIN, "data.source={csv}", "data.source", "a jsonl, json or parquet file"),
    (TRAIN, "data.source={chat}", "data.source chat.jsonl line 1", "chat template"),
    (TRAIN, "suite={folder}/nowhere.jsonl", "suite", "a suite YAML or a jsonl file"),
    (TRAIN, "publish.exports=[gguf] draft.norm_output=true", "publish.exports[0]", ""),
    (TRAIN, "publish.exports=[tensorrt]", "publish.exports[0]", "one of vllm"),
    (TRAIN, "draft.layer=2", "draft.layer", "num_layers"),
    (TRAIN, "gate=nogate", "gate", "the path of a YAML file"),
    (TRAIN, "draft.num_key_value_heads=3", "draft.num_key_value_heads", "divisor"),
    (TRAIN, "draft.vocab_size=9999", "draft.vocab_size", "the target's vocabulary"),
    (TRAIN, "draft.init={folder}", "draft.init", "a draft of method eagle3"),
    (TRAIN, "target={unsupported}", "target", "RMS norms"),
    (TRAIN, "target={folder}/nowhere", "target", "is no folder"),
    (TRAIN, "suite={ask}", "suite", "chat template"),
    (TRAIN, "suite={text} eval.max_new_tokens=5000", "suite", "5000 tokens to generate"),
    (
        TRAIN,
        "selection.suite={ask} train.metric_for_best_model=decoded_acceptance_length",
        "selection.suite",
        "chat template",
    ),
    (TRAIN, "data.max_length=100000", "data.max_length", "at most 256"),
    (TRAIN, "target={encoder}", "target", "an encoder-decoder"),
    (
        TRAIN,
        "data.columns={{text:",
        "data.columns",
        "quote it for the shell: 'data.columns={text:}'",
    ),
    (TRAIN, "suite={csv}", "suite", "pandas.read_csv"),
    (MAKE, "gate=nogate", "gate", "the path of a YAML file"),
    (MAKE, "suite={folder}/nowhere.jsonl", "suite", "a suite YAML or a jsonl file"),
    (MAKE, "target={encoder}", "target", "an encoder-decoder"),
    (EVAL, "eval.sweep.context=[100000]", "eval.sweep.context", "at most 256 tokens"),
    (EVAL, "eval.sweep.batch_size=[1,64]", "eval.batch_size", "64 for 8 prompts"),
    (MAKE, "data.source={column}", "data.source", "with columns q"),
    (MAKE, "target={unsupported}", "target", "RMS norms"),
    (EVAL, "suite={column}", "suite", "one of the columns prompt"),
    (EVAL, "suite={chat}", "suite", "chat template"),
    (EVAL, "method=eagle3 draft={folder}/nowhere", "draft", "is no folder"),
    (COMPARE, "suite={column}", "suite", "one of the columns prompt"),
    (COMPARE, "suite={chat}", "suite", "chat template"),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("target")
    write_target(folder)
    unsupported = tmp_path_factory.mktemp("unsupported")
    write_target(unsupported)
    sizes = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 128, "vocab_size": 260}
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "dtype": "float32",
        **sizes,
    }
    (unsupported / "config.json").write_text(json.dumps(config))
    encoder = tmp_path_factory.mktemp("encoder")
    write_target(encoder)
    config = {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "is_encoder_decoder": True,
    }
    (encoder / "config.json").write_text(json.dumps(config))
    files = {
        "text": "".join(f'{{"text": "one and {number} and three"}}\n' for number in range(8)),
        "column": '{"q": "hi"}\n',
        "ask": '{"user": "hi"}\n',
        "csv": "a,b\n1,2\n",
        "chat": (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content":'
            ' "b"}]}\n'
        ),
    }
    paths = {name: folder / f"{name}.{'csv' if name == 'csv' else 'jsonl'}" for name in files}
    for name, path in paths.items():
        path.write_text(files[name], encoding="utf-8")
    folders = {"folder": folder, "unsupported": unsupported, "encoder": encoder}
    return {name: str(path) for name, path in (folders | paths).items()}


@pytest.mark.parametrize(("command", "wrong", "key", "text"), WRONG)
def test_wrong_input_is_refused_before_weights(
    command: tuple[str, ...],
    wrong: str,
    key: str,
    text: str,
    places: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def load(*args: object, **options: object) -> None:
        pytest.fail("weights are loaded")

    monkeypatch.setattr(FrozenTarget, "load", load)
    keys = [
        key
        for key in command
        if key.partition("=")[0] not in {part.partition("=")[0] for part in wrong.split()}
    ]
    target_keys = [] if "target=" in wrong else ["target={folder}"]
    arguments = [part.format(**places) for part in (*keys, *target_keys, *wrong.split())]
    try:
        code = main(arguments)
    except SystemExit as ended:  # raised by a script
        code = int(ended.code or 0)
    error = capfd.readouterr().err
    assert code == 2 and refused_key(error) == key and text in error, error
