"""`specdistill table`: print several reports as one table."""

import json

from specdistill.common.errors import ExitCode
from specdistill.common.terminal import print_result
from specdistill.recipe.fields import Section, option
from specdistill.recipe.load import load_recipe
from specdistill.recipe.short_keys import select_recipe_keys


class TableOptions(Section):
    """The options of `specdistill table`."""

    reports: list[str] = option(
        ...,
        "reports: report.json files, folders of a report, or folders with several reports below;"
        " `reports=` itself may be left out",
    )


def table(arguments: list[str]) -> int:
    """Print the results of several reports as one table in Markdown.

    specdistill table runs/mine/report runs/other/report
    specdistill table runs/comparison --json
    """
    # `select_recipe_keys` leaves out options such as `--json`. Of the remaining arguments, those
    # without `=` are paths of reports. Commas may separate several paths in one argument.
    paths = []
    keys = []
    for argument in select_recipe_keys(arguments):
        if "=" in argument or argument.startswith("-"):
            keys.append(argument)
        else:
            paths += argument.split(",")
    # Write the paths as a list in JSON, so that a path may contain spaces. JSON is YAML, too.
    if paths:
        keys.append(f"reports={json.dumps(paths)}")
    options = load_recipe(TableOptions, keys)
    # The next module imports scipy, so it is imported only here.
    from specdistill.evaluation.report.files import summarize_reports

    text, numbers = summarize_reports(options.reports)
    print(text)
    print_result(numbers)
    return ExitCode.DONE
