"""Train pico, the small target that ships with the package, on the source text of Python's standard library.

accelerate launch --config_file accelerate_configs/cpu.yaml train/target.py recipe=pico/target
"""

import sys
from functools import partial
from pathlib import Path

import torch
from datasets import Dataset, IterableDataset
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from specdistill import command
from specdistill.pico import standard_library
from specdistill.project import ROOT
from specdistill.training.optimizer import MuonAdamW
from specdistill.training.resumable import ResumableTrainer
from specdistill.training.run import TrainingRun

sys.path.append(str(ROOT))  # what makes pico is next to its recipes, and no part of the library
from recipes.pico.card import write_card
from recipes.pico.corpus import curriculum, documents, llama_config, token_stream, train_tokenizer
from recipes.pico.recipe import TargetRecipe


def main(recipe: TargetRecipe) -> None:
    run = TrainingRun.open(
        recipe,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
    )
    arguments = run.arguments

    # Tokenizer and data
    texts = (module.text for module in standard_library("train"))
    tokenizer = train_tokenizer(texts, recipe.tokenizer.vocab_size, recipe.shape.context_length)
    train_stream = token_stream(documents("train", tokenizer), tokenizer)
    held_out_texts = documents("validation", tokenizer)
    held_out = token_stream(held_out_texts, tokenizer)
    batches = partial(
        curriculum,
        train_stream,
        arguments.max_steps,
        **vars(recipe.curriculum),
        seed=arguments.seed,
    )
    train_set = IterableDataset.from_generator(
        lambda: ({"input_ids": batch} for batch in batches())
    )
    eval_set = Dataset.from_dict({"input_ids": held_out[: 8 * 32 * 256].view(8, 32, 256).tolist()})
    run.record(
        train_tokens=len(train_stream), data_fingerprint=str(hash(tuple(train_stream.tolist())))
    )

    # Model; eager attention, because the CPU's fused kernel is slow for short rows
    config = llama_config(tokenizer, **vars(recipe.shape))
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config)
    model.compile(dynamic=False)

    # Train
    trainer = ResumableTrainer(
        model,
        arguments,
        train_dataset=train_set,
        eval_dataset=eval_set,
        data_collator=_whole_batch,
        optimizers=(MuonAdamW(model, arguments.learning_rate, arguments.weight_decay), None),
    )
    run.train(trainer)

    # Save, and measure what was saved
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


def _whole_batch(items: list[dict[str, list[list[int]]]]) -> dict[str, torch.Tensor]:
    """The curriculum yields whole batches; the loader's own batch size is one."""
    batch = torch.as_tensor(items[0]["input_ids"])
    return {"input_ids": batch, "labels": batch}


if __name__ == "__main__":
    sys.exit(command.run(main, TargetRecipe))
