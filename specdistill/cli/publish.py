"""`specdistill publish`: publish the draft of a run on the Hub."""

from specdistill.cli.launch import import_libraries
from specdistill.common.errors import ExitCode
from specdistill.common.terminal import print_result
from specdistill.hub.options import PublishOptions
from specdistill.recipe.load import load_recipe
from specdistill.recipe.short_keys import select_recipe_keys


def publish(arguments: list[str]) -> int:
    """Publish on the Hub a draft that passed its gate, with its report and a model card.

    specdistill publish run=runs/mine repo=org/name baseline=none dry_run=true
    """
    # Check the options before torch is imported, which is slow.
    options = load_recipe(PublishOptions, select_recipe_keys(arguments))
    import_libraries()
    # This module imports torch, so it is imported only here.
    from specdistill.hub.publish import print_outcome, publish_run

    # If the draft is refused, it is not published, and the outcome has no folder. With force=REASON
    # a refused draft is published nevertheless, and the model card states the refusals.
    outcome = publish_run(options)
    print_outcome(outcome)
    print_result(outcome)
    return ExitCode.CHECK_FAILED if outcome.refusals and outcome.folder is None else ExitCode.DONE
