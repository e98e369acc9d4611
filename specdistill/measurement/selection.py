"""What chooses the best of a training's checkpoints: the acceptance length that decoding with each of them measures, on a small suite."""

from collections.abc import Callable
from pathlib import Path

import torch

from specdistill.decoding.decoder import Decoder
from specdistill.decoding.tree import tree_shape
from specdistill.errors import UserError
from specdistill.methods.load import load_proposer
from specdistill.methods.recipe import TrainedRecipe
from specdistill.suites.suite import load_suite, tokenize
from specdistill.targets.frozen import FrozenTarget


def decoded_acceptance_length(recipe: TrainedRecipe, target: FrozenTarget) -> Callable[[Path], float] | None:
    """(draft folder) -> tokens a target pass, decoding greedily as `eval:` says on the prompts of `selection:`; None: not asked for.

    Raises UserError for a suite that cannot be decoded with the target.
    """
    if recipe.selection is None:
        return None
    limit = recipe.selection.max_new_tokens
    suite = load_suite(recipe.selection.suite, recipe.target.model)
    room = {"max_new_tokens": limit, "max_length": target.max_length, "vocab_size": target.vocab_size}
    prompts = tokenize(suite, target.tokenizer, num_prompts=recipe.selection.num_prompts, **room)
    tree = tree_shape(**vars(recipe.eval.tree)) if recipe.eval.tree else None

    def measure(folder: Path) -> float:
        proposer = load_proposer(recipe.method, str(folder), target, **recipe.proposer_options())
        decoder, k = Decoder(target, proposer), recipe.eval.num_speculative_tokens
        with torch.compiler.set_stance("force_eager"):  # of a target that is compiled for training
            runs = [
                decoder.generate(prompt.token_ids, max_new_tokens=limit, num_speculative_tokens=k, tree=tree)
                for prompt in prompts
            ]
        accepted = [round.num_accepted for run in runs for round in run.rounds if round.drafted]
        if not accepted:
            raise UserError(
                "selection.suite", got=f"{suite.name}, whose completions end at once", expected="longer completions"
            )
        return 1 + sum(accepted) / len(accepted)

    return measure
