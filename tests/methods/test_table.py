"""The table of methods, and that their folders stand alone."""

from itertools import permutations

import pytest

from specdistill.methods import METHODS


def test_a_method_imports_nothing_of_another_method() -> None:
    grimp = pytest.importorskip("grimp")  # a development extra
    graph = grimp.build_graph("specdistill")
    chains = {
        chain
        for one, other in permutations((method.package for method in METHODS.values()), 2)
        for chain in graph.find_shortest_chains(importer=one, imported=other, as_packages=True)
    }
    assert not chains
