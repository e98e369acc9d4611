"""The fields of report.json, and so the metrics that a gate's rules may name.

`python -m specdistill.evaluation.report.schema` writes them as report.schema.json.
"""

import json
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, Required

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, with_config
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from specdistill.recipe.fields import AtLeastOne, NonNegative

# Types of numbers. The schema refuses a value outside of its range, so a report with a speed of 0,
# or a share above 1, is never written.
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


def describe_field(description: str) -> FieldInfo:
    """Return a pydantic field with a description, which the JSON Schema and the docs then show."""
    # The annotation gives mypy the type, because pydantic declares that `Field` returns Any.
    field: FieldInfo = Field(description=description)
    return field


@with_config(ConfigDict(extra="forbid", strict=True))
class DocumentBase(TypedDict):
    """The base of the parts of report.json; it refuses unknown keys and values of other types."""


class UntitledSchema(GenerateJsonSchema):
    """A generator of JSON Schema that omits titles, as names of fields say the same."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Return False, so that no field gets a title. Pydantic calls this method."""
        return False


class DynamicTreeDocument(DocumentBase):
    """The keys of a dynamic tree (EAGLE-2)."""

    budget: Annotated[AtLeastOne, describe_field("draft tokens verified together")]
    depth: Annotated[AtLeastOne, describe_field("longest path, in tokens")]
    top_k: Annotated[AtLeastOne, describe_field("children of a node")]


class StaticTreeDocument(DocumentBase):
    """The keys of a static tree."""

    branching: Annotated[
        list[AtLeastOne],
        Field(min_length=1, description="children of the root, of each of these, and so on"),
    ]


TreeDocument = DynamicTreeDocument | StaticTreeDocument


class BeforeAndAfterDocument(DocumentBase):
    """Acceptance lengths before and after training."""

    before: Length
    after: Length


class ScoresDocument(DocumentBase):
    """The scores of a metric of quality, with the draft and without it."""

    num_prompts: Annotated[AtLeastOne, describe_field("completions scored on each side")]
    with_draft: Annotated[Share, describe_field("share of completions that succeed")]
    without_draft: Annotated[Share, describe_field("share of completions that succeed")]
    difference: Annotated[float, Field(ge=-1, le=1, description="with_draft - without_draft")]
    difference_ci95: NotRequired[ConfidenceInterval]
    only_with_draft: Annotated[Count, describe_field("prompts that succeed only with the draft")]
    only_without_draft: Annotated[Count, describe_field("prompts that succeed only without it")]
    p_value: Annotated[Share, describe_field("p-value of no difference, by McNemar's exact test")]


class ResultDocument(DocumentBase, total=False):
    """A row of the results: a configuration, and the whole suite or a category."""

    # The identity of the row: suite, category and configuration. `records.Configuration` has the
    # same fields.
    suite: Required[Annotated[str, describe_field("suite name")]]
    suite_version: Required[Annotated[str, describe_field("suite version")]]
    category: Required[
        Annotated[
            str, describe_field("category of the suite; a configuration's first row is `all`")
        ]
    ]
    num_speculative_tokens: Required[Annotated[AtLeastOne, describe_field("K")]]
    temperature: Required[
        Annotated[NonNegative, describe_field("sampling temperature; 0 is greedy")]
    ]
    batch_size: Required[
        Annotated[
            AtLeastOne, describe_field("prompts decoded together; for a server: requests in flight")
        ]
    ]
    tree: Required[TreeDocument | None]
    context_bucket: Required[
        Annotated[
            str,
            describe_field("tokens that prompts were cut to; `all`: prompts as the suite has them"),
        ]
    ]

    # Counts of prompts, rounds, drafts and tokens.
    num_prompts: Required[Annotated[Count, describe_field("prompts")]]
    num_batches: Annotated[
        AtLeastOne,
        describe_field(
            "batches in which prompts were decoded; intervals of times are over batches"
        ),
    ]
    num_disturbed_rounds: Annotated[
        Count,
        describe_field(
            "rounds that took far longer than in other repetitions; the times leave them out"
        ),
    ]
    num_new_tokens: Required[
        Annotated[Count, describe_field("tokens generated with the draft, stop tokens included")]
    ]
    num_rounds: Annotated[
        Count, describe_field("steps of the target with the draft, without the prefill")
    ]
    num_drafts: Required[Annotated[Count, describe_field("rounds in which something was drafted")]]
    num_draft_tokens: Required[
        Annotated[Count, describe_field("draft tokens; for trees, all nodes")]
    ]
    num_accepted_tokens: Required[
        Annotated[Count, describe_field("draft tokens that were accepted and emitted")]
    ]
    accepted_per_position: Required[
        Annotated[list[Count], describe_field("[K] drafts whose position k was accepted")]
    ]
    emitted_per_position: Annotated[
        list[Count], describe_field("[K + 1] rounds that emitted at least k tokens")
    ]
    num_looping: Annotated[
        Count, describe_field("completions that end in a loop; loops inflate acceptance")
    ]
    num_empty: Required[
        Annotated[
            Count,
            describe_field(
                "completions that ended with their first token: nothing was drafted for them"
            ),
        ]
    ]

    # Acceptance. `statistics.metrics` has the formulas of this and the following metrics.
    mean_acceptance_length: Annotated[
        Length,
        describe_field("tokens emitted in rounds / num_rounds, rounds without a draft included"),
    ]
    mean_acceptance_length_ci95: ConfidenceInterval
    acceptance_length_vllm: Annotated[
        Length, describe_field("1 + num_accepted_tokens / num_drafts, as vLLM's counters give it")
    ]
    acceptance_length_vllm_ci95: ConfidenceInterval
    acceptance_rate: Annotated[Share, describe_field("num_accepted_tokens / num_draft_tokens")]
    acceptance_rate_ci95: ConfidenceInterval
    acceptance_rate_per_position: Annotated[
        list[Share | None],
        describe_field("[K] unconditional: the product of the conditional rates up to k"),
    ]
    conditional_acceptance_rate: Annotated[
        list[Share | None],
        describe_field(
            "[K] of the drafts that reached position k: share accepted there; null: none reached it"
        ),
    ]

    # Speed with the draft and without it.
    tokens_per_second: Annotated[Positive, describe_field("with the draft, prefill included")]
    tokens_per_second_ci95: ConfidenceInterval
    baseline_tokens_per_second: Annotated[
        Positive, describe_field("the same decoder without a draft, prefill included")
    ]
    baseline_tokens_per_second_ci95: ConfidenceInterval
    speedup: Annotated[
        Positive, describe_field("tokens_per_second / baseline_tokens_per_second, of total times")
    ]
    speedup_ci95: ConfidenceInterval
    decode_speedup: Annotated[float, describe_field("speedup without the prefill")]

    # Times of the steps, and the speedup that they predict.
    draft_ms: Annotated[float, describe_field("milliseconds of draft work for one draft token")]
    verify_ms: Annotated[
        float,
        describe_field("milliseconds of one target step over the draft tokens, with verification"),
    ]
    baseline_step_ms: Annotated[float, describe_field("milliseconds of one plain decoding step")]
    overhead_factor: Annotated[float, describe_field("mean_acceptance_length / speedup")]
    predicted_speedup: Annotated[
        float, describe_field("AL / (v + c·K); v, c: verify_ms, draft_ms / baseline_step_ms")
    ]
    prediction_gap: Annotated[
        NonNegative, describe_field("|speedup - predicted_speedup| / predicted_speedup")
    ]

    # Comparison with transformers' `generate()`, on a part of the prompts.
    hf_generate_tokens_per_second: Annotated[
        float,
        describe_field(
            "speed of generate() with the same sampling, on hf_generate_num_prompts prompts"
        ),
    ]
    hf_generate_tokens_per_second_ci95: ConfidenceInterval
    hf_generate_num_prompts: Annotated[
        Count, describe_field("prompts on which generate() was timed")
    ]
    baseline_over_hf_generate: Annotated[
        float, describe_field("baseline speed / generate()'s speed, on those prompts")
    ]
    baseline_over_hf_generate_ci95: ConfidenceInterval
    speedup_over_hf_generate: Annotated[
        float,
        describe_field(
            "speedup over generate(), on those prompts; given if the baseline is slower"
        ),
    ]
    speedup_over_hf_generate_ci95: ConfidenceInterval

    # Limits of the draft: long contexts, and tokens outside of its vocabulary.
    context_ratio: Annotated[
        float, describe_field("acceptance length at long context / at shorter context")
    ]
    context_ratio_ci95: ConfidenceInterval
    vocabulary_coverage: Annotated[
        Share, describe_field("share of the baseline's tokens that the draft can propose")
    ]
    vocabulary_coverage_ci95: ConfidenceInterval

    # The reasons of absent fields, by their names.
    not_measured: Required[dict[str, str]]


# The fields of a result row that are lists of K numbers, one for each position in the draft.
PER_POSITION = (
    "accepted_per_position",
    "acceptance_rate_per_position",
    "conditional_acceptance_rate",
)


def check_positions(row: dict[str, Any]) -> dict[str, Any]:
    """Check that each list by position in a row of the report has K numbers, and return the row.

    K is the number of draft tokens per round, so such a list has one number for each of them.

    Raises:
        PydanticCustomError: for a list of another length, which the error names.
    """
    for name in PER_POSITION:
        if name in row and len(row[name]) != row["num_speculative_tokens"]:
            raise PydanticCustomError(
                "not_k_numbers", "{name} has not as many numbers as K", {"name": name}
            )
    return row


class RuleDocument(DocumentBase):
    """A rule of the gate, with what it measured and its verdict."""

    metric: Annotated[str, describe_field("field of a result row, or dotted path into the report")]
    scope: Annotated[
        dict[str, Any],
        describe_field(
            "keys of the row that is tested; {}: the whole suite in the main configuration"
        ),
    ]
    requirement: Annotated[
        dict[str, Any],
        Field(min_length=1, max_length=1, description="min, max, equals or max_regression"),
    ]
    confidence: Annotated[
        float, describe_field("confidence level of the interval whose bound is compared")
    ]
    severity: Annotated[
        Literal["fail", "warn"], describe_field("warn: a warning, which does not decide")
    ]
    value: Annotated[
        Any,
        describe_field(
            "what was measured; for max_regression, the relative change; null: no evidence"
        ),
    ]
    ci95: ConfidenceInterval | None
    verdict: Annotated[
        Literal["passed", "failed", "inconclusive"],
        describe_field("inconclusive: the interval includes values that pass and values that fail"),
    ]
    passed: bool
    reason: Annotated[str, describe_field("one sentence")]
    prompts_needed: Annotated[
        AtLeastOne | None,
        describe_field("number of prompts that could decide an inconclusive rule"),
    ]


class MeasurementDocument(DocumentBase):
    """The resources that the measurement took."""

    seconds: Annotated[
        NonNegative,
        describe_field(
            "wall time of the run, without loading; for drafts measured together: of all of them"
        ),
    ]
    peak_memory_bytes: NotRequired[
        Annotated[Count, describe_field("peak of the accelerator; without one, of the process")]
    ]


class TargetDocument(DocumentBase, total=False):
    """The target: its name, its weights and their dtype."""

    model: Required[Annotated[str, describe_field("pico, a folder or a Hub id")]]
    revision: Required[Annotated[str | None, describe_field("revision of a Hub id")]]
    dtype: Annotated[
        str, describe_field("dtype of the weights; for a GGUF file in llama.cpp, its file type")
    ]
    quantization: Annotated[
        str, describe_field("format to which the weights were rounded at load; absent: none")
    ]
    weights: Annotated[
        str,
        describe_field(
            "sha256 of the files' sha256, including an adapter's; absent for servers that ran"
            " already"
        ),
    ]
    parameters: Annotated[Count, describe_field("number of parameters")]


class GainsDocument(DocumentBase, total=False):
    """Acceptance length before and after training, of a draft that starts from given weights."""

    steps: Required[
        Annotated[Count, describe_field("training steps after which the draft was saved")]
    ]
    simulated: Annotated[
        BeforeAndAfterDocument, describe_field("on held-out rows of the training data")
    ]
    decoded: Annotated[
        BeforeAndAfterDocument, describe_field("on the prompts of the recipe's selection")
    ]


class EvaluationDocument(DocumentBase):
    """An evaluation during training."""

    step: Annotated[Count, describe_field("optimizer steps before it")]
    rates: Annotated[
        list[Share],
        describe_field("[K] simulated on held-out rows: share of drafts accepted up to position k"),
    ]


class DraftDocument(DocumentBase, total=False):
    """The draft: its method, its weights and its training."""

    model: Required[
        Annotated[str | None, describe_field("folder or Hub id; null for methods without weights")]
    ]
    revision: Required[Annotated[str | None, describe_field("revision of a Hub id")]]
    method: Required[Annotated[str, describe_field("how it proposes, as vLLM names it")]]
    weights: Annotated[
        str,
        describe_field(
            "sha256 of its files' names and contents; absent for servers that ran already"
        ),
    ]
    parameters: Annotated[
        Count, describe_field("number of parameters, without those shared with the target")
    ]
    bytes: Annotated[Count, describe_field("size of its weights")]
    training: GainsDocument
    acceptance_curve: Annotated[
        list[EvaluationDocument], describe_field("each evaluation of its training")
    ]


class HardwareDocument(DocumentBase, total=False):
    """The machine that measured."""

    device: Required[
        Annotated[
            str, describe_field("cuda, cpu, …; server: a server, which does not say its device")
        ]
    ]
    name: Required[Annotated[str, describe_field("trade name")]]
    count: Annotated[AtLeastOne, describe_field("number of devices")]
    memory_bytes: Annotated[Count, describe_field("memory of one device")]
    cpu: Annotated[str, describe_field("trade name")]
    cpu_cores: Annotated[int | None, describe_field("physical cores")]
    cpu_threads: Annotated[AtLeastOne, describe_field("threads that torch computes with")]


class LookupFirstDocument(DocumentBase):
    """The keys of a lookup in front of the draft."""

    method: Literal["ngram", "suffix"]
    min: Annotated[AtLeastOne, describe_field("fewest tokens that agree")]
    max: Annotated[AtLeastOne, describe_field("the longest n-gram to match")]
    draft_tokens: NotRequired[
        Annotated[
            AtLeastOne,
            describe_field("length of the draft's chain, where the lookup finds nothing"),
        ]
    ]
    draft_tree: NotRequired[TreeDocument]


class SettingsDocument(DocumentBase):
    """The settings of the main configuration."""

    num_speculative_tokens: Annotated[AtLeastOne, describe_field("K")]
    temperature: Annotated[NonNegative, describe_field("0 is greedy")]
    top_p: Annotated[float, Field(gt=0, le=1, description="nucleus sampling (top-p); 1: off")]
    top_k: Annotated[Count, describe_field("top-k sampling; 0: off")]
    max_new_tokens: Annotated[AtLeastOne, describe_field("most tokens of a completion")]
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
            describe_field(
                "the proposer's own settings, by name; {} for a head; absent: a server does not say"
            ),
        ]
    ]

    # How the prompts were decoded and timed.
    batch_size: Annotated[
        AtLeastOne, describe_field("prompts decoded together; for a server: requests in flight")
    ]
    compile: NotRequired[
        Annotated[
            bool,
            describe_field(
                "whether the target's passes over proposals run as one graph; absent: false"
            ),
        ]
    ]
    seed: int
    warmup: Annotated[Count, describe_field("untimed prompts")]
    repeats: Annotated[
        AtLeastOne, describe_field("timed repetitions; of each round the lower median counts")
    ]
    quick: NotRequired[
        Annotated[bool, describe_field("a quick look, which no gate passes; absent: false")]
    ]

    # Earlier versions wrote these two keys. They are read, so that old reports can be compared.
    interim_analyses: NotRequired[
        Annotated[
            Literal[False],
            describe_field("only before 0.2.0: the measurement could not stop earlier"),
        ]
    ]
    target_precision: NotRequired[
        Annotated[None, describe_field("only before 0.2.0: every prompt was measured")]
    ]


class EngineDocument(DocumentBase, total=False):
    """The engine that decoded."""

    name: Required[Literal["specdistill", "vllm", "sglang", "llama.cpp"]]
    version: Required[Annotated[str, describe_field("version that the engine reports")]]
    server: Annotated[str, describe_field("address of the server with the draft")]
    baseline_server: Annotated[
        str | None, describe_field("address of the server without a draft; null: none")
    ]
    command: Annotated[str, describe_field("command that started it with the draft, for this run")]
    baseline_command: Annotated[str, describe_field("command that started it without the draft")]


class SuiteDocument(DocumentBase):
    """The suite: its version, its licence and its hash."""

    name: Annotated[str, describe_field("name of the suite")]
    version: Annotated[str, describe_field("version of its content")]
    licence: Annotated[str, describe_field("licence of its text")]
    source: Annotated[str, describe_field("source of its text")]
    sha256: Annotated[str, describe_field("hash of its prompts' file")]
    num_prompts: Annotated[Count, describe_field("prompts that it holds, measured or not")]


class AveragesDocument(DocumentBase, total=False):
    """The averages over categories, and over all prompts."""

    average: Annotated[str, describe_field("how they were averaged")]
    mean_acceptance_length: Annotated[Length, describe_field("averaged as `average` says")]
    mean_acceptance_length_ci95: ConfidenceInterval
    speedup: Annotated[Positive, describe_field("averaged as `average` says")]
    speedup_ci95: ConfidenceInterval


class HeadlineDocument(AveragesDocument, total=False):
    """The numbers to quote."""

    micro: Annotated[
        AveragesDocument,
        describe_field("averages over the whole suite, in which longer completions count more"),
    ]


class FirstDivergenceDocument(DocumentBase, total=False):
    """The first difference between a completion and its reference."""

    prompt_id: Required[Annotated[str, describe_field("id of the prompt")]]
    position: Annotated[Count, describe_field("index of the token in the completion, from 0")]
    speculative_token: int | None
    baseline_token: Annotated[int | None, describe_field("token of the reference")]
    top2_gap: Annotated[float, describe_field("the target's top logit minus its second")]
    near_tie: bool


class SamplingTestDocument(DocumentBase):
    """The test that sampled tokens follow the target's distribution."""

    statistic: Annotated[float, describe_field("chi-square")]
    p_value: Annotated[
        Share,
        describe_field(
            "p-value of the hypothesis that tokens drawn with the draft follow the distribution"
            " that transformers samples from"
        ),
    ]
    negative_control_p_value: Annotated[
        Share,
        describe_field("the same test against a rule that is wrong on purpose; it must be small"),
    ]
    num_cells: Annotated[int, Field(ge=2, description="outcomes compared")]
    num_draws: Annotated[
        Count, describe_field("draws by the right rule, and as many by the wrong one")
    ]
    prompt_id: Annotated[str, describe_field("prompt whose beginning was continued")]
    num_prompt_tokens: Annotated[Count, describe_field("tokens of that beginning")]


class LosslessDocument(DocumentBase, total=False):
    """The checks that the draft does not change the output."""

    greedy_identical: Annotated[
        bool, describe_field("completions are those of generate(), or of the plain server")
    ]
    prompts_checked: Required[
        Annotated[Count, describe_field("prompts whose outputs were compared")]
    ]
    first_divergence: FirstDivergenceDocument | None
    divergences: Annotated[Count, describe_field("completions that differ")]
    near_ties: Annotated[
        Count,
        describe_field(
            "divergences where both tokens' logits are within rounding of the best logit"
        ),
    ]
    unexplained_divergences: Annotated[
        Count, describe_field("divergences - near_ties; more than 0 is a bug")
    ]
    sampling_test: SamplingTestDocument


class ContextBucketDocument(DocumentBase):
    """The acceptance of the rounds that begin at contexts of one range of lengths."""

    bucket: Annotated[str, describe_field("tokens before the round: from-to")]
    num_rounds: Annotated[Count, describe_field("rounds that began there")]
    mean_acceptance_length: Length


class ChangeDocument(DocumentBase, total=False):
    """The change of a number since the baseline report."""

    metric: Required[Annotated[str, describe_field("field of a result row")]]
    category: Required[
        Annotated[str, describe_field("category of the suite; `all`: the whole suite")]
    ]
    better: Required[Literal["higher", "lower"]]
    old: Annotated[float, describe_field("in the baseline")]
    new: Annotated[float, describe_field("in this report")]
    change: Annotated[float, describe_field("new / old - 1, over the prompts of both")]
    ci95: ConfidenceInterval
    reason: Annotated[str, describe_field("why the change or its interval is absent")]


class BaselineDocument(DocumentBase):
    """The earlier report that this one was compared with, and what changed since."""

    created: Annotated[str, describe_field("UTC, ISO 8601")]
    git_revision: NotRequired[Annotated[str, describe_field("commit of the checkout")]]
    draft: Annotated[DraftDocument, describe_field("its name and method")]
    changes: list[ChangeDocument]
    reason: NotRequired[Annotated[str, describe_field("why the two could not be compared")]]


class TheoryPointDocument(DocumentBase):
    """A point of the predicted curve over K."""

    k: Annotated[Count, describe_field("K', draft tokens per round")]
    mean_acceptance_length: Length
    draft_passes: Annotated[Count, describe_field("forward passes of the draft per round")]
    draft_ms: Annotated[NonNegative, describe_field("to draft all K' tokens of a round")]
    verify_ms: Annotated[NonNegative, describe_field("to verify them")]
    predicted_speedup: float


class TheoryDocument(DocumentBase):
    """The prediction from acceptance and costs: S = AL / (v + c K)."""

    alpha: Annotated[
        Share,
        describe_field(
            "acceptance rate that gives the acceptance length if it is the same at every position"
        ),
    ]
    K: Annotated[AtLeastOne, describe_field("draft tokens per round; for a tree, its depth")]
    v: Annotated[float, describe_field("cost of one verification, in plain steps")]
    c: Annotated[float, describe_field("cost of drafting K tokens, divided by K, in plain steps")]
    predicted: Annotated[float, describe_field("speedup, AL / (v + c·K)")]
    best_k: Annotated[
        Count, describe_field("K' with the highest predicted speedup; 0: plain decoding")
    ]
    cost_deviation: NotRequired[
        Annotated[
            NonNegative,
            describe_field("largest deviation of timed verifications from costs that rise with K"),
        ]
    ]
    curve: list[TheoryPointDocument]


class QualityDocument(DocumentBase, total=False):
    """Completions scored as answers, with the draft and without: name of the metric -> scores."""

    exact_match: ScoresDocument
    python_syntax: ScoresDocument


class FindingDocument(DocumentBase):
    """A finding: its name and a sentence."""

    name: Annotated[str, describe_field("name of the finding")]
    message: Annotated[str, describe_field("one sentence")]


class GateDocument(DocumentBase):
    """The verdict of the gate, and its rules."""

    verdict: Annotated[
        Literal["passed", "failed", "inconclusive"] | None,
        describe_field("inconclusive: the evidence cannot decide; null: not judged"),
    ]
    passed: Annotated[bool, describe_field("whether the verdict is passed")]
    first_release: NotRequired[
        Annotated[
            bool,
            describe_field(
                "whether there is no earlier report, so that rules about regressions were left out"
            ),
        ]
    ]
    rules: list[RuleDocument]


class ReportDocument(DocumentBase):
    """The content of report.json."""

    # The origin of the report.
    schema_version: Literal[3]
    created: Annotated[str, describe_field("UTC, ISO 8601")]
    specdistill_version: Annotated[str, describe_field("version of the package")]
    git_revision: NotRequired[Annotated[str, describe_field("commit of the checkout")]]
    digest: NotRequired[
        Annotated[
            str, describe_field("sha256 of records and report, without gate, baseline and digest")
        ]
    ]
    incomplete: NotRequired[
        Annotated[
            bool,
            describe_field(
                "whether the run was cut short, which fails every gate; absent: it was not"
            ),
        ]
    ]

    # What was measured, on which machine, and with which settings.
    measurement: NotRequired[MeasurementDocument]
    target: TargetDocument
    draft: DraftDocument
    hardware: HardwareDocument
    software: dict[str, str]
    settings: SettingsDocument
    engine: NotRequired[EngineDocument]
    suite: SuiteDocument

    # The numbers. The first row of `results` is the whole suite in the main configuration.
    headline: HeadlineDocument
    results: Annotated[
        list[Annotated[ResultDocument, AfterValidator(check_positions)]], Field(min_length=1)
    ]
    lossless: LosslessDocument
    context: list[ContextBucketDocument]

    # The conclusions from the numbers.
    baseline: NotRequired[BaselineDocument]
    theory: NotRequired[TheoryDocument]
    quality: NotRequired[QualityDocument]
    findings: Annotated[
        list[FindingDocument], describe_field("what a reader should know before quoting a number")
    ]
    gate: GateDocument
    not_measured: Reasons


@cache
def build_schema() -> dict[str, Any]:
    """Return the JSON Schema of report.json. The file report.schema.json has the same content."""
    return {
        **TypeAdapter(ReportDocument).json_schema(schema_generator=UntitledSchema),
        "title": "specdistill report",
    }


# Write report.schema.json, which lies next to this file. A test checks that it is up to date.
if __name__ == "__main__":
    text = json.dumps(build_schema(), indent=2, ensure_ascii=False)
    Path(__file__).with_name("report.schema.json").write_text(f"{text}\n", encoding="utf-8")
