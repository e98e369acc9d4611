"""Logits, confidence, loss mask and gradients of block drafters that speculators reads.

The Python of speculators' own environment runs this program.

    python speculators_blocks.py FOLDER...

Each FOLDER has `head`, a draft, and `input.safetensors`: what `_backbone_forward` takes, and
`weights` [N, P, W] of the logits in a sum, whose gradients are taken. `output.safetensors` is
written there.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators_unroll import load  # beside this file


def main(folder: Path) -> None:
    model, inputs = load(str(folder / "head")), load_file(folder / "input.safetensors")
    weights = inputs.pop("weights")
    num_anchors, block, _ = weights.shape
    hidden, logits, targets, mask, indices = model._backbone_forward(
        inputs["aux"],
        inputs["input_ids"],
        inputs["loss_mask"],
        inputs["last_hidden"],
        inputs["document_ids"],
        inputs["position_ids"],
        max_anchors=num_anchors,
    )
    logits, hidden, outputs = (
        logits.view(num_anchors, block, -1),
        hidden.view(num_anchors, block, -1),
        {},
    )
    if getattr(model, "markov_head", None) is not None:
        previous = inputs["input_ids"][0, indices].view(num_anchors, block)
        embedded = model.markov_head.prev_embeddings(previous)
        logits = logits + model.markov_head.block_bias(
            prev_token_ids=previous, hidden_states=hidden, prev_emb=embedded
        )
        outputs["confidence"] = model.confidence_head(torch.cat([hidden, embedded], -1)).view(
            num_anchors, block
        )
    parameters = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
    gradients = torch.autograd.grad(
        (logits * weights).sum(), list(parameters.values()), allow_unused=True
    )
    outputs |= {
        f"grad.{name}": grad
        for name, grad in zip(parameters, gradients, strict=True)
        if grad is not None
    }
    outputs |= {
        "logits": logits,
        "targets": targets.view_as(logits).softmax(-1),
        "mask": mask.view(num_anchors, block),
    }
    outputs["anchors"] = indices.view(num_anchors, block)[:, 0]
    save_file(
        {name: tensor.detach().contiguous() for name, tensor in outputs.items()},
        folder / "output.safetensors",
    )


if __name__ == "__main__":
    for name in sys.argv[1:]:
        main(Path(name))
