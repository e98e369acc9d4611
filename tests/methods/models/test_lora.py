"""LoRA drafts start as the draft, train their updates alone, and are merged into plain models."""

import torch
from transformers import LlamaForCausalLM

from specdistill.methods.models.checkpoint import merge_lora
from specdistill.methods.models.create import add_lora
from tests.refusals import refused
from tests.tiny import tiny_target_model

IDS = torch.arange(4, 28)[None]


@torch.no_grad()
def compute_logits(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=IDS).logits


def build_trained_draft(**settings: object) -> torch.nn.Module:
    model = add_lora(tiny_target_model(num_layers=2), rank=4, **settings)  # type: ignore[arg-type]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for parameter in model.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


def test_rank_zero_is_the_draft_itself() -> None:
    draft = tiny_target_model(num_layers=2)
    assert add_lora(draft, rank=0) is draft and merge_lora(draft) is draft


def test_updates_are_zero_at_first_and_train_alone() -> None:
    before = compute_logits(tiny_target_model(num_layers=2))
    model = add_lora(tiny_target_model(num_layers=2), rank=4)
    assert torch.equal(compute_logits(model.eval()), before)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(names) == 2 * 2 * 7 and all("lora_" in name for name in names)


def test_merging_gives_an_equal_plain_model_and_leaves_the_trained_one() -> None:
    model = build_trained_draft(alpha=8, dropout=0.5)
    before, names = compute_logits(model), list(model.state_dict())
    plain = merge_lora(model.train())
    assert torch.equal(compute_logits(model.eval()), before) and list(model.state_dict()) == names
    assert type(plain) is LlamaForCausalLM
    assert plain.state_dict().keys() == tiny_target_model(num_layers=2).state_dict().keys()
    assert torch.allclose(compute_logits(plain), before, atol=1e-5)
    assert not torch.allclose(
        compute_logits(plain), compute_logits(tiny_target_model(num_layers=2)), atol=1e-2
    )


def test_target_modules_select_projections_and_unknown_ones_are_refused() -> None:
    model = build_trained_draft(target_modules=["q_proj"])
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(names) == 4 and all("q_proj.lora_" in name for name in names)
    with refused("draft.lora.target_modules", "['nowhere']"):
        add_lora(tiny_target_model(num_layers=2), rank=4, target_modules=["nowhere"])
