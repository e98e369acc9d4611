"""Examine a draft: check its files, then decode a few prompts if the files are sound enough.

The files must be whole, fit the target, and be loaded by an engine as the draft was trained.
Everything that a reader refuses is a finding. So are values that no training produces, a vocabulary
whose two maps do not agree, settings that differ from the target's, and what the loader of an
engine makes of the folder.

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
# Weights of trained drafts stay far below this. A larger one is a sign that training diverged.
MAX_TRAINED_WEIGHT = 1000.0
# A draft is no better than chance if a smaller share of its first draft tokens is accepted. Even a
# draft that only knows the most frequent tokens is sometimes right.
NO_BETTER_THAN_CHANCE = 0.05
# Acceptance is far below that of training if it is less than this share of the draft tokens that
# were accepted then. A larger share would also report drafts that merely meet other text here.
LOW_ACCEPTANCE_SHARE = 0.6
# A repair counts if the divergence falls by more than this share. A smaller fall changes nothing in
# decoding, however certain it is.
MIN_DIVERGENCE_DROP = 0.02
CONFIDENCE = 0.95  # the confidence level over all causes that are tried together
# The parts that the completion of a single prompt is cut into. They are used in place of prompts.
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
    """An acceptance length, simulated in training or counted in a few completions.

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
        config: the shape of a head; None for other drafts, or if it was not understood.
        num_tensors: tensors in its files.
        dtype: of its weights; None if it is not known.
        refused: whether a reader refused the draft, so that nothing can be decoded with it.
        findings: everything that was found.
        prompts: a description of what was decoded, in words; None if nothing was.
        acceptance: the acceptance on these prompts; None if nothing was decoded.
        behind_lookup: the acceptance with a lookup in front; None if it was not tried.
        recorded: what training simulated when it chose these weights; None without a history.
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
        """A description of the draft in one line."""
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
    """Examine the draft that the options name.

    With a target, prompts are decoded too, unless the options say otherwise.

    Raises:
        UserError: if the draft, the target or the suite is not one.
        ResourceError: when the Hub fails.
    """
    # Open the files of draft and target.
    model = options.target.model
    engine = options.engine
    lookup_first = options.eval.lookup_first
    # A draft of the same name as the target is the layer in the target's own checkpoint. None of
    # its weights are read.
    draft = Path(options.draft) if options.draft == model else locate(options.draft, key=KEY)
    file_options = options.target.model_dump(include={"revision", "adapter", "trust_remote_code"})
    files = TargetFiles(model, **file_options) if model else None
    if files and draft.resolve() == Path(files.name).resolve():
        return examine_native_layer(files)

    # Examine the files, and read what training recorded.
    diagnosis = examine_draft(draft, files, engine, options)
    run = run_of(draft)
    # An export in the run's folder has the history of the run's draft.
    diagnosis.recorded = read_recorded_length(run / "draft" if run else draft)
    if engine and lookup_first and not ENGINES[engine].describe_front(lookup_first):
        diagnosis.findings.append(
            problem(
                f"specdistill cannot start {ENGINES[engine].title} with this lookup in front of the"
                " draft",
                "change eval.lookup_first or leave it out, or name another engine",
            )
        )

    # Decode a few prompts, unless a reader refused the files.
    if model and options.decode:
        if diagnosis.method is None or diagnosis.refused:
            diagnosis.findings.append(note("skipped decoding: fix the problems above first"))
        else:
            _try_on_prompts(diagnosis, draft, run, options)
    return diagnosis


def _try_on_prompts(
    diagnosis: Diagnosis, draft: Path, run: Path | None, options: CommonDoctorOptions
) -> None:
    """Decode a few prompts with a draft, and add the acceptance and its causes to the diagnosis.

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
        # What training recorded may have been simulated on other text, so it is not compared.
        diagnosis.recorded = None
        diagnosis.findings.append(
            warning(
                f"the draft is tried on lines of Python ({DEFAULT_SUITE}), because no run here"
                " says what text it was trained for",
                "name prompts of that text with suite=",
            )
        )

    # Decode the prompts with the draft, and look for the cause if it accepts little.
    with collect_refusals(diagnosis):
        method_options = list_method_options(options, [diagnosis.method])[0]
        proposer = load_proposer(
            diagnosis.method, draft, target, key=KEY, logs=False, **method_options
        )
        diagnosis.acceptance = check_acceptance(diagnosis, target, proposer, prompts)

        # Decode them once more behind the lookup, with enough tokens per round for both.
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
    """Examine the files of a draft.

    Args:
        folder: of the draft.
        target: the target that it drafts for; None to examine the draft alone.
        engine: the name of an engine whose `loaders` the draft is checked against; None for none.
        options: the options of the command, of which those of decoding are read; None for none.

    Raises:
        UserError: as `diagnose`.
        ResourceError: as `diagnose`.
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

    # Look at the values of the tensors, and at what engines read in config.json.
    floats = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
    diagnosis.num_tensors = len(tensors)
    diagnosis.dtype = choose_stored_dtype(floats) if floats else None
    diagnosis.findings += _check_values(tensors, config)
    sections = [config, *(config.get(name) or {} for name in NESTED_SECTIONS)]
    if not any(section.get("architectures") for section in sections):
        diagnosis.findings.append(
            problem(
                "config.json names no architectures",
                "engines choose the class that loads a draft by this key",
            )
        )

    # Compare the draft with its target.
    method_options = list_method_options(options, [diagnosis.method])[0] if options else {}
    _check_fit(diagnosis, config, tensors, target, method_options)

    # Follow the engine's loader over the names and shapes of the tensors.
    if engine is not None:
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        diagnosis.findings += find_loader_problems(
            ENGINES[engine], diagnosis.method, diagnosis.config, config, shapes, target
        )
        if method_options.get("heterogeneous_vocab"):
            diagnosis.findings.append(
                problem(
                    f"specdistill cannot start {ENGINES[engine].title} with a draft that has"
                    " another tokenizer than the target",
                    "leave heterogeneous_vocab out, for a draft with the target's tokenizer",
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
    """Compare a draft with its target: by the record of its training, then tensor by tensor.

    Args:
        diagnosis: the diagnosis, whose method is known. It gets the findings.
        config: the draft's config.json.
        tensors: the draft's tensors, by name.
        target: the target; None to check the draft alone.
        method_options: options of decoding that the draft's method has.
    """
    assert diagnosis.method is not None
    folder = diagnosis.folder
    if target is not None:
        with collect_refusals(diagnosis):
            check_target(folder, target, KEY, **method_options)

    # The method's own reader refuses a draft that cannot be loaded for this target.
    with collect_refusals(diagnosis):
        diagnosis.config = load_method(diagnosis.method).check(
            folder, tensors, target, key=KEY, name=folder, **method_options
        )

    # Settings that differ without being refused are findings, too.
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

    Only the names and shapes of its tensors are read.
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
                "not decoded: the layer is in the target's own checkpoint, from which engines"
                " serve it"
            )
        )
    return diagnosis


@contextmanager
def collect_refusals(diagnosis: Diagnosis, key: str = KEY) -> Iterator[None]:
    """Turn a UserError about the draft into a finding.

    Args:
        diagnosis: the diagnosis that gets the finding. It is marked as refused.
        key: the key of errors about the draft, which the finding leaves out. Other errors are
            raised.
    """
    try:
        yield
    except UserError as error:
        if error.key != key:
            raise
        diagnosis.refused = True
        diagnosis.findings.append(problem(str(error).removeprefix(f"{key}: got ")))


def find_norms_that_add_one(config: RawConfig) -> dict[str, bool]:
    """Return whether each norm of a model multiplies by 1 + weight, by its name within a layer.

    The weight of such a norm begins at zero, where it changes nothing.

    Args:
        config: of a draft. A multi-token-prediction layer has its target's config in `text_config`.

    Returns:
        By the name of each norm within a layer. Empty if transformers cannot build such a model.
    """
    # Build the model of the config without weights. A config that transformers does not know says
    # nothing about its norms.
    try:
        model_config = AutoConfig.for_model(**(config.get("text_config") or config))
        with torch.device("meta"):
            model = find_auto_class(model_config).from_config(model_config)
    except CLASS_ERRORS:
        return {}

    # Try one norm of each name: all layers have the same kind.
    result: dict[str, bool] = {}
    for name, module in model.named_modules():
        place = LAYER.sub("", name)
        weight = getattr(module, "weight", None)
        if "norm" in place and place not in result and isinstance(weight, Tensor):
            result[place] = False
            # A norm with a gate takes two inputs, so it fails here. It adds nothing to its weight.
            with suppress(*CLASS_ERRORS):
                result[place] = is_one_plus_weight(module.to_empty(device="cpu"))
    return result


def _check_values(tensors: Mapping[str, Tensor], config: RawConfig) -> Iterator[Finding]:
    """Yield a finding for each tensor with values that no training produces.

    The readers refuse NaN and infinity already.
    """
    # Building the model takes a while, so the norms are looked at only if one of them is all zeros.
    adds_one_at = cache(lambda: find_norms_that_add_one(config))
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            continue

        # A norm that multiplies by 1 + weight begins at zero. Its zeros are no sign of a missing
        # weight.
        largest = max(map(abs, find_extremes(tensor)))
        if largest == 0 and "norm" in name:
            place = LAYER.sub("", name.removesuffix(".weight"))
            # The norms around a multi-token-prediction layer are of the kind that is in it.
            largest = adds_one_at().get(place, any(adds_one_at().values()))
        if not largest and not name.endswith(".bias"):
            yield problem(
                f"{name} is all zeros", "it was not saved, or not trained: save the draft again"
            )
        elif largest > MAX_TRAINED_WEIGHT:
            yield warning(
                f"{name} has a very large weight: {largest:.3g}",
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
    """Yield findings about how an engine would load a draft's folder.

    An engine loads a draft model as any model, and compares its vocabulary with the target's.

    Args:
        engine: the engine.
        method: the draft's method.
        head: the shape of a head; None for other drafts.
        config: the draft's config.json.
        shapes: of the draft's tensors, by name.
        target: the target's files, if they are known.
    """
    row = METHODS[method]
    size = config.get("vocab_size")
    serving = row.serving().get(engine.name, Serving())

    # The advice for all problems, if an export writes a layout that the engine loads.
    exported = (
        f"specdistill export engine={engine.name} writes a draft as it loads it"
        if serving.layout
        else ""
    )
    loader = find_loader(serving.loaders, config)

    # A layer of the target's own and a draft model have no loader of their own to follow.
    if row.in_target:
        yield problem(
            f"{engine.title} loads a multi-token-prediction layer only from the target's own"
            " checkpoint",
            exported,
        )
    elif row.standalone:
        if target is not None and size != target.vocab_size:
            yield problem(
                f"{engine.title} needs a vocabulary of {target.vocab_size}, as the target has, and"
                f" the draft's is {size}"
            )
    elif head is None:
        yield problem(
            f"the loader of {engine.title} cannot be checked: method {method} does not describe the"
            " layout of its heads",
            exported,
        )
    elif loader is None:
        yield problem(
            f"{engine.title} is not known to load method {method} in this layout", exported
        )
    else:
        result = check_loader(loader, config, shapes, head, target)
        name = f"{engine.title} {engine.loader_version or engine.versions}"
        yield from (problem(f"{name} refuses it: {what}", exported) for what in result.refused)
        yield from (
            problem(f"{name} reports no error, but {what}", exported) for what in result.silent
        )
        yield from (note(f"{name}: {what}") for what in result.notes)


def read_recorded_length(draft: Path) -> SimulatedAcceptance | None:
    """Return the best acceptance length in the history of a draft's training.

    The weights were chosen by it.

    Returns:
        The acceptance; None without a history.
    """
    # Find the evaluation by which training chose the weights that it saved.
    history = read_history(draft, key=KEY)
    evaluations = (
        [entry for entry in history.log if "eval_acceptance_length" in entry] if history else []
    )
    if not evaluations:
        return None
    best = max(evaluations, key=lambda entry: float(entry["eval_acceptance_length"]))

    # An evaluation has an entry for each drafted position, such as `eval_acceptance_1`.
    steps = [key for key in best if key.startswith("eval_acceptance_") and key[-1].isdigit()]
    return SimulatedAcceptance(len(steps) or DEFAULT_STEPS, float(best["eval_acceptance_length"]))


def check_acceptance(
    diagnosis: Diagnosis, target: FrozenTarget, proposer: Proposer, prompts: Sequence[Sequence[int]]
) -> SimulatedAcceptance:
    """Decode prompts with a draft, and add what that shows to the findings.

    Args:
        diagnosis: the diagnosis of the draft's files, which gets the findings.
        target: the target.
        proposer: the draft, loaded for decoding.
        prompts: token ids of each prompt.

    Returns:
        The acceptance on these prompts.
    """
    assert diagnosis.method is not None

    # Decode with as many draft tokens per round as training evaluated with. They must fit into the
    # draft's sliding window.
    expected = diagnosis.recorded
    window = diagnosis.config.sliding_window if diagnosis.config else None
    num_tokens = expected.num_tokens if expected else min(DEFAULT_STEPS, window or DEFAULT_STEPS)
    completions = complete(Decoder(target, proposer), prompts, num_tokens)
    decoded = compute_acceptance_length(completions, num_tokens)
    findings = _compare_with_training(expected, decoded, completions)

    # Look for a setting whose repair brings the draft closer to the target. Settings that the
    # recipe of the draft's run records are not questioned.
    advice = load_method(diagnosis.method).advice
    run = run_of(diagnosis.folder)
    recipe = read_run_recipe(run) if run else None
    recorded_settings = vars(recipe.draft) if isinstance(recipe, TrainedRecipe) else {}
    cause = _find_cause(
        advice,
        getattr(proposer, "draft", None),
        target,
        completions,
        num_tokens,
        recorded_settings,
    )

    # Without a clear cause, name the usual ones, or say that there was nothing to compare with.
    if cause:
        findings.append(cause)
    elif any(finding.severity == "problem" for finding in findings):
        likely_causes = [
            "it was trained for another target, or another revision of it",
            "it was hardly trained",
            advice.likely_cause,
            "the prompts are unlike its training data: choose others with suite=",
        ]
        findings.append(note(f"likely causes: {'; '.join(likely_causes)}"))
    elif expected is None and not findings:
        findings.append(
            warning("no training history to compare with", "`specdistill eval` measures the draft")
        )
    diagnosis.findings += findings
    return decoded


def _compare_with_training(
    expected: SimulatedAcceptance | None,
    decoded: SimulatedAcceptance,
    completions: Sequence[Generation],
) -> list[Finding]:
    """Return a finding if a draft accepts next to nothing, or far less than in its training.

    Args:
        expected: the acceptance that training simulated; None without a history.
        decoded: the acceptance on the completions.
        completions: one for each prompt.
    """
    # Count how many rounds accept their first draft token.
    is_first_accepted = []
    for completion in completions:
        for entry in completion.rounds:
            is_first_accepted.append(entry.num_accepted > 0)
    first_token_rate = sum(is_first_accepted) / max(1, len(is_first_accepted))

    # The draft is far below its training if even the upper end of the interval is. The target's own
    # token of each round does not count.
    is_far_below = False
    if expected is not None:
        most_accepted = _compute_upper_length(completions) - 1
        is_far_below = most_accepted < LOW_ACCEPTANCE_SHARE * (expected.length - 1)

    # Few accepted tokens are a problem, unless the draft was as bad when it was trained.
    if first_token_rate < NO_BETTER_THAN_CHANCE:
        accepted = f"{first_token_rate:.0%} of its first draft tokens are accepted"
        if expected is None or is_far_below:
            return [problem(accepted)]
        return [
            warning(
                f"{accepted}, as few as when it was trained",
                "train it longer, or with a larger learning rate",
            )
        ]
    if expected is not None and is_far_below:
        return [
            problem(
                f"acceptance length {decoded.length:.2f} on {len(completions)} prompts, far below"
                f" the {expected.length:.2f} that its training saw with as many draft tokens"
            )
        ]
    return []


def complete(
    decoder: Decoder, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[Generation]:
    """Complete prompts (token ids) greedily, with up to num_tokens draft tokens per round."""
    return [
        decoder.generate(prompt, max_new_tokens=NUM_TOKENS, num_speculative_tokens=num_tokens)
        for prompt in prompts
    ]


def compute_acceptance_length(
    completions: Sequence[Generation], num_tokens: int
) -> SimulatedAcceptance:
    """Return the acceptance length of completions: tokens emitted in rounds over rounds."""
    emitted = []
    for completion in completions:
        for entry in completion.rounds:
            emitted.append(len(entry.emitted))
    return SimulatedAcceptance(num_tokens, sum(emitted) / max(1, len(emitted)), len(emitted))


def _compute_upper_length(completions: Sequence[Generation]) -> float:
    """Return the upper end of the confidence interval of the acceptance length over prompts.

    For a single prompt it is the acceptance length itself.
    """
    mean_lengths = []
    for completion in completions:
        if completion.rounds:
            mean_lengths.append(fmean(len(entry.emitted) for entry in completion.rounds))
    _, high = compute_confidence_interval(mean_lengths, CONFIDENCE)
    return high


def _is_recorded(draft: object, repaired: object, recorded: Mapping[str, object]) -> bool:
    """Return whether a repair only changes settings that the run's recipe records.

    The recipe must record them with the values that the draft has.
    """
    # List the settings that the repair changes, and look each one up in the recipe.
    before = getattr(draft, "config", None)
    after = getattr(repaired, "config", None)
    if not is_dataclass(before) or not is_dataclass(after):
        return False
    changed = {name: value for name, value in vars(before).items() if vars(after)[name] != value}
    return bool(changed) and all(
        _list_values(recorded.get(name)) == _list_values(value) for name, value in changed.items()
    )


def _list_values(value: object) -> object:
    """Return a tuple as a list, as recipes write it, and any other value unchanged."""
    return list(value) if isinstance(value, tuple) else value


def compute_confidence_interval(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """Return Student's confidence interval of the mean of independent values.

    For a single value, or equal values, both ends are that value.
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
    """Return the likely cause whose repair brings the draft closest to the target.

    The evidence for it must be clear: the confidence interval over prompts of the fall in
    divergence must exclude zero. For a problem, so must the interval of the gain in accepted
    tokens. Bonferroni's correction accounts for the number of causes that are tried. Settings that
    the run's recipe records are not questioned. A single completion is cut into parts, which are
    used in place of prompts.

    Args:
        advice: of the draft's method, with its simulation and its repairs.
        draft: the draft; None if the proposer has no module.
        target: the target.
        completions: of the prompts, by the target.
        num_tokens: draft tokens per round.
        recorded: the recipe's section `draft`; empty without a recipe.

    Returns:
        The cause as a finding; None if there is no clear one, or drafting cannot be simulated.
    """
    # Short completions have too few positions to compare.
    completions = [
        completion for completion in completions if len(completion.token_ids) > 2 * num_tokens
    ]
    if not completions or draft is None or advice.build_simulation(draft, num_tokens) is None:
        return None

    # Measure the draft as it is, and with each repair of a setting that nothing records.
    fits_before = _measure_fits(advice, draft, target, completions, num_tokens)
    repairs = []
    for cause, repaired in advice.find_repairs(draft, target):
        if not _is_recorded(draft, repaired, recorded):
            fits = _measure_fits(advice, repaired, target, completions, num_tokens)
            repairs.append((cause, fits))
    best_repair = _choose_repair(fits_before, repairs)
    if best_repair is None:
        return None

    # A repair that brings the draft closer to the target, but leaves it useless, is not the cause.
    cause, fits_after = best_repair
    length_before = fmean(length for _, length in fits_before)
    length_after = fmean(length for _, length in fits_after)
    if length_after - 1 < NO_BETTER_THAN_CHANCE:
        return None

    # It is a problem only if more tokens are accepted, too. Otherwise it is a warning.
    gains = [
        after - before for (_, before), (_, after) in zip(fits_before, fits_after, strict=True)
    ]
    lowest_gain, _ = compute_confidence_interval(gains, CONFIDENCE)
    is_large_gain = length_after - 1 > MIN_ACCEPTANCE_GAIN * (length_before - 1)
    severity = problem if is_large_gain and lowest_gain > 0 else warning
    drop = fmean(_compute_drops(fits_before, fits_after))
    return severity(
        cause,
        f"after the repair, KL to the target drops {drop:.0%}, and simulated acceptance length"
        f" rises from {length_before:.2f} to {length_after:.2f}",
    )


def _measure_fits(
    advice: Advice[nn.Module],
    draft: nn.Module,
    target: FrozenTarget,
    completions: Sequence[Generation],
    num_tokens: int,
) -> list[Fit]:
    """Return how close a draft is to the target on each completion, or each part of a single one.

    Args:
        advice: of the draft's method, which simulates drafting.
        draft: the draft, as it is or repaired.
        target: the target.
        completions: of the prompts, by the target.
        num_tokens: draft tokens per round.
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
    """Return the repair with the largest drop of the divergence whose interval excludes 0.

    Args:
        fits_before: of the draft as it is.
        repairs: the cause that each repair removes, and the fits of the repaired draft.

    Returns:
        The cause and the fits after its repair; None if no repair is clearly better.
    """
    # Several repairs are tried, so each one is tested at a stricter level (Bonferroni).
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
    """Return by which share the divergence drops after a repair, for each pair of fits."""
    pairs = zip(fits_before, fits_after, strict=True)
    return [1 - after / before if before else 0.0 for (before, _), (after, _) in pairs]


@torch.inference_mode()
def _fit(
    objective: Any, target: FrozenTarget, completion: Generation, part: int = 0, num_parts: int = 1
) -> Fit:
    """Return how close a head is to the target on a part of a completion.

    This varies less than the number of accepted tokens, and takes one pass of the draft.

    Args:
        objective: simulates drafting with the head.
        target: the target.
        completion: the completion.
        part: the number of the part, from 0.
        num_parts: parts that the completion is cut into.

    Returns:
        The mean forward KL of the drafted positions in nats, and the simulated acceptance length.
    """
    # The positions whose loss counts: those of this part of the completion.
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

    # Run the draft once over prompt and completion, and sum over the positions of each draft step.
    objective = objective.eval()
    inputs = objective.prepare(index_batch(inputs), None)
    target_outputs = objective.read_target(target, inputs)
    _, sums = objective(**inputs, **target_outputs, measure=True)

    # The divergence is the mean over the draft steps. The acceptance length is 1, plus the share of
    # chains that are right up to each step.
    mean_losses = [
        float(total / count) for total, count in zip(sums.loss, sums.loss_tokens, strict=True)
    ]
    correct_shares = [
        float(correct / chains)
        for correct, chains in zip(sums.chain_correct, sums.chains, strict=True)
    ]
    return fmean(mean_losses), 1 + sum(correct_shares)
