"""A tiny random model of a target's class: what the class computes can be tried before its weights are there.

Widths are divided, and counts (layers, heads, groups) are kept, so that what a class asks of its sizes still holds: hidden size = heads ·
head size. Which classes can be made so small is tried too: a few sizes, the narrowest first.
"""

import copy
import re
from typing import Any

import torch

from specdistill.errors import UserError
from specdistill.targets.anatomy import CLASS_ERRORS, auto_class
from specdistill.targets.frozen import FrozenTarget

DIVISORS = (64, 32, 16, 8, 4, 2, 1)
LEAST_WIDTH, MOST_PARAMETERS = 64, 2**28
LEAST_DIVIDED = 16  # smaller numbers are no widths
NO_WIDTHS = re.compile(r"(^|_)(num|n)_\w*(head|layer|group)|heads$|layers?$|position|ctx|period|interval|offset|top_?k")


def tiny_random_target(config: Any, name: str, *, trust_remote_code: bool = False) -> FrozenTarget | None:
    """A small target of the class of `config`, under the target's own name; None where no size can be made.

    Raises UserError as loading the target would, when every size is refused.
    """
    width = config.get_text_config(decoder=True).hidden_size
    refused: UserError | None = None
    for divisor in DIVISORS:
        if divisor > 1 and width // divisor < LEAST_WIDTH:
            continue
        options = {"dtype": torch.float32, "trust_remote_code": trust_remote_code}
        try:
            small = type(config).from_dict(_divided(config.to_dict(), "", divisor)) if divisor > 1 else copy.deepcopy(config)
            with torch.device("meta"):
                num_parameters = auto_class(small).from_config(small, **options).num_parameters()
            if num_parameters > MOST_PARAMETERS:
                break
            with torch.random.fork_rng(), torch.no_grad():
                torch.manual_seed(0)
                model = auto_class(small).from_config(small, **options).eval()
                if divisor > 1:
                    model(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False)
        except CLASS_ERRORS:  # sizes that do not go together: another divisor is tried
            continue
        try:
            return FrozenTarget(model, None, name=name)
        except UserError as error:
            refused = error
    if refused is not None:
        raise refused
    return None


def _divided(value: Any, name: str, divisor: int) -> Any:
    """A value of a config, by its name: widths divided and rounded up, token ids 0, all else as it is."""
    if isinstance(value, dict):
        return {key: _divided(part, str(key), divisor) for key, part in value.items()}
    if divisor > 1 and "token_i" in name and value is not None:
        return [0] if isinstance(value, list) else 0
    if isinstance(value, list) and name.endswith("_section"):  # of a rotary embedding's width
        return [-(-part // divisor) for part in value]
    if type(value) is int and value >= LEAST_DIVIDED and not NO_WIDTHS.search(name):
        return -(-value // divisor)
    return value
