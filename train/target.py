"""Train pico, the small target that ships with the package, on Python's standard library.

The training text is the source code of the library's modules.

accelerate launch --config_file accelerate_configs/cpu.yaml train/target.py recipe=pico/target
"""

import sys
from functools import partial
from pathlib import Path

import torch
from datasets import Dataset, IterableDataset
from transformers import AutoModelForCausalLM, LlamaForCausalLM, TrainingArguments

from specdistill.cli.command import run
from specdistill.common.project import ROOT
from specdistill.data.produce.pico import load_standard_library
from specdistill.training.optimizer import MuonAdamW
from specdistill.training.resumable import ResumableTrainer
from specdistill.training.run import TrainingRun

# The code that makes pico is next to its recipes; it is not part of the library.
sys.path.append(str(ROOT))
from recipes.pico.card import write_card
from recipes.pico.corpus import curriculum, documents, llama_config, token_stream, train_tokenizer
from recipes.pico.recipe import TargetRecipe


def main(recipe: TargetRecipe) -> None:
    """Train the small target pico, save it, and write its model card with measurements."""
    # An item of the data sets is a whole batch of rows, so the Trainer's batch size is 1.
    run = TrainingRun.open(
        recipe,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
    )
    arguments = run.arguments

    # Train the tokenizer on the training texts.
    texts = (module.text for module in load_standard_library("train"))
    tokenizer = train_tokenizer(texts, recipe.tokenizer.vocab_size, recipe.shape.context_length)

    # Make the batches. The training batches follow a curriculum, short rows first. The evaluation
    # has eight held-out batches of 32 rows of 256 tokens.
    train_stream = token_stream(documents("train", tokenizer), tokenizer)
    held_out_texts = documents("validation", tokenizer)
    held_out = token_stream(held_out_texts, tokenizer)
    train_set = _make_train_set(train_stream, recipe, arguments)
    eval_set = Dataset.from_dict({"input_ids": held_out[: 8 * 32 * 256].view(8, 32, 256).tolist()})
    run.record(
        train_tokens=len(train_stream), data_fingerprint=str(hash(tuple(train_stream.tolist())))
    )

    # Create the model, with eager attention: the CPU's fused kernel is slow for short rows. Each
    # length of rows is compiled by itself (dynamic=False).
    config = llama_config(tokenizer, **vars(recipe.shape))
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config)
    model.compile(dynamic=False)

    # Train with Muon and AdamW.
    trainer = ResumableTrainer(
        model,
        arguments,
        train_dataset=train_set,
        eval_dataset=eval_set,
        data_collator=_return_batch,
        optimizers=(MuonAdamW(model, arguments.learning_rate, arguments.weight_decay), None),
    )
    run.train(trainer)

    # Save the model in bfloat16, and measure the saved model for its card.
    folder = Path(arguments.output_dir) / "model"
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_card(
        folder,
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        tokenizer,
        train_stream=train_stream,
        held_out=held_out,
        held_out_bytes=sum(len(text.encode()) for text in held_out_texts),
        steps=arguments.max_steps,
        batch_tokens=recipe.curriculum.batch_tokens,
    )


def _make_train_set(
    train_stream: torch.Tensor, recipe: TargetRecipe, arguments: TrainingArguments
) -> IterableDataset:
    """Return the training batches as a stream, one batch per step.

    Args:
        train_stream: the token ids of all training texts.
        recipe: the recipe, which says how the length of rows grows during training.
        arguments: the Trainer's arguments, of which the number of steps and the seed are used.
    """
    # `batches()` starts the stream of batches from its beginning.
    batches = partial(
        curriculum,
        train_stream,
        arguments.max_steps,
        **vars(recipe.curriculum),
        seed=arguments.seed,
    )
    return IterableDataset.from_generator(lambda: ({"input_ids": batch} for batch in batches()))


def _return_batch(items: list[dict[str, list[list[int]]]]) -> dict[str, torch.Tensor]:
    """Return the Trainer's only item as a batch: the training set yields whole batches, not rows.

    The Trainer uses this function as its data collator. The labels are the input ids, because the
    model shifts them itself.
    """
    batch = torch.as_tensor(items[0]["input_ids"])
    return {"input_ids": batch, "labels": batch}


if __name__ == "__main__":
    sys.exit(run(main, TargetRecipe))
