"""Check that no file of specdistill imports itself through others; part of `make lint`.

Imports that only type checkers see are left out.
"""

import sys
from graphlib import CycleError, TopologicalSorter

import grimp


def find_cycle() -> list[str]:
    """Return the modules of one import cycle, the first one again at the end, or an empty list."""
    graph = grimp.build_graph("specdistill", exclude_type_checking_imports=True)
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


if __name__ == "__main__":
    cycle = find_cycle()
    if cycle:
        sys.exit(f"Import cycle: {' is imported by '.join(cycle)}")
    print("No import cycle between files.")
