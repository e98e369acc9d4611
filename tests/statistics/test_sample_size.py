import numpy as np
import pytest

from specdistill.report.text import print_power_analysis
from specdistill.statistics.intervals import minimum_detectable_change


def test_the_formula_by_hand():
    assert minimum_detectable_change(80) == pytest.approx((1.959964 + 0.841621) * 0.16 / np.sqrt(80), rel=1e-6)
    assert minimum_detectable_change(320) == pytest.approx(minimum_detectable_change(80) / 2)


def test_the_sentence_says_what_it_stands_on(capsys: pytest.CaptureFixture[str]):
    print_power_analysis(80)
    said = capsys.readouterr().err
    for fact in ("80 prompts", "5.0% of the acceptance length", "power 80%", "two-sided 5%", "assumed spread of 16%"):
        assert fact in said
