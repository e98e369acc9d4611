"""Translate tensor names of a multi-token-prediction layer between this project and engines.

The names were read in vLLM's qwen3_next_mtp.py, qwen3_5_mtp.py and deepseek_mtp.py. Two namings
cover what engines load: QWEN3_NEXT, and DEEPSEEK_V3, which repeats the target's embedding and head.

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
        layer: what stands after the prefix in place of the draft's `layers.0.`.
        names: the draft's other names, each with the file's name after the prefix.
        copies: names after the prefix of tensors that repeat the target's, each with the ends of
            the names that the target's tensor may have.
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
        """Find how the names of a checkpoint's multi-token-prediction layer begin.

        Args:
            names: the names of the checkpoint's tensors.
            num_layers: the number of the target's layers.

        Returns:
            The prefix of the layer's names; None if the checkpoint has no such layer.
        """
        # Look for the layer's projection fc. In a multimodal checkpoint the names begin with
        # `model.language_model.` in place of `model.`, so only the part after `model.` is compared.
        # With a dot before both names, the comparison cannot begin in the middle of a word.
        fc_name = self.names["fc.weight"]
        end = "." + self.prefix(num_layers).removeprefix("model.") + fc_name
        fc_names = [name for name in names if f".{name}".endswith(end)]
        return fc_names[0].removesuffix(fc_name) if fc_names else None

    def has_tensor(self, name: str, prefix: str) -> bool:
        """Return whether a tensor belongs to a multi-token-prediction layer of a checkpoint.

        Args:
            name: the name of the tensor.
            prefix: the prefix of the first such layer, for example `model.layers.61.`. Further
                such layers have higher numbers.
        """
        # A prefix without a number, such as `mtp.`, covers all layers.
        numbered = re.fullmatch(r"(.*\.)(\d+)\.", prefix)
        if numbered is None:
            return name.startswith(prefix)
        layer = re.match(re.escape(numbered[1]) + r"(\d+)\.", name)
        return layer is not None and int(layer[1]) >= int(numbered[2])

    def to_file(
        self, tensors: Mapping[str, Tensor], prefix: str, *, fused: bool = False
    ) -> dict[str, Tensor]:
        """Rename a draft's tensors from the names in its module to the names in a file.

        Args:
            tensors: the draft's tensors, by their names in the module.
            prefix: how the names in the file begin.
            fused: whether the file holds all experts of a layer in one tensor. Otherwise it has
                tensors for each single expert.
        """
        tensors = tensors if fused else split_experts(tensors)
        # `self.names` holds the names of the projection and the norms. All other names belong to
        # the decoder layer.
        file_names = {
            name: self.names.get(name) or self.layer + name.removeprefix("layers.0.")
            for name in tensors
        }
        return {prefix + file_names[name]: tensor for name, tensor in tensors.items()}

    def from_file(self, tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
        """Rename a file's tensors to the names in the draft's module: the inverse of `to_file`.

        The file may hold experts one by one or all in one tensor.
        """
        # Invert the table of names. Names that are not in the table belong to the decoder layer.
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
    name="qwen3_next",
    template="mtp.",
    layer="layers.0.",
    names={name: file_name for name, (file_name, _) in NAMES.items()},
    copies={},
)
DEEPSEEK_V3 = Naming(
    name="deepseek_v3",
    template="model.layers.{n}.",
    layer="",
    names={name: file_name for name, (_, file_name) in NAMES.items()},
    copies=COPIES,
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
    """Return how engines name a multi-token-prediction layer's tensors, for a type of target.

    For a type that no engine knows, the naming is that of Qwen3-Next.
    """
    return DEEPSEEK_V3 if model_type in DEEPSEEK_TYPES else QWEN3_NEXT


# Keys of config.json that say how many multi-token-prediction layers a target has.
NATIVE_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")


def find_depth_key(model_type: str) -> str:
    """Return the config key with the number of multi-token-prediction layers, for a model type."""
    return (
        "mtp_num_hidden_layers" if model_type.startswith("qwen3_5") else "num_nextn_predict_layers"
    )


def has_fused_experts(names: Iterable[str]) -> bool:
    """Return whether, by these tensor names, all experts of a layer share one tensor."""
    return any(name.endswith(".experts.gate_up_proj") for name in names)


def split_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split tensors that hold all experts of a layer into matrices of single experts.

    transformers holds the E experts in `experts.gate_up_proj` [E, 2I, H] and `experts.down_proj`
    [E, H, I] (I: size inside an expert, H: hidden size). Checkpoints name a matrix for each part of
    each expert, such as `experts.0.gate_proj.weight` [I, H]. The matrices are views, not copies.
    """
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        # Tensors that do not hold all experts of a layer stay as they are.
        experts, _, matrix = name.rpartition(".")
        parts = EXPERT_PARTS.get(matrix)
        if parts is None or f"{experts}.gate_up_proj" not in tensors:
            result[name] = tensor
            continue

        # gate_up_proj holds the gate and the up projection one after the other along its middle
        # axis. Split it into two tensors [E, I, H], and each tensor into its E experts.
        for part, part_weights in zip(parts, tensor.chunk(len(parts), dim=1), strict=True):
            result |= {
                f"{experts}.{e}.{part}.weight": expert_weight
                for e, expert_weight in enumerate(part_weights)
            }
    return result


def merge_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Merge the matrices of single experts into tensors of all experts, as transformers holds them.

    This is the inverse of `split_experts`. Every expert must be there.
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
