"""Draft models of tiny targets that need no training and have some of their tokens accepted."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from specdistill.methods.models.proposer import DraftModelProposer
from specdistill.methods.models.vocabulary import match_vocabularies
from specdistill.targets.frozen import FrozenTarget
from tests.tiny import tiny_target_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def tiny_draft_model(vocab_size: int, seed: int) -> LlamaForCausalLM:
    return tiny_target_model(num_layers=1, hidden_size=32, vocab_size=vocab_size, seed=seed)


def half_right(target: FrozenTarget, context: int = 256) -> LlamaForCausalLM:
    """Return the target with some noise on its weights: drafts are accepted now and then."""
    draft = tiny_target_model(target.num_layers)
    draft.load_state_dict(target.model.state_dict())
    draft.config.max_position_embeddings = context
    generator = torch.Generator().manual_seed(1)
    for parameter in draft.parameters():
        parameter.data += 0.005 * torch.randn(parameter.shape, generator=generator)
    return draft


def other_tokenizer(missing: str, special: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Return the tiny tokenizer with its bytes in another order.

    One of the bytes is missing, and the special tokens are others.
    """
    kept = [
        byte
        for byte in sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)
        if byte != missing
    ]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(["<unk>", *kept, *special])},
            merges=[],
            unk_token="<unk>",
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", extra_special_tokens=list(special)
    )


def words(text: str, **special: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token a word, ids in the order given; `?` is the unknown word."""
    vocabulary = {word: index for index, word in enumerate(text.split())}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="?")), **special
    )


def translated(
    target: FrozenTarget, missing: str = "a", model: LlamaForCausalLM | None = None, **renamed: str
) -> DraftModelProposer:
    """Return a proposer with the target itself, or a model like it, in another vocabulary.

    The rows are in the order of that vocabulary, which lacks one of the target's tokens. renamed:
    target's special tokens without their brackets -> what the draft calls them.
    """
    replacements = {f"<|{token}|>": other for token, other in renamed.items()}
    tokenizer = other_tokenizer(missing, tuple(renamed.values()))
    vocabulary = match_vocabularies(
        target.tokenizer,
        260,
        tokenizer,
        len(tokenizer),
        heterogeneous_vocab=True,
        token_replacements=replacements,
    )
    assert vocabulary is not None
    draft = tiny_target_model(vocab_size=len(tokenizer))
    weights = {
        name: tensor.clone() for name, tensor in (model or target.model).state_dict().items()
    }
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = torch.zeros(len(tokenizer), 64)
        rows[vocabulary.draft_ids_W] = weights[name][vocabulary.target_ids_W]
        weights[name] = rows
    draft.load_state_dict(weights)
    return DraftModelProposer(draft, vocabulary=vocabulary)
