"""What engines call the tensors of a multi-token-prediction layer, both ways (vLLM: qwen3_next_mtp.py, qwen3_5_mtp.py, deepseek_mtp.py).

Two namings cover what engines load, QWEN3_NEXT and DEEPSEEK_V3. The latter repeats the target's embedding and head.

Experts: transformers holds all of a layer's in `experts.gate_up_proj` [E, 2I, H] and `experts.down_proj` [E, H, I]; most checkpoints
hold `experts.{e}.{gate,up,down}_proj.weight` one by one. Both are read.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

EXPERT = re.compile(
    r"(?P<experts>.*\.experts)\.(?P<index>\d+)\.(?P<part>gate|up|down)_proj\.weight"
)


@dataclass(frozen=True)
class Naming:
    """One naming.

    template: the prefix, with {n} for the number of the target's layers.
    layer: what follows it where the draft says `layers.0.`.
    names: the draft's other names -> what follows the prefix.
    copies: what follows the prefix of a repeated tensor -> the ends of the names that the target may have it by.
    """

    name: str
    template: str
    layer: str
    names: dict[str, str]
    copies: dict[str, tuple[str, ...]]

    def prefix(self, num_layers: int) -> str:
        return self.template.format(n=num_layers)

    def find_prefix(self, names: Iterable[str], num_layers: int) -> str | None:
        """The prefix in a checkpoint, whose text model may be nested (`model.language_model.`); None when it has no such layer."""
        fc = self.names["fc.weight"]
        end = "." + self.prefix(num_layers).removeprefix("model.") + fc
        return next((name.removesuffix(fc) for name in names if f".{name}".endswith(end)), None)

    def owns(self, name: str, prefix: str) -> bool:
        """Whether a tensor of a checkpoint belongs to the layer of this prefix, or to a further one of its kind."""
        numbered = re.fullmatch(r"(.*\.)(\d+)\.", prefix)
        if numbered is None:
            return name.startswith(prefix)
        layer = re.match(re.escape(numbered[1]) + r"(\d+)\.", name)
        return layer is not None and int(layer[1]) >= int(numbered[2])

    def to_file(
        self, tensors: Mapping[str, Tensor], prefix: str, *, fused: bool = False
    ) -> dict[str, Tensor]:
        """The draft's tensors by their names in a file; experts one by one unless `fused`."""
        tensors = tensors if fused else split_experts(tensors)
        return {
            prefix + (self.names.get(name) or self.layer + name.removeprefix("layers.0.")): tensor
            for name, tensor in tensors.items()
        }

    def from_file(self, tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
        """The inverse of `to_file`, for either form of experts."""
        here = {there: name for name, there in self.names.items()}
        bare = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        return merge_experts(
            {
                here.get(name) or "layers.0." + name.removeprefix(self.layer): tensor
                for name, tensor in bare.items()
            }
        )


NAMES = {  # here -> after the prefix: qwen3_next, deepseek_v3
    "fc.weight": ("fc.weight", "eh_proj.weight"),
    "token_norm.weight": ("pre_fc_norm_embedding.weight", "enorm.weight"),
    "hidden_norm.weight": ("pre_fc_norm_hidden.weight", "hnorm.weight"),
    "norm.weight": ("norm.weight", "shared_head.norm.weight"),
}
COPIES = {
    "embed_tokens.weight": ("embed_tokens.weight",),
    "shared_head.head.weight": ("lm_head.weight", "embed_tokens.weight"),
}
QWEN3_NEXT = Naming(
    "qwen3_next", "mtp.", "layers.0.", {here: there for here, (there, _) in NAMES.items()}, {}
)
DEEPSEEK_V3 = Naming(
    "deepseek_v3",
    "model.layers.{n}.",
    "",
    {here: there for here, (_, there) in NAMES.items()},
    COPIES,
)
DEEPSEEK_TYPES = {"deepseek_v3", "glm4_moe", "glm4_moe_lite"}
# Text models whose such layers vLLM and SGLang look for (vLLM: config/speculative.py; SGLang: configs/model_config.py).
SERVED_TYPES = DEEPSEEK_TYPES | {
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_text",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
}


def naming_of(model_type: str) -> Naming:
    """The naming that engines load for a target of this type; Qwen3-Next's where no engine knows one."""
    return DEEPSEEK_V3 if model_type in DEEPSEEK_TYPES else QWEN3_NEXT


# Keys of config.json that say how many such layers a target has.
NATIVE_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")


def depth_key(model_type: str) -> str:
    """The one of these keys that a checkpoint of this type has."""
    return (
        "mtp_num_hidden_layers" if model_type.startswith("qwen3_5") else "num_nextn_predict_layers"
    )


def has_fused_experts(names: Iterable[str]) -> bool:
    return any(name.endswith(".experts.gate_up_proj") for name in names)


def split_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`experts.gate_up_proj` and `experts.down_proj` as a matrix for each expert and part; views, no copies."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        experts, _, last = name.rpartition(".")
        halves = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(last)
        if halves is None or f"{experts}.gate_up_proj" not in tensors:
            result[name] = tensor
            continue
        for part, all_of_them in zip(halves, tensor.chunk(len(halves), dim=1), strict=True):
            result |= {f"{experts}.{e}.{part}.weight": one for e, one in enumerate(all_of_them)}
    return result


def merge_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `split_experts`; every expert must be there."""
    result: dict[str, Tensor] = {}
    parts: dict[str, dict[str, dict[int, Tensor]]] = {}
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            parts.setdefault(match["experts"], {}).setdefault(match["part"], {})[
                int(match["index"])
            ] = tensor
        else:
            result[name] = tensor
    for experts, of in parts.items():
        gate, up, down = (
            torch.stack([of[part][index] for index in range(len(of[part]))])
            for part in ("gate", "up", "down")
        )
        result |= {
            f"{experts}.gate_up_proj": torch.cat((gate, up), dim=1),
            f"{experts}.down_proj": down,
        }
    return result
