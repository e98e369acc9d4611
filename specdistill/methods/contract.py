"""What a method is made of: the functions that scripts, measurement, the doctor, planning and exports call, whatever the method.

Each method's folder has a `method.py` with one `METHOD`. Commands reach it through `METHODS[name].implementation()` and know nothing else
of the method, so that a new one is a folder and a row of the table.
"""

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from torch import Size, nn

from specdistill.decoding.proposer import Proposer
from specdistill.engines.engine import Layout
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget

Draft = Any  # a method's own module


def inapplicable(*arguments: Any) -> Any:
    """In the place of a function that does not apply to a method, and is not called."""
    raise AssertionError(arguments)


@dataclass(frozen=True)
class Implementation:
    """The functions of a method.

    Args:
        load_proposer: (folder or None, target, key=, **options) -> what decodes with the draft. `key` is the recipe key that errors
            name, `options` are the method's own (see `Recipe.proposer_options`).
        planned: (planner, given draft or None, recipe's keys) -> what `specdistill plan` counts (see specdistill.planning.plan).
        lookup: (fewest, most tokens that agree) -> the proposer that stands in front of a draft, of a method that does not read the target.
        has_tensors: names of a folder's tensors -> whether they are this method's, beyond doubt.
        is_named: (config.json, names of tensors) -> whether a folder calls itself this method's.
        create: (recipe, target, rows of training data) -> the draft before its first step, in float32 on the target's device. Raises
            UserError where the target cannot have one.
        save: (draft, target, folder): write the draft in its public layout.
        objective: (draft, recipe, target) -> the draft with its loss (see specdistill.training.objective.Objective).
        head_shape: (config.json, layers of the target or None) -> the shape of a head as it was trained; None for other drafts.
        check: (folder, tensors by name, target or None, key=, name=, **options, as of load_proposer) -> `head_shape` as decoding would
            read it. Raises UserError for a draft that is broken or does not fit the target, as far as tensors without content tell, for
            one whose weights are not fetched yet. `name` is what errors call it.
        check_native: (shapes of the checkpoint's tensors by name, target) -> how many tensors such a layer has in the target's own
            checkpoint. Raises UserError where it holds none. None where targets have none.
        simulated: (the `draft` of a proposer, K) -> an objective that measures K draft tokens on completions of the target, by which the
            doctor asks why a draft accepts little; None where drafting cannot be simulated so.
        repaired: (draft, target) -> one at a time, a likely cause in a draft whose files are right, and the draft without it.
        likely_cause: why a draft of this method may accept little, where no repair explains it.
        check_served: (engine, its layout, draft, target). Raises UserError for what the engine cannot express, the layout's `limits` apart.
        export: (folder, engine, its layout, output, target or None, K): write the draft for an engine (see `Serving`).
        is_described: (draft, target) as their config.json describes them (see specdistill.methods.sizes) -> whether it is this method's.
        native_layers: (config.json, names of tensors as far as they are at hand, text config) of a target -> the key that says how many
            such layers it comes with, and how many; None for none.
    """

    load_proposer: Callable[..., Proposer]
    planned: Callable[..., Any]
    lookup: Callable[[int, int], Proposer] = inapplicable
    has_tensors: Callable[[Set[str]], bool] = lambda names: False
    is_named: Callable[[Mapping[str, Any], Set[str]], bool] = lambda config, names: False
    create: Callable[[Any, FrozenTarget, Dataset], Draft] = inapplicable
    save: Callable[[Draft, FrozenTarget, Path], None] = inapplicable
    objective: Callable[[Draft, Any, FrozenTarget], nn.Module] = inapplicable
    head_shape: Callable[[Mapping[str, Any], int | None], Any] = lambda config, num_layers: None
    check: Callable[..., Any] = lambda folder, tensors, target, **options: None
    check_native: Callable[[Mapping[str, Size], TargetFiles], int] | None = None
    simulated: Callable[[Draft, int], nn.Module] | None = None
    repaired: Callable[[Draft, FrozenTarget], Iterator[tuple[str, Draft]]] = lambda draft, target: (
        iter(())
    )
    likely_cause: str = "the features it was trained on came from elsewhere (other layers, quantised, before the final norm)"
    check_served: Callable[[str, Layout, Draft, FrozenTarget], None] = (
        lambda engine, layout, draft, target: None
    )
    export: Callable[..., None] = inapplicable
    is_described: Callable[[Any, Any], bool] = lambda draft, target: False
    native_layers: Callable[[Mapping[str, Any], Set[str], Any], tuple[str, int] | None] = (
        lambda config, names, text: None
    )
