"""Plans for configs that the tests write, without weights or network."""

import io
import json
import os
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from transformers import CONFIG_MAPPING, GPT2Config, GPT2LMHeadModel, GPTNeoXConfig

from specdistill.advice.plan import estimates
from specdistill.advice.plan import plan as plans
from specdistill.advice.plan.options import ServingOptions
from specdistill.advice.plan.plan import Plan, make_plan, recommend_method
from specdistill.advice.plan.reading import read_model_config
from specdistill.cli.main import main
from specdistill.cli.plan import format_short, print_plan
from specdistill.common.errors import UserError
from specdistill.common.project import ROOT
from specdistill.methods import METHODS
from specdistill.methods.eagle3.module import build_eagle3
from specdistill.methods.recipe import Recipe
from specdistill.methods.sizes import ModelConfigInfo
from specdistill.recipe.load import load_recipe
from specdistill.targets import frozen
from specdistill.targets.frozen import FrozenTarget
from tests.refusals import refused, refused_key
from tests.targets.architectures import TRAINED, read_page, tiny_model
from tests.targets.architectures import described as described_on_page
from tests.tiny import tiny_tokenizer

pytestmark = pytest.mark.usefixtures("no_shipped_recipe")

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_1B = LLAMA_8B | {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
    "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True, "dtype": "bfloat16",
}  # fmt: skip
MIXTURE = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 1000, "num_nextn_predict_layers": 1,
    "dtype": "bfloat16",
}  # fmt: skip
EAGLE3 = LLAMA_8B | {"num_hidden_layers": 1, "draft_vocab_size": 32000}


def write_config(path: Path, config: dict[str, Any]) -> str:
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling", "text_config"])
@pytest.mark.parametrize("value", [3, "x", [1], True, {"rope_type": 3, "rope_theta": 1.0}])
def test_a_malformed_section_of_a_config_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, value: Any
) -> None:
    assert main(["plan", f"target={write_config(tmp_path, LLAMA_1B | {key: value})}"]) == 2
    assert refused_key(capsys.readouterr().err) == "target"


@pytest.fixture(scope="module")
def config_reader(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, str], ModelConfigInfo]:
    """A function that reads a config.json as a plan does, and remembers the result.

    It takes half a second to measure the KV cache of a target.
    """
    return cache(
        lambda config, key: read_model_config(
            write_config(tmp_path_factory.mktemp("model"), json.loads(config)), key=key
        )
    )


@pytest.fixture(scope="module")
def plan_for(config_reader: Callable[[str, str], ModelConfigInfo]) -> Callable[..., Plan]:
    """A function that makes the plan for a config.json, and that of a draft.

    A plan without options is made once.
    """
    plans: dict[str, Plan] = {}

    def plan(config: dict[str, Any], draft: dict[str, Any] | None = None, **options: Any) -> Plan:
        key = json.dumps([config, draft])
        if key in plans and not options:
            return plans[key]
        target = config_reader(json.dumps(config), "target.model")
        plan = make_plan(
            target, config_reader(json.dumps(draft), "draft") if draft else None, **options
        )
        if not options:
            plans[key] = plan
        return plan

    return plan


def find_row(plan: Plan, method: str) -> Any:
    return next(row for row in plan.methods if row.method == method)


def test_the_plan_for_llama_8b_has_the_numbers_computed_by_hand(plan_for: Callable[..., Plan]):
    plan = plan_for(LLAMA_8B)
    assert (plan.target["parameters"], plan.target["bytes"]) == (8_030_261_248, 16_060_522_496)
    assert plan.target["parameters_read"] == 7_504_924_672
    assert plan.target["native_mtp"] is None
    head = find_row(plan, "eagle3")
    assert (head.parameters, head.bytes) == (424_689_664, 849_379_328)
    assert head.training_tokens == 532_000 * 950
    assert head.disk_bytes == head.training_tokens * 32 * 1024  # four tensors of 4096 in bfloat16
    assert (plan.target["kv_bytes"], head.kv_bytes) == (
        128 * 1024,
        4 * 1024,
    )  # 32 layers and one, 8 heads of 128, keys and values
    # For each token, the target's pass takes 15.0 GFLOP, and each of five unrolled steps 6 · 0.374.
    assert head.training_hours == pytest.approx(505.4e6 * 26.24e9 / 4e14 / 3600, rel=1e-3)
    assert head.low.acceptance_length == pytest.approx(2.26)  # with the K of the publication
    # 2.26 / (1.18 + 3 · (0.0499 + 3/32))
    assert head.low.speedup == pytest.approx(1.403, abs=2e-3)
    assert plan.recommendation["method"] == "dspark"
    assert plan.recommendation["start"].startswith(
        "specdistill train recipe=small/dspark target.model="
    )
    assert (
        "draft.num_layers=5 draft.block_size=8" in plan.recommendation["start"]
    )  # the shape is that of the row, not of the recipe
    small = find_row(plan, "draft_model")
    # The draft has two of the target's layers between embedding and head. It reads 0.962B weights,
    # the target 7.505B; the KV caches of 2,048 tokens take 8 and 128 KiB for each token.
    assert small.parameters == 2 * 218_112_000 + 2 * 525_336_576 + 4096
    assert small.step_ratio == pytest.approx(
        (2 * 961_564_672 + 2048 * 8192) / (2 * 7_504_924_672 + 2048 * 131_072)
    )


LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64
}  # fmt: skip
GPT_OSS_120B = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "vocab_size": 201088,
    "num_local_experts": 128, "num_experts_per_tok": 4, "tie_word_embeddings": False,
    "dtype": "bfloat16",
}  # fmt: skip


ON_THE_PAGE = {"Llama-3.1-8B": LLAMA_8B, "Llama-3.3-70B": LLAMA_70B, "gpt-oss-120b": GPT_OSS_120B}
# The names of the same targets in the page's table of launch configurations.
SIZES_ON_THE_PAGE = {"Llama-3.1-8B": "8B", "Llama-3.3-70B": "70B", "gpt-oss-120b": "120B mixture"}


@pytest.mark.long  # counts the operations of a step one by one
@pytest.mark.parametrize("name", ON_THE_PAGE)
def test_the_page_on_scale_has_the_numbers_of_the_plan(
    plan_for: Callable[..., Plan], name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        plans, "METHODS", {method: METHODS[method] for method in ("eagle3", "ngram")}
    )  # the page has the first
    plan = plan_for(ON_THE_PAGE[name], computed=True)
    row = find_row(plan, "eagle3")
    _, *trained = (format_short(size, "B") for size in row.training_memory.values())
    caches = f"{format_short(plan.target['kv_bytes'], 'B')}, {format_short(row.kv_bytes, 'B')}"
    numbers = [
        format_short(row.parameters),
        *trained,
        f"{row.training_hours:.0f}",
        caches,
        format_short(row.disk_bytes, "B"),
    ]
    line = " | ".join([name, format_short(plan.target["bytes"], "B"), *numbers])
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    assert f"| {line} |\n" in page

    launch = row.training_launch
    assert launch is not None
    (launch_line,) = re.findall(rf"^\| {SIZES_ON_THE_PAGE[name]} \|.*", page, re.MULTILINE)
    cells = launch_line.strip("| ").split(" | ")
    assert cells[1] == f"`{launch.configuration}`"
    assert cells[-1] == format_short(launch.device_bytes, "B")


def test_a_computed_step_replaces_the_rough_estimate(
    plan_for: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
):
    step = SimpleNamespace(peak=20 * 10**9, traffic=4 * 10**11, flops=10**14)
    monkeypatch.setattr(estimates, "count_training_step", lambda *of, **shape: step)
    plan = plan_for(LLAMA_8B, computed=True)
    row = find_row(plan, "eagle3")
    assert row.training_memory["activations"] == step.peak
    # A step has 8,192 tokens. The target's layers take 2 · 6.980e9 operations for each of them. All
    # operations run at half of 989e12 per second, and 400 GB move at 80 % of 3.35e12 bytes per
    # second.
    rate = 8192 / ((2 * (7_504_924_672 - 128_256 * 4096) * 8192 + 1e14) / 494.5e12 + 4e11 / 2.68e12)
    assert row.training_hours == pytest.approx(532_000 * 950 / rate / 3600)
    # No step is computed for a draft model.
    assert find_row(plan, "draft_model").training_memory["activations"] != step.peak


def test_only_attention_layers_have_a_growing_cache(plan_for: Callable[..., Plan]):
    # One of four layers attends, with two heads of 256.
    assert plan_for(MIXTURE).target["kv_bytes"] == 2 * 2 * 256 * 2


def test_a_fresh_mtp_layer_has_no_published_acceptance(plan_for: Callable[..., Plan]):
    row = find_row(plan_for(LLAMA_8B), "mtp")
    assert row.available and "num_nextn_predict_layers" in row.note
    assert row.alphas is row.low is row.high is row.training_tokens is None


def test_a_fresh_mtp_layer_that_no_engine_decodes_with_is_marked(plan_for: Callable[..., Plan]):
    plan = plan_for(LLAMA_8B)
    row = find_row(plan, "mtp")
    assert not row.is_served and row.note.endswith("no engine serves such a layer for llama")
    with redirect_stdout(io.StringIO()) as output:
        print_plan(plan, [], None, details=False)
    assert "no engine" in next(
        line for line in output.getvalue().splitlines() if line.startswith("mtp")
    )
    assert find_row(plan_for(MIXTURE), "mtp").is_served and find_row(plan, "eagle3").is_served


def test_a_tied_head_counts_as_weights_read(plan_for: Callable[..., Plan]):
    plan = plan_for(QWEN3_06B)
    assert plan.target["parameters"] == plan.target["parameters_read"] == 596_049_920


@pytest.mark.parametrize("nested", [False, True])
def test_native_layers_are_found_by_their_key_and_come_first(
    plan_for: Callable[..., Plan], nested: bool
):
    config = MIXTURE
    if nested:
        text = {
            "model_type": "qwen3_5_text",
            "mtp_num_hidden_layers": 1,
            "vocab_size": 1000,
            "num_hidden_layers": 4,
        }
        text |= {"hidden_size": 2048, "intermediate_size": 4096}
        config = {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "text_config": text,
        }
    plan = plan_for(config, serving=ServingOptions(context=512))
    key = "mtp_num_hidden_layers" if nested else "num_nextn_predict_layers"
    assert plan.target["native_mtp"] == {"key": key, "layers": 1}
    assert find_row(plan, "mtp").note == f"the target's own ({key}: 1)"
    assert plan.recommendation["method"] == "mtp"
    longer = make_plan(
        read_model_config(plan.target["model"], key="target.model"),
        serving=ServingOptions(context=4096),
    )
    # These layers are so small that the caches are more bytes than the weights.
    assert longer.recommendation["method"] == "ngram"
    assert ("has no dtype" in " ".join(plan.warnings)) == nested


def test_the_command_trains_what_the_row_describes(plan_for: Callable[..., Plan]):
    plan = plan_for(LLAMA_8B)
    row = find_row(plan, "draft_model")
    rows = [
        replace(row, low=find_row(plan, "ngram").high, high=find_row(plan, "ngram").high),
        *(
            replace(other, low=None, high=None)
            for other in plan.methods
            if other.method not in ("draft_model", "ngram")
        ),
    ]
    command = recommend_method([*rows, find_row(plan, "ngram")], plan.target)["start"]
    recipe = load_recipe(Recipe, command.split()[2:])
    assert (recipe.method, recipe.draft.init, recipe.draft.num_layers) == (
        "draft_model",
        "layers",
        row.num_layers,
    )


KINDS = {row.cells[0]: row for row in read_page()}


# These classes are long tests, because there are many.
LARGE = [
    pytest.param(kind, marks=pytest.mark.long)
    for kind in ("cohere", "gpt_neox", "gemma", "olmo3", "zamba2")
]


@pytest.mark.parametrize("kind", ["granite", "gemma2", "gpt2", *LARGE])
def test_a_head_is_planned_where_it_can_be_made(plan_for: Callable[..., Plan], kind: str):
    """Classes with scaled or capped logits, or other names of layers, are planned at full size.

    docs/targets.md says the same of them, found with small models.
    """
    plan = plan_for(CONFIG_MAPPING[kind]().to_dict())
    available = [row.method for row in plan.methods if row.available and row.method in TRAINED]
    assert described_on_page(available) == KINDS[kind].cells[3]


def test_a_head_that_cannot_be_made_has_the_reason_that_training_gives(
    plan_for: Callable[..., Plan], tmp_path: Path
):
    config = GPT2Config(n_layer=2, n_embd=64, n_head=2)
    plan = plan_for(config.to_dict())
    target = FrozenTarget(GPT2LMHeadModel(config), tiny_tokenizer(), name=plan.target["model"])
    with pytest.raises(UserError) as refused:
        build_eagle3(target)
    assert find_row(plan, "eagle3").note == str(refused.value)


def test_layers_are_counted_whatever_their_name():
    config = GPTNeoXConfig(
        num_hidden_layers=3, hidden_size=128, num_attention_heads=4, intermediate_size=96
    )
    target = ModelConfigInfo("neox", "target.model", None, None, config.to_dict(), config, None)
    layers = target.weightless.layers
    assert len(layers) == 3
    assert {parameter.shape for parameter in layers[-1].mlp.dense_4h_to_h.parameters()} == {
        (128, 96),
        (128,),
    }


@pytest.mark.parametrize("kind", ["bert", "mamba"])
def test_plan_and_decoding_refuse_a_target_with_the_same_message(
    plan_for: Callable[..., Plan], tmp_path: Path, kind: str
):
    model, name = tiny_model(kind), write_config(tmp_path, tiny_model(kind).config.to_dict())
    with pytest.raises(UserError) as by_plan:
        make_plan(read_model_config(name, key="target.model"))
    with pytest.raises(UserError) as by_decoding:
        FrozenTarget(model, tiny_tokenizer(), name=name)
    assert str(by_plan.value) == str(by_decoding.value)
    assert KINDS[kind].cells[-1] in str(by_plan.value)


def test_a_target_that_is_too_large_to_try_is_planned_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(frozen, "MAX_TINY_PARAMETERS", 0)
    plan = make_plan(read_model_config(write_config(tmp_path, LLAMA_1B), key="target.model"))
    (warning,) = plan.warnings
    assert "LlamaForCausalLM" in warning
    assert [row.method for row in plan.methods if row.available] == [
        "pard",
        "draft_model",
        "ngram",
        "suffix",
    ]


def test_quantised_weights_are_warned_of(plan_for: Callable[..., Plan]):
    plan = plan_for(
        QWEN3_06B | {"num_hidden_layers": 2, "quantization_config": {"quant_method": "fp8"}}
    )
    assert "fp8" in plan.warnings[0]


@pytest.mark.parametrize(
    ("config", "method"),
    [
        (EAGLE3, "eagle3"),
        (EAGLE3 | {"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({key: value for key, value in EAGLE3.items() if key != "draft_vocab_size"}, "eagle"),
        (LLAMA_1B, "draft_model"),
        (LLAMA_1B | {"spd_type": "pard", "pard_token": 128255}, "pard"),
    ],
)
def test_a_draft_that_is_given_takes_its_method_s_row(
    plan_for: Callable[..., Plan], config: dict[str, Any], method: str
):
    plan = plan_for(LLAMA_8B, config)
    assert [row.method for row in plan.methods if row.draft] == [method]
    if method == "eagle3":
        assert f"target={plan.target['model']} draft=" in plan.recommendation["start"]
    if method == "draft_model":
        row = find_row(plan, method)
        assert row.parameters == 1_235_814_400
        # Draft and target read 1.2358B and 7.5049B weights, and the KV caches of 2,048 tokens,
        # which take 32 and 128 KiB for each token.
        read = [
            2 * weights + 2048 * cache * 1024
            for weights, cache in ((1_235_814_400, 32), (7_504_924_672, 128))
        ]
        assert row.step_shares == {"weights": pytest.approx(read[0] / read[1]), "layers": 0.5}


@pytest.mark.long  # counts the caches of 48 layers
def test_a_draft_larger_than_its_target_cannot_pay(plan_for: Callable[..., Plan]):
    plan = plan_for(LLAMA_1B, LLAMA_8B)
    row = find_row(plan, "draft_model")
    assert row.step_ratio == pytest.approx(6.018, abs=1e-3) and row.high.speedup < 1
    assert plan.recommendation["method"] != "draft_model" and plan.warnings == []


@pytest.mark.parametrize(
    ("draft", "got"),
    [
        (QWEN3_06B, "151,936"),
        (EAGLE3 | {"vocab_size": 128000}, "128,000"),
        (EAGLE3 | {"target_hidden_size": 8192}, "8,192"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
    ],
)
def test_a_draft_of_another_target_is_refused(
    plan_for: Callable[..., Plan], draft: dict[str, Any], got: str
):
    with refused("draft", holds=got):
        plan_for(LLAMA_8B, draft)


def test_another_padding_of_the_vocabulary_is_only_warned_of(plan_for: Callable[..., Plan]):
    plan = plan_for(LLAMA_8B, LLAMA_1B | {"vocab_size": 128384})
    assert "128,384" in plan.warnings[0]


@pytest.mark.parametrize(
    ("config", "got"),
    [
        (
            {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
            "T5ForConditionalGeneration",
        ),
        ({"hidden_size": 3}, "model_type"),
        (LLAMA_8B | {"hidden_size": "wide"}, "hidden_size"),
        (LLAMA_8B | {"num_hidden_layers": 0}, "num_hidden_layers 0"),
    ],
)
def test_an_unusable_target_is_refused(
    plan_for: Callable[..., Plan], config: dict[str, Any], got: str
):
    with refused("target.model", holds=got):
        plan_for(config)


def test_a_folder_without_a_config_is_refused(tmp_path: Path):
    with refused("target.model", tmp_path):
        read_model_config(str(tmp_path), key="target.model")


@pytest.mark.parametrize(
    "config",
    [
        MIXTURE,
        # Each of these counts the caches of 32 layers.
        pytest.param(LLAMA_8B, marks=pytest.mark.long),
        pytest.param(
            LLAMA_8B | {"quantization_config": {"quant_method": "fp8"}}, marks=pytest.mark.long
        ),
    ],
)
def test_a_plan_fits_one_screen_and_recommends_first(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    target = Path("models/llama-3.1-8b")  # a name of usual length
    target.mkdir(parents=True)
    # With this memory the 8B target trains in several processes.
    serving = ServingOptions(memory_gb=24.0, context=512)
    plan = make_plan(
        read_model_config(write_config(target, config), key="target.model"), None, serving=serving
    )

    def render_plan(width: int, details: bool) -> str:
        output = io.StringIO()
        with redirect_stdout(output), mock.patch.dict(os.environ, {"COLUMNS": str(width)}):
            print_plan(plan, [], "not asked: hub=false", details=details)
        return output.getvalue()

    for width, height in ((80, 47), (100, 41)):
        screen, detailed = render_plan(width, False), render_plan(width, True)
        lines = screen.splitlines()
        assert lines[0].startswith(f"Recommended: {plan.recommendation['method']}, ")
        assert len(lines) <= height and max(map(len, lines)) <= width and "…" not in screen
        unwrapped = " ".join(screen.replace("\\\n", " ").split())
        for (
            command
        ) in f"{plan.recommendation['start']}\n{plan.recommendation['lookup']}".splitlines():
            assert command in unwrapped
        first = lines.index("") + 3
        assert [line.split()[0] for line in lines[first : first + len(plan.methods)]] == [
            row.method for row in plan.methods
        ]
        assert (
            set(lines) - set(detailed.splitlines()) <= set(lines[-3:])
            and "to serve: " in detailed
            and "to serve: " not in screen
        )
        (served,) = re.findall("to serve: .*?: (.*?): ", " ".join(detailed.split()))
        parts = [float(size) for size in re.findall(r"([\d.]+) GiB", served)]
        assert parts[-1] == pytest.approx(sum(parts[:-1]), rel=0.01)
        assert not [
            line
            for line in detailed.splitlines()
            if re.search(r" [kMGT]B\b", line) and re.search(r" [KMGT]iB\b", line)
        ]


@pytest.mark.parametrize(
    ("number", "unit", "said"),
    [
        (0, "", "0"),
        (999, "", "999"),
        (8.03e9, "", "8.03B"),
        (999_600, "", "1M"),
        (424_689_664, "B", "425 MB"),
        (1.34e12, "B", "1.34 TB"),
    ],
)
def test_numbers_are_formatted_with_three_digits(number: float, unit: str, said: str):
    assert format_short(number, unit) == said
