"""`specdistill acquire`, and what it prints."""

from specdistill.cli.launch import import_libraries
from specdistill.common.errors import ExitCode
from specdistill.common.terminal import print_result
from specdistill.hub.options import AcquireOptions
from specdistill.recipe.load import load_recipe
from specdistill.recipe.short_keys import TARGET, select_recipe_keys


def acquire(arguments: list[str]) -> int:
    """Fetch a published draft, checked against its target first; prints the local path.

    specdistill acquire method=eagle3 target=org/model draft=org/draft@v1
    """
    options = load_recipe(AcquireOptions, select_recipe_keys(arguments, TARGET))
    import_libraries()
    # This module imports torch, so it is imported only here.
    from specdistill.hub.acquire import acquire as fetch

    folder = fetch(options)
    print(folder)
    print_result({"folder": folder})
    return ExitCode.DONE
