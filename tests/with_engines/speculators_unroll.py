"""The logits of every step of speculators' unroll, for heads that it reads or makes itself.

The Python of speculators' own environment runs this program.

    python speculators_unroll.py FOLDER

FOLDER/jobs.json: `verifier`, a folder; `num_steps`; `read`, folders of heads; `make`, folders to
write heads of speculators' own making to, with their settings. Beside each head lies
`input.safetensors`: `aux` [1, T, A·D], `input_ids` [1, T], `position_ids` and `document_ids` as
speculators takes them. `logits.safetensors` is written beside it: [1, T, W] of each step.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel
from speculators.models.eagle3 import Eagle3DraftModel
from transformers import AutoConfig, LlamaConfig


def main(folder: Path) -> None:
    jobs = json.loads((folder / "jobs.json").read_text())
    for path, settings in jobs["make"].items():
        make_head(Path(path), settings, jobs["verifier"], jobs["num_steps"])
    for path in [*jobs["read"], *jobs["make"]]:
        inputs = load_file(Path(path).parent / "input.safetensors")
        save_file(
            unroll(load(path), inputs, jobs["num_steps"]), Path(path).parent / "logits.safetensors"
        )


def load(path: str) -> torch.nn.Module:
    config = SpeculatorModel.config_class.from_pretrained(path)
    config.transformer_layer_config._attn_implementation = "eager"  # the default one needs a GPU
    return SpeculatorModel.from_pretrained(path, config=config, dtype=torch.float32).eval()


def make_head(path: Path, settings: dict, verifier: str, num_steps: int) -> None:
    """Write a head with random weights, and with random norms."""
    verifier_config = AutoConfig.from_pretrained(verifier).to_dict()
    sizes = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    shape = {
        name: verifier_config[name]
        for name in (*sizes, "rms_norm_eps", "max_position_embeddings", "rope_parameters")
    }
    config = LlamaConfig(**shape, num_hidden_layers=settings.pop("num_layers"))
    vocabulary = settings.pop("vocabulary")
    t2d = torch.zeros(shape["vocab_size"], dtype=torch.bool)
    t2d[vocabulary] = True
    torch.manual_seed(0)
    model = Eagle3DraftModel.from_training_args(
        config,
        t2d=t2d,
        d2t=torch.tensor(vocabulary) - torch.arange(len(vocabulary)),
        draft_vocab_size=len(vocabulary),
        ttt_steps=num_steps,
        verifier_name_or_path=verifier,
        draft_attn_impl="eager",
        **settings,
    )
    for name, parameter in model.named_parameters():
        if "embed_tokens" not in name and "lm_head" not in name:
            parameter.data = torch.randn_like(parameter) * parameter.shape[-1] ** -0.5 + (
                "norm" in name
            )
    model.save_pretrained(path)


@torch.no_grad()
def unroll(
    model: torch.nn.Module, inputs: dict[str, torch.Tensor], num_steps: int
) -> dict[str, torch.Tensor]:
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, args, output: logits.append(output.clone()))
    model(
        hidden_states=inputs["aux"],
        input_ids=inputs["input_ids"],
        document_ids=inputs["document_ids"],
        position_ids=inputs["position_ids"],
        ttt_steps=num_steps,
    )
    assert len(logits) == num_steps
    return {str(step): step_logits for step, step_logits in enumerate(logits)}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
