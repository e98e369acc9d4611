"""The sections that recipes of every method share.

The help text of each key states its unit and its limits.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from specdistill.common.errors import UserError, make_unused_key_error
from specdistill.recipe.fields import (
    AtLeastOne,
    Condition,
    NonNegative,
    Section,
    allow_names,
    format_value,
    option,
    section,
)
from specdistill.serving.engines import ENGINES, list_engines_with
from specdistill.serving.engines.server import MAX_IN_FLIGHT


def list_swept_values(config: object, axis: str) -> list[object]:
    """Return the values of an axis of `eval.sweep`; an empty list for a command without a sweep."""
    return list(getattr(getattr(config, "sweep", None), axis, []))


# Commands that measure have some of the keys of `eval:` and not others. Commands without the key
# `engine` decode in this process.
SERVER_DECODES = Condition(
    f"with eval.engine={' or '.join(list_engines_with('client'))}",
    lambda config: config.engine != "specdistill",
)
# A program is started by the command itself. A server is already running, with settings of its own.
ENGINE_IS_STARTED = Condition(
    f"with eval.engine={' or '.join(list_engines_with('program'))} and no eval.server",
    lambda config: config.engine != "specdistill" and config.server is None,
)
LLAMA_CPP = Condition(
    "with eval.engine=llama.cpp and no eval.server",
    lambda config: ENGINE_IS_STARTED.holds(config) and config.engine == "llama.cpp",
)
# These keys cannot reach a server that is already running.
ENGINE_IS_NOT_RUNNING = Condition(
    "without eval.server: a server drafts as it was started",
    lambda config: getattr(config, "server", None) is None,
)
DECODING_IN_PROCESS = Condition(
    "with eval.engine=specdistill: a server drafts as it was started",
    lambda config: getattr(config, "engine", "specdistill") == "specdistill",
)
# A suite's own YAML may say which temperatures to sweep.
SAMPLING_IS_ON = Condition(
    "at a temperature above 0",
    lambda config: (
        config.temperature > 0
        or any(list_swept_values(config, "temperature"))
        or (config.suite or "").endswith((".yaml", ".yml"))
    ),
)
# K is the depth of the tree. So K may be set next to a tree, but not to another value.
DRAFT_IS_CHAIN = Condition(
    "without eval.tree, or equal to the depth of eval.tree",
    lambda config: config.tree is None or config.num_speculative_tokens == config.tree.levels,
)
# Engines that can look tokens up in front of a draft, and that a command can start.
LOOKUP_ENGINES = [
    "specdistill",
    *(name for name in list_engines_with("lookup") if name in list_engines_with("program")),
]
LOOKUP_IS_ALLOWED = Condition(
    f"with eval.engine={' or '.join(LOOKUP_ENGINES)}"
    " and without eval.server or eval.tree: the draft's tree is eval.lookup_first.draft_tree",
    lambda config: (
        (
            DECODING_IN_PROCESS.holds(config)
            or (ENGINE_IS_STARTED.holds(config) and config.engine in list_engines_with("lookup"))
        )
        and not (config.tree or list_swept_values(config, "tree"))
    ),
)
TARGET_IS_ON_HUB = Condition(
    "for a model on the Hub: pico and folders have no revisions",
    lambda config: (
        config.model is not None and config.model != "pico" and not Path(config.model).exists()
    ),
)
TARGET_IS_NOT_ADAPTED = Condition(
    "without target.adapter: merge the adapter into a checkpoint first",
    lambda config: config.adapter is None,
)
# Servers may write hidden states while they generate the rows, before the store of all rows exists.
WAITING_FOLDER = (
    "generated"  # folder in a store for hidden states that servers wrote with their answers
)
STATES_MODE = (
    "where the target's hidden states come from: online: a target pass in each step; offline: a"
    " store; hybrid: a store that is filled before the first step, and target passes for rows that"
    " do not fit"
)

# Types of a KV cache that llama.cpp's server knows, by its names.
CacheType = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"]
# Reasons to drop an answer of a server.
AnswerRule = Literal["refused", "empty", "truncated", "looping", "off_template"]
# Names that transformers gives its implementations; the last one stands for a kernel on the Hub.
ATTENTION = (
    "sdpa",
    "eager",
    "flex_attention",
    "flash_attention_2",
    "flash_attention_3",
    "ORG/KERNEL",
)
AttentionImplementation = Annotated[
    str, allow_names(lambda: ATTENTION, also=lambda name: "/" in name)
]


def _check_names(value: object) -> object:
    """Check that a value is a name, a list of at least one name, or None, and return it.

    Without this check pydantic would report one error for each of the types that the key allows.
    """
    names = value if isinstance(value, list) and value else [value]
    if value is not None and not all(isinstance(name, str) for name in names):
        raise PydanticCustomError("names_type", "neither a name nor a list of names")
    return value


class TargetConfig(Section):
    """The target, and how it is loaded."""

    model: str = option(..., "pico (built in), folder, GGUF file or Hub id")
    revision: str | None = option(
        None, "branch, tag or commit of a Hub id", condition=TARGET_IS_ON_HUB
    )
    adapter: Annotated[str | list[str] | None, PlainValidator(_check_names)] = option(
        None,
        "LoRA adapter of the target (peft): a folder or a Hub id; the draft learns the adapted"
        " target; `specdistill eval` also takes a list, and reports each adapter as a category",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = option("float32", "data type of the weights")
    quantization: Literal["fp8", "bitsandbytes-8bit"] | None = option(
        None,
        "quantize the weights of a bfloat16 target when they are loaded; fp8: weights and"
        " activations, by torchao, on a GPU of Ada's generation or later; null: keep the"
        " checkpoint's weights",
        condition=TARGET_IS_NOT_ADAPTED,
    )
    attn: AttentionImplementation | None = option(
        None,
        "attention implementation of transformers, or a kernel on the Hub; null: the default of the"
        " model class",
    )
    trust_remote_code: bool = option(
        False, "run Python code from the model's repository; must be given on the command line"
    )
    cache: bool = option(
        True,
        "keep a copy of a GGUF file in safetensors, which later commands load",
        condition=Condition(
            "for a GGUF file", lambda config: (config.model or "").endswith(".gguf")
        ),
    )
    shard: Literal["none", "layers"] = option(
        "none",
        "how several processes hold the target; none: each has a copy; layers: each has a part of"
        " the parameters, which are gathered layer by layer; a single process always holds all",
        condition=TARGET_IS_NOT_ADAPTED,
    )
    device_map: str | None = option(
        None,
        "devices that hold an unsharded target; auto, balanced or sequential: spread over all"
        " devices of one process; or one device, e.g. cpu; null: the process's own device",
        condition=Condition("with target.shard=none", lambda config: config.shard == "none"),
    )


class NoRegeneration(Section):
    """Training uses the rows of the source as they are."""

    num_tokens: int = option(
        0,
        "tokens of training data that the target generates; 0: train on the source as it is",
        ge=0,
    )


class Regeneration(NoRegeneration):
    """The target generates the rows, in this process or on servers."""

    CHOSEN = "when num_tokens is above 0; data.regenerate=null resets the section"

    # Enough tokens to set the topic, while most of a row is still the target's own text.
    prompt_tokens: int = option(
        32, "for rows of plain text: tokens from the start that are the prompt", ge=1
    )
    # Greedy answers are what the target is most certain of; sampled ones add variety.
    temperatures: list[NonNegative] = option(
        [0.0, 0.8],
        "sampling temperatures, each for an equal share of the rows; 0 is greedy",
        min_length=1,
    )
    # More sequences generate faster, and take more memory for the KV cache.
    batch_size: int = option(128, "sequences generated at a time, by each process or server", ge=1)
    server: list[str] = option(
        [],
        "addresses of OpenAI-compatible servers of the target (vLLM, SGLang, llama.cpp) that"
        " generate instead of this process",
    )
    template: dict[str, Any] = option(
        {}, "additional arguments of the chat template, e.g. {enable_thinking: false}"
    )


class LocalRegeneration(Regeneration):
    """The target generates in this process."""


class ServerRegeneration(Regeneration):
    """Servers of the target generate."""

    CHOSEN = "with data.regenerate.server"

    timeout: float = option(600.0, "timeout of a server's response, in seconds", gt=0)
    filter: list[AnswerRule] = option(
        [*get_args(AnswerRule)],
        "kinds of server responses that are left out of the training data, and counted",
    )


def _choose_regeneration_variant(values: object) -> str | None:
    """Return the name of the schema that checks the keys of `data.regenerate`.

    There are three: without generation, with generation in this process, and on servers. None means
    that the value is no section, which pydantic reports.
    """
    # The value may be a section already, e.g. the default. All three classes derive from
    # NoRegeneration.
    if isinstance(values, NoRegeneration):
        return type(values).__name__
    if not isinstance(values, Mapping):
        return None
    if not values.get("num_tokens"):
        return "NoRegeneration"
    return "ServerRegeneration" if values.get("server") else "LocalRegeneration"


RegenerateConfig = Annotated[
    Annotated[NoRegeneration, Tag("NoRegeneration")]
    | Annotated[LocalRegeneration, Tag("LocalRegeneration")]
    | Annotated[ServerRegeneration, Tag("ServerRegeneration")],
    Field(discriminator=Discriminator(_choose_regeneration_variant)),
]


ROLES = ("user", "assistant", "system", "tool")  # roles of the messages of a conversation


class DataConfig(Section):
    """The training data, and how rows are made of it."""

    source: object = option(
        "pico",
        "training data: pico (built in), self (prompts from the target), a jsonl/json/parquet file,"
        " a Hub id, or a list of these and of {source, weight, split}",
    )
    split: str = option("train", "split of the source")
    columns: dict[str, str] = option(
        {},
        "column names: specdistill's name, then the source's, e.g. {messages: turns}; {}: detected"
        " automatically",
    )
    roles: dict[str, str] = option(
        {}, "further role names in conversations, with their meaning, e.g. {orca-7b: assistant}"
    )
    on_bad_row: Literal["skip", "stop"] = option(
        "skip",
        "what happens to a row that cannot be used; skip: it is left out, and counted by kind of"
        " fault; stop: the command ends with an error",
    )
    # A source of which more rows are broken is probably read in a wrong way.
    max_bad_rows: float = option(
        0.05, "share of a source's rows that may be skipped; more are an error", ge=0, le=1
    )
    chat_template: str | None = option(
        None,
        "file with a chat template that replaces the target's, in training data, in evaluation and"
        " in the draft's folder; null: the target's",
    )
    max_length: int = option(
        512, "tokens per packed row; longer texts are cut, longer conversations at a turn", ge=8
    )
    validation_fraction: float = option(
        0.02, "fraction of the rows held out for evaluation during training", ge=0, le=0.9
    )
    validation_split: Literal["hash", "sample"] = option(
        "hash",
        "how held-out rows are chosen; hash: by content, so that duplicates stay together and added"
        " rows change nothing for others; sample: a random sample of exactly that fraction",
    )
    # Overlaps of 13 words are what GPT-3's authors looked for (arXiv 2005.14165, appendix C).
    decontaminate: list[str] = option(
        ["all"],
        "drop training rows that share 13 consecutive words with a prompt of these suites; "
        "all: built-in suites and those of eval and selection; []: drop none",
    )
    packing: bool = option(
        True, "pack several documents into a row; attention stays within each document"
    )
    loss_mask: Literal["assistant", "all"] = option(
        "assistant", "tokens that count in the loss: those of the assistant, or all"
    )
    regenerate: RegenerateConfig = section(NoRegeneration)
    seed: int = option(0, "seed of the order of documents, and of regeneration", ge=0)
    num_proc: int | None = option(
        None,
        "number of processes that prepare rows; null: one per core, at most 16, fewer for few rows",
        ge=1,
    )
    rows: str | None = option(
        None,
        "folder of a row set made by `specdistill data make`; null: the rows that this recipe"
        " describes, which are prepared if they are missing",
    )
    shard: str | None = option(
        None,
        "part of the data that `specdistill data make` generates; i/n: blocks i, i + n, …; auto: i"
        " and n from the environment of the array job; null: all blocks",
    )
    cache_dir: str | None = option(
        None, "folder for row sets and intermediate files; null: the cache of the datasets library"
    )
    force: bool = option(
        False, "start even if the disk has less free space than the estimated need"
    )

    @field_validator("roles")
    @classmethod
    def _check_roles(cls, roles: dict[str, str]) -> dict[str, str]:
        """Check that each role name is mapped to a role that chat templates know."""
        for name, role in roles.items():
            if role not in ROLES:
                raise UserError(
                    "data.roles",
                    got=f"{name}: {role}",
                    expected=f"{name}: one of {', '.join(ROLES)}",
                )
        return roles

    @field_validator("regenerate", mode="before")
    @classmethod
    def _replace_null(cls, value: object) -> object:
        """Replace null by the section that generates nothing."""
        return NoRegeneration() if value is None else value

    @property
    def generation(self) -> Regeneration:
        """The settings of generation. Only read for a recipe whose target generates the rows."""
        assert isinstance(self.regenerate, Regeneration)
        return self.regenerate


class OnlineStates(Section):
    """Hidden states come from a target pass in each step of training."""

    # Whether training may have to run the target's layers. The other modes have this flag, too.
    runs_layers: ClassVar[bool] = True

    mode: Literal["online"] = option("online", STATES_MODE)


class StoredStates(Section):
    """Hidden states come from a store on disk."""

    CHOSEN = "with hidden_states.mode=offline or hybrid"

    mode: Literal["offline", "hybrid"] = option(..., STATES_MODE)
    path: str = option(..., "folder of the feature store (hidden states on disk)")
    dtype: Literal["bfloat16", "float32"] = option(
        "bfloat16", "data type of the stored hidden states"
    )


class OfflineStates(StoredStates):
    """A store that holds the hidden states of all rows."""

    runs_layers: ClassVar[bool] = False

    mode: Literal["offline"] = option("offline", STATES_MODE)


class HybridStates(StoredStates):
    """A store that is filled before the first step, as far as the rows fit."""

    CHOSEN = "with hidden_states.mode=hybrid"

    mode: Literal["hybrid"] = option("hybrid", STATES_MODE)
    max_bytes: int | None = option(
        None, "maximum size of the feature store in bytes; null: unlimited", ge=1
    )
    shard_tokens: int = option(
        32_768,
        "tokens per file of the feature store; an interrupted run repeats at most one file",
        ge=1,
    )
    server: list[str] = option(
        [],
        "addresses of vLLM servers that run the target, and write its hidden states to a folder"
        " that this process can read; []: this process computes them",
    )
    timeout: float = option(
        600.0,
        "timeout of a server's response, in seconds",
        gt=0,
        condition=Condition("with hidden_states.server", lambda states: bool(states.server)),
    )

    @property
    def runs_layers(self) -> bool:
        """Whether training may have to run the target's layers.

        It runs them to fill the store if no servers do that, and in the steps of training for rows
        that do not fit into a store with `max_bytes`.
        """
        return not self.server or self.max_bytes is not None

    @property
    def waiting(self) -> Path | None:
        """The folder for hidden states that servers write while they generate training data.

        The files stay there until the feature store of all rows is made. None if `max_bytes` limits
        the store: the store may then be too small for all rows, so nothing is written in advance.
        """
        return Path(self.path) / WAITING_FOLDER if self.max_bytes is None else None


# Where training takes the target's hidden states from.
HiddenStatesConfig = Annotated[
    OnlineStates | OfflineStates | HybridStates, Field(discriminator="mode")
]


class TreeConfig(Section):
    """The shape of a token tree, dynamic or static."""

    budget: int | None = option(
        None, "dynamic tree (EAGLE-2): nodes proposed per round; needs depth and top_k", ge=1
    )
    depth: int | None = option(None, "dynamic tree: number of levels; each is one draft step", ge=1)
    top_k: int | None = option(
        None, "dynamic tree: nodes expanded per level, and children of each such node", ge=1
    )
    branching: list[AtLeastOne] | None = option(
        None, "static tree: number of children of each node, level by level, e.g. 4,2,1"
    )

    @property
    def levels(self) -> int:
        """The depth of the tree; 0 if neither `depth` nor `branching` is set."""
        return self.depth or len(self.branching or ())


def check_lengths(value: Any) -> Any:
    """Check that a section's `min` is not above its `max`, and return the section.

    Sections use this function as a pydantic validator. `explain_errors` turns the error into one
    that names the keys with their section.
    """
    if value.min > value.max:
        raise PydanticCustomError(
            "min_above_max", "min {min} is above max {max}", {"min": value.min, "max": value.max}
        )
    return value


class LookupFirstConfig(Section):
    """A lookup that proposes tokens before the draft does (see `LookupFirstProposer`)."""

    method: Literal["ngram", "suffix"] = option("ngram", "method of the lookup")
    # With a smaller `min` the lookup proposes more often in place of the draft, but after matches
    # that say less.
    min: int = option(2, "fewest tokens that must match", ge=1)
    max: int = option(5, "most tokens that are matched", ge=1)
    draft_tokens: int = option(
        2,
        "draft tokens per round that the draft proposes where the lookup finds nothing; the lookup"
        " itself proposes num_speculative_tokens",
        ge=1,
        condition=Condition(
            "without lookup_first.draft_tree", lambda config: config.draft_tree is None
        ),
    )
    draft_tree: TreeConfig | None = option(
        None,
        "token tree that the draft proposes where the lookup finds nothing; null: a chain, its"
        " length given by draft_tokens",
    )

    _has_lengths = model_validator(mode="after")(check_lengths)

    @property
    def levels(self) -> int:
        """The number of draft steps in a round in which the draft proposes, not the lookup."""
        return self.draft_tree.levels if self.draft_tree else self.draft_tokens

    @property
    def described(self) -> dict[str, object]:
        """The settings as a report shows them, in `settings.drafting`.

        The key that is not used (`draft_tokens` or `draft_tree`) is left out. `eval.lookup_first`
        accepts the result, so that the measurement of a report can be repeated.
        """
        return self.model_dump(
            exclude={"draft_tokens" if self.draft_tree else "draft_tree"}, exclude_none=True
        )

    def check_engine(self, section: str, engine: str, k: int) -> None:
        """Raise UserError if an engine cannot run a lookup with these settings.

        Args:
            section: the key of this section, for the error.
            engine: the name of the engine.
            k: the number of draft tokens per round.
        """
        # `find_missing_key` returns the first key whose value the engine does not support, with the
        # values that it does support; None if all are supported. An engine that is not in `ENGINES`
        # is specdistill's own decoder, which supports all values.
        engine_lookup = ENGINES[engine].lookup if engine in ENGINES else None
        missing_key = engine_lookup.find_missing_key(self, k) if engine_lookup else None
        if missing_key:
            name, expected = missing_key
            raise UserError(
                f"{section}.{name}",
                got=f"{format_value(getattr(self, name))} with eval.engine={engine}",
                expected=expected,
            )

    def check(self, settings: "MeasurementConfig", k: int) -> None:
        """Check that this lookup can be tried before the draft, with the settings of a measurement.

        Args:
            settings: the settings of the measurement.
            k: K, the number of draft tokens per round that the lookup proposes. Some commands also
                measure other values of K. `settings.smallest_k` is then the smallest of all.

        Raises:
            UserError: if the draft would propose more than K tokens, if the engine cannot run the
                lookup, or if the draft proposes a tree in compiled passes.
        """
        # The draft must not propose more tokens than the lookup, nor a deeper tree. `levels` is the
        # number of tokens in the draft's chain, or the depth of its tree.
        key = f"{settings.SECTION}lookup_first"
        if self.levels > k:
            name = "draft_tree" if self.draft_tree else "draft_tokens"
            size = f"a tree of depth {self.levels}" if self.draft_tree else str(self.levels)
            raise UserError(
                f"{key}.{name}",
                got=f"{size} with K = {k}",
                expected="at most K, the number of tokens that a lookup drafts",
            )

        # Check that the engine can run the lookup with every K that is measured. An engine may
        # require that the lookup matches at most K tokens (`self.max`), so the smallest K decides.
        # Some commands have no key `engine`. They use specdistill's own decoder, with `k` only.
        engine = getattr(settings, "engine", "specdistill")
        smallest_k = getattr(settings, "smallest_k", k)
        self.check_engine(key, engine, smallest_k)
        if self.draft_tree and settings.compile:
            raise UserError(
                f"{settings.SECTION}compile",
                got=f"true with {key}.draft_tree",
                expected=f"false, or {key}.draft_tokens in place of the tree",
            )


class SweepConfig(Section):
    """Additional settings to measure."""

    num_speculative_tokens: list[AtLeastOne] = option(
        [], "additional values of K to measure; only one setting of the sweep is varied at a time"
    )
    temperature: list[NonNegative] = option([], "additional temperatures to measure")
    batch_size: list[Annotated[int, Field(ge=1, le=64)]] = option(
        [], "additional batch sizes to measure"
    )
    concurrency: list[Annotated[int, Field(ge=1, le=MAX_IN_FLIGHT)]] = option(
        [], "additional values of eval.concurrency to measure: requests in flight at a server"
    )
    tree: list[TreeConfig] = option(
        [], "additional trees to measure, each with the keys of eval.tree"
    )
    context: list[AtLeastOne] = option(
        [], "prompt lengths to measure, in tokens, powers of two; longer prompts are cut"
    )


# The most that a quick look (`quick: true`) measures.
QUICK_LIMITS = {"num_prompts": 8, "max_new_tokens": 32, "repeats": 1, "warmup": 1}


class MeasurementConfig(Section):
    """The settings by which prompts are decoded to measure a draft, in every command.

    Attributes:
        SECTION: the prefix of the keys in errors, such as `eval.`.
    """

    SECTION: ClassVar[str] = ""

    suite: str | None = option(
        None,
        "prompts: suite name, suite YAML, or a jsonl file with prompt, messages or text rows;"
        " null: the suite pico, if the target is pico; required for other targets",
    )
    num_speculative_tokens: int = option(
        4, "K, draft tokens per round", ge=1, condition=DRAFT_IS_CHAIN
    )
    tree: TreeConfig | None = option(
        None, "propose a token tree of depth K instead of a chain", condition=DECODING_IN_PROCESS
    )
    lookup_first: LookupFirstConfig | None = option(
        None,
        "try an n-gram or suffix lookup first, and use the draft where the lookup finds nothing",
        condition=LOOKUP_IS_ALLOWED,
    )
    temperature: float = option(0.0, "sampling temperature; 0: greedy", ge=0)
    top_p: float = option(
        1.0,
        "nucleus sampling (top-p), for target and draft; 1: off",
        ge=0.01,
        le=1,
        condition=SAMPLING_IS_ON,
    )
    top_k: int = option(
        0, "top-k sampling, for target and draft; 0: off", ge=0, condition=SAMPLING_IS_ON
    )
    max_new_tokens: int = option(128, "most tokens generated per prompt", ge=1)
    num_prompts: int | None = option(
        None,
        "number of prompts, spread evenly over the categories; null: all of a suite, at most 200 of"
        " a file of prompts",
        ge=1,
    )
    batch_size: int = option(
        1,
        "prompts decoded together, with and without the draft",
        ge=1,
        le=64,
        condition=DECODING_IN_PROCESS,
    )
    compile: bool = option(
        False,
        "use torch.compile for the passes of the target, with and without the draft, and for those"
        " of a head (a draft of method eagle, eagle3 or mtp)",
        condition=Condition(
            "with eval.engine=specdistill, eval.batch_size=1 and no eval.tree: only passes over one"
            " chain of tokens are compiled",
            lambda config: (
                DECODING_IN_PROCESS.holds(config) and config.batch_size == 1 and config.tree is None
            ),
        ),
    )
    repeats: int = option(
        3,
        "timed repetitions per prompt, with and without the draft; the time of a round is the lower"
        " median of its times in the repetitions",
        ge=1,
    )
    warmup: int = option(
        2, "number of prompts or batches that are decoded untimed, before the timed ones", ge=0
    )
    sampling_draws: int | None = option(
        None,
        "random draws in the test that sampling with the draft is lossless; null: 50 to 400,"
        " depending on what is measured; 0: no test",
        ge=0,
        condition=DECODING_IN_PROCESS,
    )
    seed: int = option(0, "seed of sampling, and of the bootstrap for confidence intervals", ge=0)
    quick: bool = option(
        False,
        f"a quick look that cannot pass a gate: at most {QUICK_LIMITS['num_prompts']} prompts of at"
        f" most {QUICK_LIMITS['max_new_tokens']} tokens, one repetition, no test of sampling",
    )

    def limit_quick_look(self) -> Self:
        """Return the settings to measure with: for a quick look, lowered to QUICK_LIMITS.

        These settings themselves do not change, so that a run which recorded them can still be
        measured in full.
        """
        if not self.quick:
            return self
        lowered: dict[str, int] = {}
        for name, limit in QUICK_LIMITS.items():
            value = getattr(self, name)
            if value is None or value > limit:
                lowered[name] = limit

        # Leave out the test of sampling. Engines do not have this test.
        if getattr(self, "engine", "specdistill") == "specdistill":
            lowered["sampling_draws"] = 0
        return self.model_copy(update=lowered)

    @model_validator(mode="after")
    def _check_lookups(self) -> "MeasurementConfig":
        """Check the settings of a lookup that is tried before the draft, if there is one."""
        if self.lookup_first:
            self.lookup_first.check(self, self.num_speculative_tokens)
        return self


class LlamaCppConfig(Section):
    """The GGUF files that llama.cpp's server loads, and options of `llama-server`.

    The options have the names that `llama-server` gives them. Each option that is set reaches its
    command line, with the draft and without. null stands for the server's default.
    """

    model: str | None = option(
        None, "GGUF file of the target; null: target.model is a GGUF file itself"
    )
    model_draft: str | None = option(
        None, "GGUF file of the draft, which llama.cpp's converter makes from the draft's export"
    )
    ctx_size: int | None = option(
        None,
        "context size of target and draft: tokens of all slots together; null: room for the longest"
        " sequence in each slot",
        ge=1,
    )
    parallel: int | None = option(
        None,
        "number of slots, which are requests decoded together; null: one for each request in"
        " flight",
        ge=1,
    )
    batch_size: int | None = option(
        None,
        "most tokens, of all requests, in a logical batch, which the server divides into physical"
        " batches of at most ubatch_size tokens",
        ge=1,
    )
    ubatch_size: int | None = option(
        None, "most tokens in a physical batch, which is one forward pass", ge=1
    )
    threads: int | None = option(None, "CPU threads", ge=1)
    spec_draft_threads: int | None = option(None, "CPU threads of the draft", ge=1)
    device: str | None = option(None, "devices, e.g. CUDA0,CUDA1; none: the CPU")
    spec_draft_device: str | None = option(None, "devices for the draft, e.g. CUDA1")
    gpu_layers: int | None = option(
        None,
        "number of the target's layers to store on GPUs; the other layers stay on the CPU",
        ge=0,
    )
    spec_draft_ngl: int | None = option(
        None,
        "number of the draft's layers to store on GPUs; the other layers stay on the CPU",
        ge=0,
    )
    cache_type_k: CacheType | None = option(None, "data type of the keys in the target's KV cache")
    cache_type_v: CacheType | None = option(
        None, "data type of the values in the target's KV cache"
    )
    spec_draft_type_k: CacheType | None = option(
        None, "data type of the keys in the draft's KV cache"
    )
    spec_draft_type_v: CacheType | None = option(
        None, "data type of the values in the draft's KV cache"
    )


class EvalConfig(MeasurementConfig):
    """The settings of a measurement. Methods add the keys that only they read."""

    # Conditions, and not a union of variants, say which keys apply: `engine` and `server` decide
    # that together, and some keys depend on the engine's name or on other settings as well. With a
    # union, each method that adds keys would need a class for each variant.
    SECTION = "eval."

    engine: Annotated[str, allow_names(lambda: ["specdistill", *list_engines_with("client")])] = (
        option(
            "specdistill",
            "what decodes: this package, or an inference engine, started here or already running"
            " (eval.server)",
        )
    )
    engine_command: str | None = option(
        None,
        "command that starts the engine, with options, e.g. 'vllm serve --max-num-seqs 64'; must be"
        " given on the command line; null: the default",
        condition=ENGINE_IS_STARTED,
    )
    tensor_parallel: int | None = option(
        None,
        "tensor parallel size (GPUs that share the target) of an engine started here; null: 1",
        ge=1,
        condition=Condition(
            "with eval.engine=vllm or sglang and no eval.server",
            lambda config: ENGINE_IS_STARTED.holds(config) and config.engine in ("vllm", "sglang"),
        ),
    )
    llama_cpp: LlamaCppConfig = option(
        LlamaCppConfig(), "files and options of llama.cpp's server", condition=LLAMA_CPP
    )
    server: str | None = option(
        None,
        "address of a running server with the draft, e.g. http://127.0.0.1:8000; null: start one",
        condition=SERVER_DECODES,
    )
    baseline_server: str | None = option(
        None,
        "address of a running server without a draft, for comparison; null: no speedup is measured",
        condition=Condition("with eval.server", lambda config: config.server is not None),
    )
    server_timeout: float = option(
        300.0, "timeout of a server's response, in seconds", ge=0.1, condition=SERVER_DECODES
    )
    draft: str | None = option(
        None, "folder of the draft to measure; null: draft/ in the folder train.output_dir"
    )
    output_dir: str | None = option(
        None, "folder of the report; null: report/ in the folder train.output_dir"
    )
    concurrency: int = option(
        1,
        "number of requests in flight at a server",
        ge=1,
        le=MAX_IN_FLIGHT,
        condition=SERVER_DECODES,
    )
    baseline: str | None = option(
        None,
        "report that the gate's max_regression rules compare with: a report.json, its folder, or a"
        " Hub revision, e.g. org/name@v1.2",
    )
    sweep: SweepConfig = option(
        SweepConfig(),
        "additional settings to measure, of which one is varied at a time; with an engine, every K"
        " is measured at every concurrency",
    )

    @property
    def smallest_k(self) -> int:
        """The smallest K of all that are measured."""
        return min([self.num_speculative_tokens, *self.sweep.num_speculative_tokens])

    @model_validator(mode="after")
    def _check_sweeps(self) -> "EvalConfig":
        """Check that each setting of `eval.sweep` can be varied with the chosen engine."""
        # The condition under which each setting can be varied. A setting that is not in the
        # dictionary can only be varied if this process decodes.
        conditions = {
            "concurrency": SERVER_DECODES,
            "num_speculative_tokens": ENGINE_IS_NOT_RUNNING,
        }
        for name, values in vars(self.sweep).items():
            condition = conditions.get(name, DECODING_IN_PROCESS)
            if values and not condition.holds(self):
                raise make_unused_key_error(
                    f"eval.sweep.{name}", format_value(values), f"only used {condition.text}"
                )
        return self


class SelectionConfig(Section):
    """The prompts that each evaluation during training decodes.

    These should be other prompts than those of eval.suite. Otherwise the same prompts would choose
    the draft and then judge it.
    """

    suite: str = option(
        ..., "prompts: the name of a suite, its YAML file, or a jsonl file, as for eval.suite"
    )
    num_prompts: int | None = option(
        16, "number of prompts, spread evenly over the categories; null: all", ge=1
    )
    max_new_tokens: int = option(64, "most tokens generated per prompt", ge=1)


class PublishConfig(Section):
    """The settings of `specdistill publish`, which the command line can override."""

    repo: str | None = option(None, "Hub repository of the draft, org/name; created if missing")
    private: bool | None = option(
        None,
        "whether the repository is private; null: new repositories are private, existing ones stay"
        " as they are",
    )
    license: str | None = option(
        None, "licence of the draft, as the Hub names it; null: the target's"
    )
    base_model: str | None = option(
        None,
        "Hub id of the target, if the target was read from a folder; the files on the Hub must have"
        " the same hashes",
    )
    exports: list[Annotated[str, allow_names(lambda: list_engines_with("serve_command"))]] = option(
        [], "engines for which an export of the draft is published too, each in its own folder"
    )
