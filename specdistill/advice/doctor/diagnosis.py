"""Examine a draft: check its files, then decode a few prompts if the files are sound enough.

The files must be whole, fit the target, and be loaded by an engine as the draft was trained.
Each error in reading the draft is a finding. So are values that no training produces, a vocabulary
whose two maps do not agree, settings that differ from the target's, and what the loader of an
engine would load wrongly.

Decoding shows whether the draft's acceptance is what its training saw, and if not, why. It is not a
measurement, which `specdistill eval` makes. A handful of short greedy completions are enough to
tell a draft that works from one that does not.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from scipy.stats import t
from torch import Tensor, nn
from transformers import AutoConfig

from specdistill.advice.doctor.options import CommonDoctorOptions
from specdistill.advice.doctor.prompts import (
    DEFAULT_SUITE,
    KEY,
    NUM_TOKENS,
    read_run_recipe,
    run_of,
    select_prompts,
)
from specdistill.common.errors import UserError
from specdistill.data.rows.packing import index_batch
from specdistill.decoding.decoder import Decoder
from specdistill.decoding.proposer import Proposer
from specdistill.decoding.sequence import Generation
from specdistill.methods import METHODS
from specdistill.methods.base import Advice
from specdistill.methods.checkpoint import (
    FLOATS,
    choose_stored_dtype,
    find_extremes,
    read_config,
    read_tensors,
)
from specdistill.methods.compatibility import Finding, find_mismatches, note, problem, warning
from specdistill.methods.layers import HeadShape, is_one_plus_weight
from specdistill.methods.load import find_method, load_method, load_proposer, locate
from specdistill.methods.mtp.checkpoint import check_native
from specdistill.methods.recipe import TrainedRecipe, list_method_options
from specdistill.methods.sizes import RawConfig
from specdistill.methods.target_record import check_target, use_recorded_template
from specdistill.serving.engines import ENGINES
from specdistill.serving.engines.engine import Engine, Serving
from specdistill.serving.engines.loader import TensorShape, check_loader, find_loader
from specdistill.targets.anatomy import CLASS_ERRORS, find_auto_class
from specdistill.targets.files import INDEX, NESTED_SECTIONS, SINGLE, Shards, TargetFiles
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.history import read_history

LAYER = re.compile(r".*\blayers\.\d+\.")  # the prefix of a name within a layer
# A weight larger than this is taken for a sign that training diverged.
MAX_TRAINED_WEIGHT = 1000.0
# A draft counts as no better than chance if a smaller share of its first draft tokens is accepted.
# A larger share would also report drafts that are merely weak.
NO_BETTER_THAN_CHANCE = 0.05
# Acceptance is far below that of training if fewer than this share of the draft tokens accepted in
# training are accepted here. A larger share would also report drafts that merely meet other text.
LOW_ACCEPTANCE_SHARE = 0.6
# A repair counts if the divergence falls by more than this share. With a smaller share, a setting
# that hardly matters would also be named as the cause, as long as its effect is certain.
MIN_DIVERGENCE_DROP = 0.02
CONFIDENCE = 0.95  # the confidence level over all causes that are tried together
# The number of parts into which the completion of a single prompt is cut. Each part counts like a
# prompt.
NUM_PARTS = 8
# A cause is a problem if its repair multiplies the accepted draft tokens by more than this.
MIN_ACCEPTANCE_GAIN = 1.05
# Draft tokens per round if no training history says how many the draft was evaluated with.
DEFAULT_STEPS = 4

# How close a draft is to the target on some positions: the mean forward KL in nats, and the
# simulated acceptance length.
Fit = tuple[float, float]


@dataclass(frozen=True)
class SimulatedAcceptance:
    """An acceptance length, estimated in training (simulated) or counted in a few completions.

    Attributes:
        num_tokens: draft tokens per round.
        length: tokens emitted per round, the target's own included.
        num_rounds: rounds that were counted; 0 if training simulated it.
    """

    num_tokens: int
    length: float
    num_rounds: int = 0


@dataclass
class Diagnosis:
    """The result of examining a draft.

    Attributes:
        folder: the draft's folder.
        method: its method; None if it was not recognized.
        config: the shape of a head; None for other drafts, or if the shape was not understood.
        num_tensors: tensors in its files.
        dtype: the dtype of its weights; None if it is not known.
        refused: whether the draft cannot be read or does not fit its target, so that nothing can be
            decoded with it.
        findings: everything that was found.
        prompts: a description of what was decoded, in words; None if nothing was.
        acceptance: the acceptance on these prompts; None if nothing was decoded.
        behind_lookup: the acceptance with a lookup in front; None if it was not tried.
        recorded: the acceptance that training simulated when it chose these weights; None without
            a training history.
    """

    folder: Path
    method: str | None = None
    config: HeadShape | None = None
    num_tensors: int = 0
    dtype: torch.dtype | None = None
    refused: bool = False
    findings: list[Finding] = field(default_factory=list)
    prompts: str | None = None
    acceptance: SimulatedAcceptance | None = None
    behind_lookup: SimulatedAcceptance | None = None
    recorded: SimulatedAcceptance | None = None

    @property
    def is_sound(self) -> bool:
        """Whether no finding is a problem."""
        return all(finding.severity != "problem" for finding in self.findings)

    @property
    def description(self) -> str:
        """A description of the draft in one line: its method, size, dtype and layers."""
        if self.method is None:
            return "not recognised"
        parts = [f"method {self.method}", f"{self.num_tensors} tensors"]
        parts += [str(self.dtype).removeprefix("torch.")] if self.dtype else []
        if isinstance(self.config, HeadShape):
            layers = self.config.num_layers
            parts += [f"{layers} layer{'s' * (layers != 1)} of {self.config.hidden_size}"]
            aux: Sequence[int] = getattr(self.config, "aux_layers", ())
            parts += [f"reads the target after layers {', '.join(map(str, aux))}"] if aux else []
        return ", ".join(parts)


def diagnose(options: CommonDoctorOptions) -> Diagnosis:
    """Examine the draft that the options name: its files and, with a target, its acceptance.

    The acceptance is found by decoding a few prompts, unless the options say `decode=false`.

    Raises:
        UserError: if the draft, the target or the suite does not exist or cannot be read.
        ResourceError: when the Hub fails.
    """
    # Find the files of draft and target.
    model = options.target.model
    engine = options.engine
    lookup_first = options.eval.lookup_first
    # If draft and target are the same folder, the draft is the multi-token-prediction layer in the
    # target's checkpoint. The weights of this layer are not read.
    draft = Path(options.draft) if options.draft == model else locate(options.draft, key=KEY)
    file_options = options.target.model_dump(include={"revision", "adapter", "trust_remote_code"})
    files = TargetFiles(model, **file_options) if model else None
    if files and draft.resolve() == Path(files.name).resolve():
        return examine_native_layer(files)

    # Examine the files, and read what training recorded.
    diagnosis = examine_draft(draft, files, engine, options)
    run = run_of(draft)
    # If the draft is an export in a run's folder, the training history is in the run's own draft.
    diagnosis.recorded = read_recorded_length(run / "draft" if run else draft)

    # With `eval.lookup_first` a lookup proposes tokens first, and the draft only where the lookup
    # finds nothing. `describe_front` returns None if the engine cannot do that with these settings.
    if engine and lookup_first:
        engine_lookup = ENGINES[engine].describe_front(lookup_first)
        if engine_lookup is None:
            diagnosis.findings.append(
                problem(
                    f"specdistill cannot start {ENGINES[engine].title} with this eval.lookup_first,"
                    " an n-gram or suffix lookup that is tried before the draft",
                    "change or remove eval.lookup_first, or choose another engine=",
                )
            )

    # Decode a few prompts, unless the draft cannot be read or does not fit its target.
    if model and options.decode:
        if diagnosis.method is None or diagnosis.refused:
            diagnosis.findings.append(note("skipped decoding: fix the problems above first"))
        else:
            _try_on_prompts(diagnosis, draft, run, options)
    return diagnosis


def _try_on_prompts(
    diagnosis: Diagnosis, draft: Path, run: Path | None, options: CommonDoctorOptions
) -> None:
    """Decode a few prompts with a draft; add the acceptance and findings to the diagnosis.

    Args:
        diagnosis: the diagnosis of the draft's files, whose method is known.
        draft: the draft's folder.
        run: the folder of the draft's run; None if it is in no run.
        options: the options of the command, with a target.
    """
    assert diagnosis.method is not None

    # Load the target, and choose prompts of the kind that the draft was trained for.
    target = FrozenTarget.load(**vars(options.target))
    use_recorded_template([draft], target.tokenizer, KEY)
    prompts, diagnosis.prompts, is_known = select_prompts(
        run, options.eval.suite, target, options.eval.num_prompts
    )
    if not is_known:
        # `diagnosis.recorded` is the acceptance length that training estimated in an evaluation.
        # The text of that evaluation may be of another kind than these prompts, so the acceptance
        # on these prompts is not compared with it.
        diagnosis.recorded = None
        diagnosis.findings.append(
            warning(
                f"the draft was tried on lines of Python (suite {DEFAULT_SUITE}), because no"
                " training run on this machine shows what text it was trained for",
                "choose prompts like its training data with suite=",
            )
        )

    # Decode the prompts with the draft, and look for the cause if few draft tokens are accepted.
    # `list_method_options` returns the options of each method in a list, which has one method here.
    with collect_refusals(diagnosis):
        method_options = list_method_options(options, [diagnosis.method])[0]
        proposer = load_proposer(
            diagnosis.method, draft, target, key=KEY, logs=False, **method_options
        )
        diagnosis.acceptance = check_acceptance(diagnosis, target, proposer, prompts)

        # Decode the prompts once more with the lookup in front of the draft. The number of tokens
        # per round is as before, or `levels` if that is larger: the number of tokens that the draft
        # proposes where nothing is looked up.
        lookup_first = options.eval.lookup_first
        if lookup_first:
            method_options |= {"lookup_first": lookup_first, "logs": False}
            behind_lookup = load_proposer(
                diagnosis.method, draft, target, key=KEY, **method_options
            )
            num_tokens = max(diagnosis.acceptance.num_tokens, lookup_first.levels)
            diagnosis.behind_lookup = compute_acceptance_length(
                complete(Decoder(target, behind_lookup), prompts, num_tokens), num_tokens
            )


def examine_draft(
    folder: Path,
    target: TargetFiles | None = None,
    engine: str | None = None,
    options: CommonDoctorOptions | None = None,
) -> Diagnosis:
    """Check the files of a draft: their values, the fit to the target, and loading in an engine.

    Args:
        folder: the folder of the draft.
        target: the files of the target that it drafts for; None to examine the draft without it.
        engine: the name of an engine whose loader the draft is checked against; None for none.
        options: the options of the command, which may have decoding options of the draft's method;
            None for none.

    Returns:
        The diagnosis with all findings. A draft that cannot be read is a finding, too.

    Raises:
        UserError: for wrong input other than the draft, such as a target that cannot be read.
        ResourceError: when the Hub fails.
    """
    diagnosis = Diagnosis(folder)

    # Find the method and the shape of the draft. Without them nothing else can be examined.
    with collect_refusals(diagnosis):
        config = read_config(folder, KEY)
        diagnosis.method = find_method(folder, key=KEY)
        tensors = read_tensors(folder, KEY)
        method = load_method(diagnosis.method)
        diagnosis.config = method.read_head_shape(config, target.num_layers if target else None)
    if diagnosis.refused:
        return diagnosis

    # Look at the values of the tensors, and for a key that engines need: `architectures`, which may
    # be in config.json itself or in a nested section.
    floats = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
    diagnosis.num_tensors = len(tensors)
    diagnosis.dtype = choose_stored_dtype(floats) if floats else None
    diagnosis.findings += _check_values(tensors, config)
    sections = [config, *(config.get(name) or {} for name in NESTED_SECTIONS)]
    if not any(section.get("architectures") for section in sections):
        diagnosis.findings.append(
            problem(
                "config.json has no key `architectures`",
                "add it: engines need it to choose the class that loads the draft",
            )
        )

    # Compare the draft with its target.
    method_options = list_method_options(options, [diagnosis.method])[0] if options else {}
    _check_fit(diagnosis, config, tensors, target, method_options)

    # Simulate how the engine's loader would treat the names and shapes of the tensors.
    if engine is not None:
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        diagnosis.findings += find_loader_problems(
            ENGINES[engine], diagnosis.method, diagnosis.config, config, shapes, target
        )
        if method_options.get("heterogeneous_vocab"):
            diagnosis.findings.append(
                problem(
                    f"specdistill cannot start {ENGINES[engine].title} with a draft whose tokenizer"
                    " differs from the target's (heterogeneous_vocab)",
                    "remove heterogeneous_vocab, and use a draft with the target's tokenizer",
                )
            )
    return diagnosis


def _check_fit(
    diagnosis: Diagnosis,
    config: RawConfig,
    tensors: Mapping[str, Tensor],
    target: TargetFiles | None,
    method_options: Mapping[str, Any],
) -> None:
    """Check that a draft fits its target, and add what does not fit to the diagnosis.

    Args:
        diagnosis: the diagnosis, whose method is known. It gets the findings.
        config: the draft's config.json.
        tensors: the draft's tensors, by name.
        target: the target's files; None to check the draft without them.
        method_options: decoding options of the draft's method.
    """
    assert diagnosis.method is not None
    folder = diagnosis.folder

    # Compare the target with the one that the draft's training recorded.
    if target is not None:
        with collect_refusals(diagnosis):
            check_target(folder, target, KEY, **method_options)

    # Let the method check names and shapes of all tensors. It refuses a draft that cannot be loaded
    # for this target.
    with collect_refusals(diagnosis):
        diagnosis.config = load_method(diagnosis.method).check(
            folder, tensors, target, key=KEY, name=folder, **method_options
        )

    # Settings that differ from the target's are findings, even if the draft can be loaded. If one
    # of them is a problem, nothing is decoded with the draft.
    mismatches = list(
        find_mismatches(
            diagnosis.method, config, tensors, diagnosis.config, target, **method_options
        )
    )
    diagnosis.findings += mismatches
    if any(finding.severity == "problem" for finding in mismatches):
        diagnosis.refused = True


def examine_native_layer(target: TargetFiles) -> Diagnosis:
    """Examine the multi-token-prediction layer in a target's own checkpoint.

    Only the names and shapes of its tensors are checked, and nothing is decoded.
    """
    diagnosis = Diagnosis(Path(target.name))
    with collect_refusals(diagnosis, "target.model"):
        shards = Shards.open(target.fetch("config.json", INDEX, SINGLE), "target.model")
        diagnosis.num_tensors = check_native(
            {name: tensor.shape for name, tensor in shards.build_without_content().items()}, target
        )
        diagnosis.method = "mtp"
        diagnosis.findings.append(
            note(
                "skipped decoding: specdistill does not draft with the multi-token-prediction layer"
                " in a target's own checkpoint; inference engines do"
            )
        )
    return diagnosis


@contextmanager
def collect_refusals(diagnosis: Diagnosis, key: str = KEY) -> Iterator[None]:
    """Run the body of a `with` statement, and turn an error about the draft into a finding.

    Args:
        diagnosis: the diagnosis that gets the finding. It is then marked as refused.
        key: the key that errors about the draft name. Errors that name another key are raised.
    """
    try:
        yield
    except UserError as error:
        if error.key != key:
            raise
        # The message begins with the key, which readers of a diagnosis do not need.
        diagnosis.refused = True
        diagnosis.findings.append(problem(str(error).removeprefix(f"{key}: got ")))


def find_norms_that_add_one(config: RawConfig) -> dict[str, bool]:
    """Find out which norms of a model multiply by 1 + weight, as Gemma's norms do.

    The weight of such a norm is zero before training. So zeros in it do not show that the weight is
    missing.

    Args:
        config: the config.json of a draft. That of a multi-token-prediction layer has the target's
            config in `text_config`.

    Returns:
        For each norm, by its name within a layer, whether it multiplies by 1 + weight. Empty if
        transformers cannot build the model of this config.
    """
    # Build the model without weights.
    try:
        model_config = AutoConfig.for_model(**(config.get("text_config") or config))
        with torch.device("meta"):
            model = find_auto_class(model_config).from_config(model_config)
    except CLASS_ERRORS:
        return {}

    # Try one norm of each name, because the norms with the same name in all layers are of one kind.
    result: dict[str, bool] = {}
    for name, module in model.named_modules():
        name_in_layer = LAYER.sub("", name)
        weight = getattr(module, "weight", None)
        if "norm" in name_in_layer and name_in_layer not in result and isinstance(weight, Tensor):
            result[name_in_layer] = False
            # A norm with a gate takes two inputs, so the call fails, and False stays. Such norms
            # multiply by the weight itself.
            with suppress(*CLASS_ERRORS):
                result[name_in_layer] = is_one_plus_weight(module.to_empty(device="cpu"))
    return result


def _check_values(tensors: Mapping[str, Tensor], config: RawConfig) -> Iterator[Finding]:
    """Yield a finding for each tensor that is all zeros or has very large weights.

    Both are signs of a failed training or of a missing weight. NaN and infinity are not checked
    here, because the function that reads the tensors refuses them.

    Args:
        tensors: the draft's tensors, by name.
        config: the draft's config.json.
    """
    # Find out which norms multiply by 1 + weight. For that the model is built, which takes a while.
    # So it is done only when a norm is all zeros, and only once.
    get_norms_that_add_one = cache(lambda: find_norms_that_add_one(config))
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            continue

        # A bias may be all zeros, and so may the weight of a norm that multiplies by 1 + weight.
        largest = max(map(abs, find_extremes(tensor)))
        may_be_zero = name.endswith(".bias")
        if largest == 0 and "norm" in name and not may_be_zero:
            name_in_layer = LAYER.sub("", name.removesuffix(".weight"))
            # The built model lacks some norms of a multi-token-prediction draft: those around its
            # decoder layer. A norm that the model lacks is judged by the norms that it has: it may
            # be zero if any of them multiplies by 1 + weight.
            adds_one_by_norm = get_norms_that_add_one()
            any_norm_adds_one = any(adds_one_by_norm.values())
            may_be_zero = adds_one_by_norm.get(name_in_layer, any_norm_adds_one)
        if largest == 0 and not may_be_zero:
            yield problem(
                f"{name} is all zeros",
                "train or save the draft again: this weight was not trained, or not saved",
            )
        elif largest > MAX_TRAINED_WEIGHT:
            yield warning(
                f"{name} has a very large weight: {largest:.3g} (usually below"
                f" {MAX_TRAINED_WEIGHT:,.0f})",
                "check in the training log whether the loss diverged",
            )


def find_loader_problems(
    engine: Engine,
    method: str,
    head: HeadShape | None,
    config: RawConfig,
    shapes: Mapping[str, TensorShape],
    target: TargetFiles | None = None,
) -> Iterator[Finding]:
    """Yield a finding for each reason why an engine would not load a draft, or load it wrongly.

    Args:
        engine: the engine.
        method: the draft's method.
        head: the shape of a head; None for other drafts.
        config: the draft's config.json.
        shapes: the shape of each tensor of the draft, by its name.
        target: the target's files; None if they are not known.
    """
    method_info = METHODS[method]
    vocab_size = config.get("vocab_size")
    serving = method_info.serving().get(engine.name, Serving())

    # If specdistill can export drafts of this method for the engine, advise to do so.
    export_advice = (
        f"run `specdistill export engine={engine.name}`: it writes the draft in a format that the"
        " engine loads"
        if serving.layout
        else ""
    )
    loader = find_loader(serving.loaders, config)

    # For a layer in the target's checkpoint and for a draft model, there is no special loader to
    # simulate: both are loaded like a target. A draft model needs the target's vocabulary.
    if method_info.in_target:
        yield problem(
            f"{engine.title} loads a multi-token-prediction layer only from the target's own"
            " checkpoint",
            export_advice,
        )
    elif method_info.standalone:
        if target is not None and vocab_size != target.vocab_size:
            yield problem(
                f"{engine.title} needs a draft with the target's vocabulary of {target.vocab_size}"
                f" tokens, and the draft's has {vocab_size}"
            )
    elif head is None:
        yield problem(
            f"cannot check whether {engine.title} loads the draft: specdistill does not know how"
            f" engines load drafts of method {method}",
            export_advice,
        )
    elif loader is None:
        yield problem(
            f"{engine.title} is not known to load a draft of method {method} in this format",
            export_advice,
        )
    else:
        result = check_loader(loader, config, shapes, head, target)
        name = f"{engine.title} {engine.loader_version or engine.versions}"
        yield from (
            problem(f"{name} refuses the draft: {reason}", export_advice)
            for reason in result.refused
        )
        # Faults that the engine does not report are the worst: it then drafts with wrong weights.
        yield from (
            problem(f"{name} loads the draft without an error, but {fault}", export_advice)
            for fault in result.silent
        )
        yield from (note(f"{name}: {fact}") for fact in result.notes)


def read_recorded_length(draft: Path) -> SimulatedAcceptance | None:
    """Read the best acceptance length that a draft's training simulated, from its history.

    The best one is that of the draft's weights, because training saves the weights of its best
    evaluation.

    Returns:
        The acceptance length and the draft tokens per round; None without a history.
    """
    # Find the evaluation with the best acceptance length.
    history = read_history(draft, key=KEY)
    evaluations = (
        [entry for entry in history.log if "eval_acceptance_length" in entry] if history else []
    )
    if not evaluations:
        return None
    best = max(evaluations, key=lambda entry: float(entry["eval_acceptance_length"]))

    # An evaluation has an entry for each draft token of a round, such as `eval_acceptance_1`.
    positions = [key for key in best if key.startswith("eval_acceptance_") and key[-1].isdigit()]
    return SimulatedAcceptance(
        num_tokens=len(positions) or DEFAULT_STEPS, length=float(best["eval_acceptance_length"])
    )


def check_acceptance(
    diagnosis: Diagnosis, target: FrozenTarget, proposer: Proposer, prompts: Sequence[Sequence[int]]
) -> SimulatedAcceptance:
    """Decode prompts with a draft, and add findings if few draft tokens are accepted.

    The findings say how the acceptance compares with training, and name a likely cause.

    Args:
        diagnosis: the diagnosis of the draft's files, which gets the findings.
        target: the target.
        proposer: the draft, loaded for decoding.
        prompts: token ids of each prompt.

    Returns:
        The acceptance on these prompts.
    """
    assert diagnosis.method is not None

    # Decode with as many draft tokens per round as in the evaluations of training. Without a
    # history, take DEFAULT_STEPS, but not more than the draft's sliding window: a draft must see
    # all earlier draft tokens of its round.
    expected = diagnosis.recorded
    window = diagnosis.config.sliding_window if diagnosis.config else None
    num_tokens = expected.num_tokens if expected else min(DEFAULT_STEPS, window or DEFAULT_STEPS)
    completions = complete(Decoder(target, proposer), prompts, num_tokens)
    decoded = compute_acceptance_length(completions, num_tokens)
    findings = _compare_with_training(expected, decoded, completions)

    # Look for a wrong setting of the draft. A setting is wrong if repairing it brings the draft's
    # predictions closer to the target's, and right if it is in the recipe of the draft's run.
    advice = load_method(diagnosis.method).advice
    run = run_of(diagnosis.folder)
    recipe = read_run_recipe(run) if run else None
    recorded_settings = vars(recipe.draft) if isinstance(recipe, TrainedRecipe) else {}
    cause = _find_cause(
        advice,
        getattr(proposer, "draft", None),  # Some proposers have no module.
        target,
        completions,
        num_tokens,
        recorded_settings,
    )

    # Without a clear cause, list the usual causes of low acceptance, or say that there is no
    # training history to compare with.
    if cause:
        findings.append(cause)
    elif any(finding.severity == "problem" for finding in findings):
        likely_causes = [
            "the draft was trained for another target, or another revision of the target",
            "the draft was trained too briefly",
            advice.likely_cause,
            "the prompts are unlike the draft's training data: choose others with suite=",
        ]
        findings.append(note(f"likely causes: {'; '.join(likely_causes)}"))
    elif expected is None and not findings:
        findings.append(
            warning(
                "found no training history to compare the acceptance with",
                "run `specdistill eval` to measure the draft",
            )
        )
    diagnosis.findings += findings
    return decoded


def _compare_with_training(
    expected: SimulatedAcceptance | None,
    decoded: SimulatedAcceptance,
    completions: Sequence[Generation],
) -> list[Finding]:
    """Return a finding if hardly any draft tokens are accepted, or far fewer than in training.

    Args:
        expected: the acceptance that training simulated; None without a history.
        decoded: the acceptance in the completions.
        completions: the completion of each prompt, decoded with the draft.

    Returns:
        A list with one finding; empty if enough draft tokens are accepted.
    """
    # Compute the share of rounds that accept their first draft token.
    is_first_accepted = []
    for completion in completions:
        for entry in completion.rounds:
            is_first_accepted.append(entry.num_accepted > 0)
    first_token_rate = sum(is_first_accepted) / max(1, len(is_first_accepted))

    # Compare accepted draft tokens per round: the acceptance length minus 1, because each round
    # also emits a token of the target's own. The upper end of the confidence interval is used, so
    # that a few unlucky prompts do not make a finding.
    is_far_below = False
    if expected is not None:
        most_accepted = _compute_upper_length(completions) - 1
        is_far_below = most_accepted < LOW_ACCEPTANCE_SHARE * (expected.length - 1)

    # Hardly any accepted tokens are a problem of the draft's files or settings, unless the draft
    # was just as bad in its training.
    if first_token_rate < NO_BETTER_THAN_CHANCE:
        accepted = f"only {first_token_rate:.0%} of rounds accept their first draft token"
        if expected is None or is_far_below:
            return [problem(accepted)]
        return [
            warning(
                f"{accepted}, and few draft tokens were accepted in the draft's training, too",
                "train the draft longer, or with a larger learning rate",
            )
        ]
    if expected is not None and is_far_below:
        return [
            problem(
                f"acceptance length {decoded.length:.2f} on {len(completions)} prompts is far below"
                f" the {expected.length:.2f} in the draft's training, with the same number"
                " of draft tokens per round"
            )
        ]
    return []


def complete(
    decoder: Decoder, prompts: Sequence[Sequence[int]], num_draft_tokens: int
) -> list[Generation]:
    """Generate up to NUM_TOKENS tokens greedily after each prompt, and return the completions.

    Args:
        decoder: the target with a draft.
        prompts: the token ids of each prompt.
        num_draft_tokens: the most draft tokens of a round.
    """
    return [
        decoder.generate(prompt, max_new_tokens=NUM_TOKENS, num_speculative_tokens=num_draft_tokens)
        for prompt in prompts
    ]


def compute_acceptance_length(
    completions: Sequence[Generation], num_tokens: int
) -> SimulatedAcceptance:
    """Return the acceptance length of completions: tokens emitted in rounds, divided by rounds.

    Args:
        completions: the completions.
        num_tokens: draft tokens per round. This number is only copied to the result.

    Returns:
        The counted acceptance length. The class is called `SimulatedAcceptance` because it also
        holds acceptance lengths that training simulated.
    """
    emitted_per_round = []
    for completion in completions:
        for entry in completion.rounds:
            emitted_per_round.append(len(entry.emitted))
    num_rounds = len(emitted_per_round)
    return SimulatedAcceptance(num_tokens, sum(emitted_per_round) / max(1, num_rounds), num_rounds)


def _compute_upper_length(completions: Sequence[Generation]) -> float:
    """Return the upper end of the confidence interval of the acceptance length.

    The interval is that of the mean over prompts. For a single prompt, the upper end is the
    acceptance length itself.
    """
    mean_lengths = []
    for completion in completions:
        if completion.rounds:
            mean_lengths.append(fmean(len(entry.emitted) for entry in completion.rounds))
    _, high = compute_confidence_interval(mean_lengths, CONFIDENCE)
    return high


def _is_recorded(draft: object, repaired: object, recorded: Mapping[str, object]) -> bool:
    """Return whether a recipe confirms all settings that a repair of the draft would change.

    A recipe confirms a setting if it states the value that the draft has before the repair. Such a
    setting is right, so the repair need not be tried.

    Args:
        draft: the draft, which has a `config`.
        repaired: the draft with changed settings.
        recorded: the section `draft` of the recipe of the draft's run.
    """
    # List the settings that the repair changes, with their values before it.
    before = getattr(draft, "config", None)
    after = getattr(repaired, "config", None)
    if not is_dataclass(before) or not is_dataclass(after):
        return False
    changed = {name: value for name, value in vars(before).items() if vars(after)[name] != value}
    return bool(changed) and all(
        _list_values(recorded.get(name)) == _list_values(value) for name, value in changed.items()
    )


def _list_values(value: object) -> object:
    """Convert a tuple to a list, so that it compares equal to the list in a recipe.

    Any other value is returned unchanged.
    """
    return list(value) if isinstance(value, tuple) else value


def compute_confidence_interval(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """Return the confidence interval of the mean of independent values, by Student's t.

    For a single value, or equal values, both ends are that value.

    Args:
        values: the values.
        confidence: the confidence level, for example 0.95.

    Returns:
        The lower and the upper end.
    """
    mean = fmean(values)
    if len(values) < 2 or max(values) == min(values):
        return mean, mean

    # Half of the width: the quantile of Student's t times the standard error of the mean.
    half = (
        float(t.ppf((1 + confidence) / 2, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    )
    return mean - half, mean + half


def _find_cause(
    advice: Advice[nn.Module],
    draft: nn.Module | None,
    target: FrozenTarget,
    completions: Sequence[Generation],
    num_tokens: int,
    recorded: Mapping[str, object],
) -> Finding | None:
    """Find the wrong setting of a draft that explains why few draft tokens are accepted.

    The method of the draft knows likely causes, such as a wrong rotary base, and how to repair each
    one. Each repair is tried on completions of the target. The cause that is found is the one whose
    repair lowers the KL divergence to the target most. The evidence must be clear: the confidence
    interval of this drop, over prompts, must exclude 0.

    Args:
        advice: the advice of the draft's method, which simulates drafting and makes the repairs.
        draft: the draft; None if the proposer has no module.
        target: the target.
        completions: the completion of each prompt.
        num_tokens: draft tokens per round.
        recorded: the section `draft` of the run's recipe, whose settings are right; empty without a
            recipe.

    Returns:
        The cause as a finding; None if there is no clear one, or drafting cannot be simulated.
    """
    # Short completions have too few positions to compare.
    completions = [
        completion for completion in completions if len(completion.token_ids) > 2 * num_tokens
    ]
    if not completions or draft is None or advice.build_simulation(draft, num_tokens) is None:
        return None

    # Measure how close the draft is to the target as it is, and after each repair. Repairs of
    # settings that the recipe confirms are skipped.
    fits_before = _measure_fits(advice, draft, target, completions, num_tokens)
    repairs = []
    for cause, repaired in advice.find_repairs(draft, target):
        if not _is_recorded(draft, repaired, recorded):
            fits = _measure_fits(advice, repaired, target, completions, num_tokens)
            repairs.append((cause, fits))
    best_repair = _choose_repair(fits_before, repairs)
    if best_repair is None:
        return None

    # A repair after which hardly any token is accepted does not explain the low acceptance.
    cause, fits_after = best_repair
    length_before = fmean(length for _, length in fits_before)
    length_after = fmean(length for _, length in fits_after)
    if length_after - 1 < NO_BETTER_THAN_CHANCE:
        return None

    # The finding is a problem if the repair also makes clearly more tokens accepted. Otherwise it
    # is a warning.
    gains = [
        after - before for (_, before), (_, after) in zip(fits_before, fits_after, strict=True)
    ]
    lowest_gain, _ = compute_confidence_interval(gains, CONFIDENCE)
    is_large_gain = length_after - 1 > MIN_ACCEPTANCE_GAIN * (length_before - 1)
    make_finding = problem if is_large_gain and lowest_gain > 0 else warning
    drop = fmean(_compute_drops(fits_before, fits_after))
    return make_finding(
        cause,
        f"with this repaired, the KL divergence to the target is {drop:.0%} lower, and the"
        f" simulated acceptance length changes from {length_before:.2f} to {length_after:.2f}",
    )


def _measure_fits(
    advice: Advice[nn.Module],
    draft: nn.Module,
    target: FrozenTarget,
    completions: Sequence[Generation],
    num_tokens: int,
) -> list[Fit]:
    """Return how close a draft is to the target on each completion.

    A single completion is cut into parts, so that there are several numbers for a confidence
    interval.

    Args:
        advice: the advice of the draft's method, which simulates drafting.
        draft: the draft, as it is or repaired.
        target: the target.
        completions: the completion of each prompt.
        num_tokens: draft tokens per round.

    Returns:
        For each completion or part, the mean forward KL to the target in nats, and the simulated
        acceptance length.
    """
    objective = advice.build_simulation(draft, num_tokens)
    num_parts = NUM_PARTS if len(completions) == 1 else 1
    fits = []
    for completion in completions:
        for part in range(num_parts):
            fits.append(_fit(objective, target, completion, part, num_parts))
    return fits


def _choose_repair(
    fits_before: Sequence[Fit], repairs: Sequence[tuple[str, list[Fit]]]
) -> tuple[str, list[Fit]] | None:
    """Choose the repair that lowers the divergence to the target most.

    The drop must be larger than MIN_DIVERGENCE_DROP, and its confidence interval must exclude 0.

    Args:
        fits_before: how close the draft is to the target as it is, for each completion.
        repairs: for each repair the cause that it removes, and how close the repaired draft is.

    Returns:
        The cause, and how close the repaired draft is; None if no repair is clearly better.
    """
    # With several repairs, one may look better by chance. So each is tested at a stricter
    # confidence level (Bonferroni's correction).
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(repairs))
    best_repair = None
    best_drop = MIN_DIVERGENCE_DROP
    for cause, fits_after in repairs:
        drops = _compute_drops(fits_before, fits_after)
        lowest_drop, _ = compute_confidence_interval(drops, confidence)
        if fmean(drops) > best_drop and lowest_drop > 0:
            best_repair = (cause, fits_after)
            best_drop = fmean(drops)
    return best_repair


def _compute_drops(fits_before: Sequence[Fit], fits_after: Sequence[Fit]) -> list[float]:
    """Return the share by which a repair lowers the divergence, for each completion.

    For example, 0.2 if the divergence is 20 % lower; 0 if there was no divergence before.

    Args:
        fits_before: divergence and acceptance length of each completion, with the draft as it is.
        fits_after: the same with the repaired draft.
    """
    pairs = zip(fits_before, fits_after, strict=True)
    return [1 - after / before if before else 0.0 for (before, _), (after, _) in pairs]


@torch.inference_mode()
def _fit(
    objective: Any, target: FrozenTarget, completion: Generation, part: int, num_parts: int
) -> Fit:
    """Measure how close a draft is to the target on a completion, or on a part of one.

    The draft is run once over the text, as in training. Divergence is measured, because it varies
    less than a count of accepted tokens.

    Args:
        objective: the training objective of the draft, which simulates drafting.
        target: the target.
        completion: the completion of a prompt.
        part: the number of the part, from 0.
        num_parts: the number of parts into which the completion is cut.

    Returns:
        The mean forward KL to the target over the draft steps, in nats, and the simulated
        acceptance length.
    """
    # Make a row of prompt and completion. Only the positions of this part of the completion have a
    # loss.
    ids = torch.tensor([[*completion.prompt_ids, *completion.token_ids]], device=target.device)
    positions = torch.arange(ids.shape[1], device=target.device).unsqueeze(0)
    num_new = len(completion.token_ids)
    num_prompt_tokens = len(completion.prompt_ids)
    begin = num_prompt_tokens + num_new * part // num_parts
    end = num_prompt_tokens + num_new * (part + 1) // num_parts
    inputs = {
        "input_ids": ids,
        "loss_mask": ((positions >= begin) & (positions < end)).long(),
        "document_ids": torch.zeros_like(ids),
        "position_ids": positions,
    }

    # Run the draft. `sums` has, for each draft step, sums over the positions.
    objective = objective.eval()
    inputs = objective.prepare(index_batch(inputs), None)
    target_outputs = objective.read_target(target, inputs)
    _, sums = objective(**inputs, **target_outputs, measure=True)

    # Average the divergence over the draft steps. The acceptance length is 1, for the target's own
    # token, plus for each step the share of drafts whose tokens are right up to and including this
    # step.
    mean_losses = [
        float(total / count) for total, count in zip(sums.loss, sums.loss_tokens, strict=True)
    ]
    correct_shares = [
        float(correct / chains)
        for correct, chains in zip(sums.chain_correct, sums.chains, strict=True)
    ]
    return fmean(mean_losses), 1 + sum(correct_shares)
