"""Translate the names of a multi-token-prediction layer's tensors, from and to those of engines.

The names were read in vLLM's qwen3_next_mtp.py, qwen3_5_mtp.py and deepseek_mtp.py. Two namings
cover what engines load, QWEN3_NEXT and DEEPSEEK_V3. The latter repeats the target's embedding and
head.

transformers holds all E experts of a layer in `experts.gate_up_proj` [E, 2I, H] and
`experts.down_proj` [E, H, I]. Most checkpoints hold them one by one, in
`experts.{e}.{gate,up,down}_proj.weight`. Both forms are read.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# The parts of an expert that each tensor of all experts holds, one after the other.
EXPERT_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
# The weight of one part of one expert in a checkpoint that holds experts one by one.
EXPERT = re.compile(
    r"(?P<experts>.*\.experts)\.(?P<index>\d+)\.(?P<part>gate|up|down)_proj\.weight"
)


@dataclass(frozen=True)
class Naming:
    """One way to name the tensors of a layer in a file.

    Attributes:
        name: the name of the naming, for errors.
        template: the prefix, with {n} for the number of the target's layers.
        layer: what follows the prefix where the draft has `layers.0.`.
        names: the draft's other names, each with what follows the prefix.
        copies: what follows the prefix of a tensor that is repeated from the target, each with the
            ends of the names that the target may have it by.
    """

    name: str
    template: str
    layer: str
    names: dict[str, str]
    copies: dict[str, tuple[str, ...]]

    def prefix(self, num_layers: int) -> str:
        """Return the prefix for a target with this many layers."""
        return self.template.format(n=num_layers)

    def find_prefix(self, names: Iterable[str], num_layers: int) -> str | None:
        """Find the prefix in a checkpoint; None if it has no such layer.

        The checkpoint's text model may be nested (`model.language_model.`).
        """
        fc_name = self.names["fc.weight"]
        end = "." + self.prefix(num_layers).removeprefix("model.") + fc_name
        fc_names = [name for name in names if f".{name}".endswith(end)]
        return fc_names[0].removesuffix(fc_name) if fc_names else None

    def has_tensor(self, name: str, prefix: str) -> bool:
        """Return whether a tensor belongs to the layer of this prefix or to a further such layer.

        Further layers have higher numbers in their prefixes.
        # `model.` may be followed by a name in between, so it is left off before names are
        # compared.
        """
        numbered = re.fullmatch(r"(.*\.)(\d+)\.", prefix)
        if numbered is None:
            return name.startswith(prefix)
        layer = re.match(re.escape(numbered[1]) + r"(\d+)\.", name)
        return layer is not None and int(layer[1]) >= int(numbered[2])

    def to_file(
        self, tensors: Mapping[str, Tensor], prefix: str, *, fused: bool = False
    ) -> dict[str, Tensor]:
        """Return the draft's tensors by their names in a file, experts one by one unless `fused`.

        Args:
            tensors: the draft's tensors, by the names that they have here.
            # A prefix without a number, such as `mtp.`, covers all layers.
            prefix: how the names in the file begin.
            fused: keep the experts of a layer in one tensor.
        """
        tensors = tensors if fused else split_experts(tensors)
        # Names that the table does not hold are those of the decoder layer.
        file_names = {
            name: self.names.get(name) or self.layer + name.removeprefix("layers.0.")
            for name in tensors
        }
        return {prefix + file_names[name]: tensor for name, tensor in tensors.items()}

    def from_file(self, tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
        """Return a file's tensors by the names that the draft has for them.

        It is the inverse of `to_file`, for either form of experts.
        """
        draft_names = {file_name: name for name, file_name in self.names.items()}
        file_tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        return merge_experts(
            {
                draft_names.get(name) or "layers.0." + name.removeprefix(self.layer): tensor
                for name, tensor in file_tensors.items()
            }
        )


# The draft's names, each with what follows the prefix in qwen3_next and in deepseek_v3.
NAMES = {
    # Invert the table of names. Names that it does not hold are those of the decoder layer.
    "fc.weight": ("fc.weight", "eh_proj.weight"),
    "token_norm.weight": ("pre_fc_norm_embedding.weight", "enorm.weight"),
    "hidden_norm.weight": ("pre_fc_norm_hidden.weight", "hnorm.weight"),
    "norm.weight": ("norm.weight", "shared_head.norm.weight"),
}
# DeepSeek's layer repeats the target's embedding and head. If both are tied, a checkpoint may hold
# the embedding alone, so the head may be copied from it.
COPIES = {
    "embed_tokens.weight": ("embed_tokens.weight",),
    "shared_head.head.weight": ("lm_head.weight", "embed_tokens.weight"),
}
QWEN3_NEXT = Naming(
    "qwen3_next",
    "mtp.",
    "layers.0.",
    {name: file_name for name, (file_name, _) in NAMES.items()},
    {},
)
DEEPSEEK_V3 = Naming(
    "deepseek_v3",
    "model.layers.{n}.",
    "",
    {name: file_name for name, (_, file_name) in NAMES.items()},
    COPIES,
)
# Types whose checkpoints number the layer on after the target's own layers, as DeepSeek-V3 does.
DEEPSEEK_TYPES = {"deepseek_v3", "glm4_moe", "glm4_moe_lite"}
# Types of text models in whose checkpoints vLLM and SGLang look for such layers (vLLM:
# config/speculative.py; SGLang: configs/model_config.py).
SERVED_TYPES = DEEPSEEK_TYPES | {
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_text",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
}


def find_naming(model_type: str) -> Naming:
    """Return the naming that engines load for a target of this type.

    If no engine knows one, it is Qwen3-Next's.
    """
    return DEEPSEEK_V3 if model_type in DEEPSEEK_TYPES else QWEN3_NEXT


# Keys of config.json that say how many multi-token-prediction layers a target has.
NATIVE_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")


def find_depth_key(model_type: str) -> str:
    """Return the one of `NATIVE_KEYS` that a checkpoint of this type has."""
    return (
        "mtp_num_hidden_layers" if model_type.startswith("qwen3_5") else "num_nextn_predict_layers"
    )


def has_fused_experts(names: Iterable[str]) -> bool:
    """Return whether the names are those of experts that share one tensor."""
    return any(name.endswith(".experts.gate_up_proj") for name in names)


def split_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split `experts.gate_up_proj` and `experts.down_proj` into matrices of single experts.

    Each expert gets a matrix for each of its parts. The matrices are views, not copies.
    """
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        # gate_up_proj holds the gate and the up projection one after the other along its middle
        # axis.
        experts, _, matrix = name.rpartition(".")
        parts = EXPERT_PARTS.get(matrix)
        if parts is None or f"{experts}.gate_up_proj" not in tensors:
            result[name] = tensor
            continue

        # Split along that axis, [E, 2I, H] into two of [E, I, H], and along the experts.
        for part, part_weights in zip(parts, tensor.chunk(len(parts), dim=1), strict=True):
            result |= {
                f"{experts}.{e}.{part}.weight": expert_weight
                for e, expert_weight in enumerate(part_weights)
            }
    return result


def merge_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Merge the matrices of single experts; every expert must be there.

    It is the inverse of `split_experts`, for matrices that are named one by one.
    """
    result: dict[str, Tensor] = {}
    parts: dict[str, dict[str, dict[int, Tensor]]] = {}

    # Sort the matrices by layer, part and expert. All other tensors keep their names.
    for name, tensor in tensors.items():
        match = EXPERT.fullmatch(name)
        if match:
            layer_parts = parts.setdefault(match["experts"], {})
            layer_parts.setdefault(match["part"], {})[int(match["index"])] = tensor
        else:
            result[name] = tensor

    # Stack the E experts of each part, and put gate before up, as transformers holds them.
    for experts, layer_parts in parts.items():
        stacked = {}
        for part in ("gate", "up", "down"):
            weights = layer_parts[part]
            stacked[part] = torch.stack([weights[index] for index in range(len(weights))])
        result[f"{experts}.gate_up_proj"] = torch.cat((stacked["gate"], stacked["up"]), dim=1)
        result[f"{experts}.down_proj"] = stacked["down"]
    return result
