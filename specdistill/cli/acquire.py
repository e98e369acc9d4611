"""`specdistill acquire`: fetch a published draft."""

from specdistill.cli.launch import import_libraries
from specdistill.common.errors import ExitCode
from specdistill.common.terminal import print_result
from specdistill.hub.options import AcquireOptions
from specdistill.recipe.load import load_recipe
from specdistill.recipe.short_keys import TARGET, select_recipe_keys


def acquire(arguments: list[str]) -> int:
    """Check a published draft against its target, fetch it, and print its local path.

    specdistill acquire method=eagle3 target=org/model draft=org/draft@v1
    """
    # Check the options before torch is imported, which is slow.
    options = load_recipe(AcquireOptions, select_recipe_keys(arguments, TARGET))
    import_libraries()
    # This module imports torch, so it is imported only here.
    from specdistill.hub.acquire import acquire as fetch_draft

    # Print only the path of the draft, so that a shell can use the output. `print_result` prints
    # nothing without --json.
    folder = fetch_draft(options)
    print(folder)
    print_result({"folder": folder})
    return ExitCode.DONE
