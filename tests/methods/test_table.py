"""The table of methods: folders are independent, and unsupported operations are refused."""

import subprocess
import sys
from itertools import permutations

import pytest

from specdistill.common.errors import UserError
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


@pytest.mark.parametrize("name", METHODS)
def test_a_method_bears_the_name_of_its_row(name: str) -> None:
    assert METHODS[name].load().name == name


@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("ngram", lambda lookup: lookup.create(None, None, None)),
        ("ngram", lambda lookup: lookup.save(None, None, None)),
        ("suffix", lambda lookup: lookup.build_objective(None, None, None)),
        ("eagle3", lambda head: head.build_lookup(1, 3)),
        ("dflash", lambda block: block.check_native({}, None)),
        ("early_exit", lambda head: head.export(None, "vllm", None, None, None, 3)),
    ],
)
def test_an_operation_that_a_method_does_not_support_is_refused_by_name(method: str, call) -> None:
    with pytest.raises(UserError, match=f"^method {method} does not support ") as refusal:
        call(METHODS[method].load())
    assert refusal.value.key == "method"


def test_the_table_needs_no_torch() -> None:
    code = "import sys; import specdistill.methods; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
