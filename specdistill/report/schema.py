"""What report.json holds, field by field, and so what a gate's rules may name. Printed by `python -m specdistill.report.schema`."""

import json
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, Required

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from specdistill.recipe.fields import AtLeastOne, NonNegative

Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Length = Annotated[float, Field(ge=1)]  # an acceptance length
Reasons = Annotated[
    dict[str, str], Field(description="name of an absent number -> why it is absent")
]
ConfidenceInterval = Annotated[
    list[float], Field(min_length=2, max_length=2, description="95 %, bootstrap over prompts")
]


def about(description: str) -> FieldInfo:
    """What a field is, for the printed schema."""
    return Field(description=description)


class Document(TypedDict):
    """Nothing that is not named, and no value of another type."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[misc]


class WithoutTitles(GenerateJsonSchema):
    """Names of fields say what titles would."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


class DynamicTreeDocument(Document):
    budget: Annotated[AtLeastOne, about("draft tokens verified together")]
    depth: Annotated[AtLeastOne, about("longest path, in tokens")]
    top_k: Annotated[AtLeastOne, about("children of a node")]


class StaticTreeDocument(Document):
    branching: Annotated[
        list[AtLeastOne],
        Field(min_length=1, description="children of the root, of each of these, and so on"),
    ]


TreeDocument = DynamicTreeDocument | StaticTreeDocument


class BeforeAndAfterDocument(Document):
    """Acceptance lengths."""

    before: Length
    after: Length


class ScoresDocument(Document):
    num_prompts: Annotated[AtLeastOne, about("completions scored on each side")]
    with_draft: Annotated[Share, about("share of completions that succeed")]
    without_draft: Annotated[Share, about("share of completions that succeed")]
    difference: Annotated[float, Field(ge=-1, le=1, description="with_draft - without_draft")]
    difference_ci95: NotRequired[ConfidenceInterval]
    only_with_draft: Annotated[Count, about("prompts that succeed only with the draft")]
    only_without_draft: Annotated[Count, about("prompts that succeed only without it")]
    p_value: Annotated[Share, about("of no difference, by McNemar's exact test")]


class ResultDocument(Document, total=False):
    suite: Required[Annotated[str, about("suite name")]]
    suite_version: Required[Annotated[str, about("suite version")]]
    category: Required[
        Annotated[str, about("category of the suite; a configuration's first row is `all`")]
    ]
    num_speculative_tokens: Required[Annotated[AtLeastOne, about("K")]]
    temperature: Required[Annotated[NonNegative, about("sampling temperature; 0 is greedy")]]
    batch_size: Required[
        Annotated[AtLeastOne, about("prompts decoded together; of a server, requests in flight")]
    ]
    tree: Required[TreeDocument | None]
    context_bucket: Required[
        Annotated[
            str, about("tokens that prompts were cut to; `all`: prompts as the suite has them")
        ]
    ]
    num_prompts: Required[Annotated[Count, about("prompts")]]
    num_batches: Annotated[
        AtLeastOne, about("that prompts were decoded in: intervals of times are over batches")
    ]
    num_disturbed_rounds: Annotated[
        Count, about("that took far longer than in other repetitions; not in the times")
    ]
    num_new_tokens: Required[
        Annotated[Count, about("tokens generated with the draft, stop tokens included")]
    ]
    num_rounds: Annotated[Count, about("target steps with the draft, prefill apart")]
    num_rounds_per_length: Annotated[
        list[Count], about("[K + 1] rounds of 0, 1, … draft tokens; of a length chosen online")
    ]
    num_drafts: Required[Annotated[Count, about("rounds in which something was drafted")]]
    num_draft_tokens: Required[Annotated[Count, about("draft tokens; of trees all nodes")]]
    num_accepted_tokens: Required[
        Annotated[Count, about("draft tokens that were accepted and emitted")]
    ]
    accepted_per_position: Required[
        Annotated[list[Count], about("[K] drafts whose position k was accepted")]
    ]
    num_looping: Annotated[Count, about("completions that end in a loop; loops inflate acceptance")]
    num_empty: Required[
        Annotated[
            Count,
            about("completions that ended with their first token: nothing was drafted for them"),
        ]
    ]
    mean_acceptance_length: Annotated[
        Length, about("1 + num_accepted_tokens / num_drafts; the bonus token counts")
    ]
    mean_acceptance_length_ci95: ConfidenceInterval
    tokens_per_round: Annotated[
        Length, about("1 + num_accepted_tokens / num_rounds, rounds without a draft included")
    ]
    tokens_per_round_ci95: ConfidenceInterval
    acceptance_rate: Annotated[Share, about("num_accepted_tokens / num_draft_tokens")]
    acceptance_rate_ci95: ConfidenceInterval
    acceptance_rate_per_position: Annotated[
        list[Share], about("[K] accepted_per_position / num_drafts: unconditional")
    ]
    conditional_acceptance_rate: Annotated[
        list[Share | None], about("[K] rate k / rate k-1; null where k was never reached")
    ]
    tokens_per_second: Annotated[Positive, about("with the draft, prefill included")]
    tokens_per_second_ci95: ConfidenceInterval
    baseline_tokens_per_second: Annotated[
        Positive, about("the same decoder without a draft, prefill included")
    ]
    baseline_tokens_per_second_ci95: ConfidenceInterval
    speedup: Annotated[
        Positive, about("tokens_per_second / baseline_tokens_per_second, of total times")
    ]
    speedup_ci95: ConfidenceInterval
    decode_speedup: Annotated[float, about("speedup without the prefill")]
    draft_ms: Annotated[float, about("milliseconds of draft work for one draft token")]
    verify_ms: Annotated[
        float, about("milliseconds of one target step over the draft tokens, with verification")
    ]
    baseline_step_ms: Annotated[float, about("milliseconds of one plain decoding step")]
    overhead_factor: Annotated[float, about("mean_acceptance_length / speedup")]
    predicted_speedup: Annotated[
        float, about("AL / (v + c·K); v, c: verify_ms, draft_ms / baseline_step_ms")
    ]
    prediction_gap: Annotated[
        NonNegative, about("|speedup - predicted_speedup| / predicted_speedup")
    ]
    hf_generate_tokens_per_second: Annotated[
        float, about("of generate(), greedy, on hf_generate_num_prompts")
    ]
    hf_generate_tokens_per_second_ci95: ConfidenceInterval
    hf_generate_num_prompts: Annotated[Count, about("prompts on which generate() was timed")]
    baseline_over_hf_generate: Annotated[
        float, about("baseline speed / generate()'s speed, on those prompts")
    ]
    baseline_over_hf_generate_ci95: ConfidenceInterval
    speedup_over_hf_generate: Annotated[
        float, about("over generate(), on those prompts; given where the baseline is slower")
    ]
    speedup_over_hf_generate_ci95: ConfidenceInterval
    context_ratio: Annotated[float, about("acceptance length at long context / at shorter context")]
    context_ratio_ci95: ConfidenceInterval
    vocabulary_coverage: Annotated[
        Share, about("share of the baseline's tokens that the draft can propose")
    ]
    vocabulary_coverage_ci95: ConfidenceInterval
    not_measured: Required[dict[str, str]]


PER_POSITION = (
    "accepted_per_position",
    "acceptance_rate_per_position",
    "conditional_acceptance_rate",
)  # [K] of a result


def of_every_position(row: dict[str, Any]) -> dict[str, Any]:
    """The row, whose lists by position have K numbers. Raises an error that names one of another length."""
    for name in PER_POSITION:
        if name in row and len(row[name]) != row["num_speculative_tokens"]:
            raise PydanticCustomError(
                "not_k_numbers", "{name} has not as many numbers as K", {"name": name}
            )
    return row


class RuleDocument(Document):
    metric: Annotated[str, about("field of a result row, or dotted path into the report")]
    scope: Annotated[
        dict[str, Any], about("of the row; {}: the whole suite in the main configuration")
    ]
    requirement: Annotated[
        dict[str, Any],
        Field(min_length=1, max_length=1, description="min, max, equals or max_regression"),
    ]
    confidence: Annotated[float, about("of the interval whose bound is compared")]
    severity: Annotated[Literal["fail", "warn"], about("warn: a warning, which does not decide")]
    value: Annotated[
        Any,
        about(
            "what was measured; null when there is no evidence. Of max_regression the relative change"
        ),
    ]
    ci95: ConfidenceInterval | None
    verdict: Annotated[
        Literal["passed", "failed", "inconclusive"],
        about("inconclusive: the interval includes both"),
    ]
    passed: bool
    reason: Annotated[str, about("one sentence")]
    prompts_needed: Annotated[
        AtLeastOne | None, about("that could decide an inconclusive rule, as intervals narrow")
    ]


class MeasurementDocument(Document):
    """What the measurement itself took."""

    seconds: Annotated[
        NonNegative,
        about("wall time of the run, loading apart; of all drafts that it measured together"),
    ]
    peak_memory_bytes: NotRequired[
        Annotated[Count, about("of the accelerator, or of the process without one")]
    ]


class TargetDocument(Document, total=False):
    model: Required[Annotated[str, about("pico, a folder or a Hub id")]]
    revision: Required[Annotated[str | None, about("of a Hub id")]]
    dtype: Annotated[str, about("of the weights; of a GGUF file in llama.cpp its file type")]
    quantization: Annotated[
        str, about("that the weights were rounded to when they were loaded; absent: none")
    ]
    weights: Annotated[
        str,
        about(
            "sha256 of the files' sha256, an adapter's among them; absent for servers that ran already"
        ),
    ]
    parameters: Annotated[Count, about("count")]


class GainsDocument(Document, total=False):
    """Acceptance length before the first step and after the training, of a draft that starts from existing weights."""

    steps: Required[Annotated[Count, about("after which the draft was saved")]]
    simulated: Annotated[BeforeAndAfterDocument, about("on held-out rows of the training data")]
    decoded: Annotated[BeforeAndAfterDocument, about("on the prompts of the recipe's selection")]


class EvaluationDocument(Document):
    step: Annotated[Count, about("optimizer steps before it")]
    rates: Annotated[
        list[Share],
        about("[K] simulated on held-out rows: share of drafts accepted up to position k"),
    ]


class DraftDocument(Document, total=False):
    model: Required[
        Annotated[str | None, about("folder or Hub id; null for methods without weights")]
    ]
    revision: Required[Annotated[str | None, about("of a Hub id")]]
    method: Required[Annotated[str, about("how it proposes, as vLLM names it")]]
    weights: Annotated[
        str, about("sha256 of its files' names and contents; absent for servers that ran already")
    ]
    parameters: Annotated[Count, about("count, without those shared with the target")]
    bytes: Annotated[Count, about("of its weights")]
    training: GainsDocument
    acceptance_curve: Annotated[
        list[EvaluationDocument], about("of its training, evaluation by evaluation")
    ]


class HardwareDocument(Document, total=False):
    device: Required[
        Annotated[str, about("cuda, cpu, …; server: unknown, which a server does not say")]
    ]
    name: Required[Annotated[str, about("trade name")]]
    count: Annotated[AtLeastOne, about("devices")]
    memory_bytes: Annotated[Count, about("of one device")]
    cpu: Annotated[str, about("trade name")]
    cpu_cores: Annotated[int | None, about("physical")]
    cpu_threads: Annotated[AtLeastOne, about("threads that torch computes with")]


class LookupFirstDocument(Document):
    method: Literal["ngram", "suffix"]
    min: Annotated[AtLeastOne, about("fewest tokens that agree")]
    max: Annotated[AtLeastOne, about("the longest n-gram to match")]
    draft_tokens: NotRequired[
        Annotated[AtLeastOne, about("of the draft's chain, where nothing is found")]
    ]
    draft_tree: NotRequired[TreeDocument]


class SettingsDocument(Document):
    num_speculative_tokens: Annotated[AtLeastOne, about("K")]
    temperature: Annotated[NonNegative, about("0 is greedy")]
    top_p: Annotated[float, Field(gt=0, le=1, description="nucleus")]
    top_k: Annotated[Count, about("0 keeps all")]
    max_new_tokens: Annotated[AtLeastOne, about("of a completion")]
    tree: TreeDocument | None
    draft_sampling: NotRequired[Literal["greedy", "probabilistic"]]
    drafting: NotRequired[
        Annotated[
            dict[
                str,
                bool
                | float
                | str
                | list[Any]
                | dict[str, str]
                | TreeDocument
                | LookupFirstDocument,
            ],
            about(
                "the proposer's own settings, by name; {} for a head; absent: a server does not say"
            ),
        ]
    ]
    batch_size: Annotated[
        AtLeastOne, about("prompts decoded together; of a server, requests in flight")
    ]
    compile: NotRequired[
        Annotated[bool, about("the target's passes over proposals as one graph; absent: false")]
    ]
    seed: int
    warmup: Annotated[Count, about("untimed prompts")]
    repeats: Annotated[
        AtLeastOne, about("timed repetitions; of each round the lower median counts")
    ]
    interim_analyses: NotRequired[
        Annotated[Literal[False], about("it could not stop earlier; of reports before 0.2.0")]
    ]
    target_precision: NotRequired[
        Annotated[None, about("every prompt was measured; of reports before 0.2.0")]
    ]


class EngineDocument(Document, total=False):
    """What decoded."""

    name: Required[Literal["specdistill", "vllm", "sglang", "llama.cpp"]]
    version: Required[Annotated[str, about("of the engine, as it reports it")]]
    server: Annotated[str, about("address of the server with the draft")]
    baseline_server: Annotated[
        str | None, about("address of the server without a draft; null: none")
    ]
    command: Annotated[str, about("command that started it with the draft, for this run")]
    baseline_command: Annotated[str, about("command that started it without the draft")]


class SuiteDocument(Document):
    name: Annotated[str, about("suite")]
    version: Annotated[str, about("of its content")]
    licence: Annotated[str, about("of its text")]
    source: Annotated[str, about("of its text")]
    sha256: Annotated[str, about("of its prompts")]
    num_prompts: Annotated[Count, about("that it holds, measured or not")]


class AveragesDocument(Document, total=False):
    average: Annotated[str, about("how they were averaged")]
    mean_acceptance_length: Annotated[Length, about("averaged as `average` says")]
    mean_acceptance_length_ci95: ConfidenceInterval
    speedup: Annotated[Positive, about("averaged as `average` says")]
    speedup_ci95: ConfidenceInterval


class HeadlineDocument(AveragesDocument, total=False):
    """The numbers to quote."""

    micro: Annotated[
        AveragesDocument,
        about("the whole suite's, where categories count by their drafts and their time"),
    ]


class FirstDivergenceDocument(Document, total=False):
    prompt_id: Required[Annotated[str, about("prompt")]]
    position: Annotated[Count, about("token of the completion")]
    speculative_token: int | None
    baseline_token: Annotated[int | None, about("of the reference")]
    top2_gap: Annotated[float, about("the target's top logit minus its second")]
    near_tie: bool


class SamplingTestDocument(Document):
    statistic: Annotated[float, about("chi-square")]
    p_value: Annotated[
        Share,
        about("tokens drawn with the draft follow the distribution that transformers samples from"),
    ]
    negative_control_p_value: Annotated[
        Share, about("the same test against a rule that is wrong on purpose; it must be small")
    ]
    num_cells: Annotated[int, Field(ge=2, description="outcomes compared")]
    num_draws: Annotated[Count, about("draws of each kind")]
    prompt_id: Annotated[str, about("prompt whose beginning was continued")]
    num_prompt_tokens: Annotated[Count, about("of that beginning")]


class LosslessDocument(Document, total=False):
    greedy_identical: Annotated[
        bool, about("completions are those of generate(), or of the plain server")
    ]
    prompts_checked: Required[Annotated[Count, about("prompts")]]
    first_divergence: FirstDivergenceDocument | None
    divergences: Annotated[Count, about("completions that differ")]
    near_ties: Annotated[
        Count, about("of them, where both tokens' logits are within rounding of the best")
    ]
    unexplained_divergences: Annotated[
        Count, about("divergences - near_ties; more than 0 is a bug")
    ]
    sampling_test: SamplingTestDocument


class ContextBucketDocument(Document):
    bucket: Annotated[str, about("tokens before the round: from-to")]
    num_drafts: Annotated[Count, about("drafts")]
    mean_acceptance_length: Length


class ChangeDocument(Document, total=False):
    metric: Required[Annotated[str, about("field of a result row")]]
    category: Required[Annotated[str, about("of the suite; `all`")]]
    better: Required[Literal["higher", "lower"]]
    old: Annotated[float, about("in the baseline")]
    new: Annotated[float, about("in this report")]
    change: Annotated[float, about("new / old - 1, over the prompts of both")]
    ci95: ConfidenceInterval
    reason: Annotated[str, about("why the change or its interval is absent")]


class BaselineDocument(Document):
    """The earlier report that this one was compared with, and what changed since."""

    created: Annotated[str, about("UTC, ISO 8601")]
    git_revision: NotRequired[Annotated[str, about("commit of the checkout")]]
    draft: Annotated[DraftDocument, about("its name and method")]
    changes: list[ChangeDocument]
    reason: NotRequired[Annotated[str, about("why the two could not be compared")]]


class TheoryPointDocument(Document):
    k: Annotated[Count, about("K'")]
    mean_acceptance_length: Length
    draft_passes: Annotated[Count, about("forward passes of the draft per round")]
    draft_ms: Annotated[NonNegative, about("to draft all K' tokens of a round")]
    verify_ms: Annotated[NonNegative, about("to verify them")]
    predicted_speedup: float


class TheoryDocument(Document):
    alpha: Annotated[
        Share,
        about("acceptance rate that, the same at every position, gives the acceptance length"),
    ]
    K: Annotated[AtLeastOne, about("draft tokens per round; of a tree its depth")]
    v: Annotated[float, about("cost of one verification, in plain steps")]
    c: Annotated[float, about("cost of drafting K tokens over K, in plain steps")]
    predicted: Annotated[float, about("speedup, AL / (v + c·K)")]
    best_k: Annotated[Count, about("K' with the highest predicted speedup; 0: plain decoding")]
    curve: list[TheoryPointDocument]


class QualityDocument(Document, total=False):
    """Completions scored as answers, with the draft and without: name of the metric -> scores."""

    exact_match: ScoresDocument
    pass_rate: ScoresDocument
    python_syntax: ScoresDocument


class FindingDocument(Document):
    name: Annotated[str, about("finding")]
    message: Annotated[str, about("one sentence")]


class GateDocument(Document):
    verdict: Annotated[
        Literal["passed", "failed", "inconclusive"] | None,
        about("inconclusive: the evidence cannot decide; null: not judged"),
    ]
    passed: Annotated[bool, about("whether the verdict is passed")]
    first_release: NotRequired[
        Annotated[
            bool, about("without an earlier report to compare with: regressions were not asked")
        ]
    ]
    rules: list[RuleDocument]


class ReportDocument(Document):
    schema_version: Literal[2]
    created: Annotated[str, about("UTC, ISO 8601")]
    specdistill_version: Annotated[str, about("version of the package")]
    git_revision: NotRequired[Annotated[str, about("commit of the checkout")]]
    digest: NotRequired[
        Annotated[str, about("sha256 of records and report, without gate, baseline and digest")]
    ]
    incomplete: NotRequired[
        Annotated[bool, about("the run was cut short: true fails every gate; absent: it was not")]
    ]
    measurement: NotRequired[MeasurementDocument]
    target: TargetDocument
    draft: DraftDocument
    hardware: HardwareDocument
    software: dict[str, str]
    settings: SettingsDocument
    engine: NotRequired[EngineDocument]
    suite: SuiteDocument
    headline: HeadlineDocument
    results: Annotated[
        list[Annotated[ResultDocument, AfterValidator(of_every_position)]], Field(min_length=1)
    ]
    lossless: LosslessDocument
    context: list[ContextBucketDocument]
    baseline: NotRequired[BaselineDocument]
    theory: NotRequired[TheoryDocument]
    quality: NotRequired[QualityDocument]
    findings: Annotated[
        list[FindingDocument], about("what a reader should know before quoting a number")
    ]
    gate: GateDocument
    not_measured: Reasons


@cache
def schema() -> dict[str, Any]:
    """The JSON Schema."""
    return {
        **TypeAdapter(ReportDocument).json_schema(schema_generator=WithoutTitles),
        "title": "specdistill report",
    }


if __name__ == "__main__":
    text = json.dumps(schema(), indent=2, ensure_ascii=False)
    Path(__file__).with_name("report.schema.json").write_text(f"{text}\n", encoding="utf-8")
