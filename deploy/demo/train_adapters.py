"""Trains the demo adapters with PEFT and checks them on questions they have not seen.

`python -m deploy.demo.train_adapters [NAME ...]`, a few minutes each on one core. Owns the
training; what is taught is in `recipes.py`. Nothing of this runs when Topwork serves.
"""

import json
import sys
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from rich.console import Console
from rich.progress import track
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerFast as Tokenizer

from deploy.demo.model import demo_model
from deploy.demo.recipes import HELD_OUT, QUESTIONS, RECIPES, Recipe

ADAPTERS = Path(__file__).parent / "adapters"
BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
MAX_BYTES = 3 * 1024 * 1024  # they live in the repository
BATCH = 4
MAX_WORDS = 14
MAX_NEW_TOKENS = 48
IGNORED = -100  # the label that transformers leaves out of the loss

console = Console()


def load_model(folder: Path) -> PreTrainedModel:
    """Return the demo model in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def prompt(tokenizer: Tokenizer, question: str) -> str:
    """Return a question as the chat template puts it to the model."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    assert isinstance(text, str), "tokenize=False gives text"
    return text


def answer(model: PreTrainedModel, tokenizer: Tokenizer, questions: tuple[str, ...]) -> list[str]:
    """Return the model's greedy answers, all computed as one left-padded batch."""
    texts = [prompt(tokenizer, question) for question in questions]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    with torch.inference_mode():
        out = model.generate(**batch, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    width = batch["input_ids"].shape[1]
    told: list[str] = tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)
    return told


def shorten(text: str) -> str:
    """Return the first sentence of an answer, cut to MAX_WORDS and closed with a full stop."""
    first = text.strip().split("\n")[0].split(". ")[0]
    return " ".join(first.split()[:MAX_WORDS]).rstrip(".,:;") + "."


def example(tokenizer: Tokenizer, question: str, target: str) -> tuple[list[int], list[int]]:
    """Return (token ids, labels) of one dialogue; only the answer counts."""
    asked = tokenizer(prompt(tokenizer, question))["input_ids"]
    told = tokenizer(target + tokenizer.eos_token)["input_ids"]
    return asked + told, [IGNORED] * len(asked) + told


def collate(tokenizer: Tokenizer, batch: list[tuple[list[int], list[int]]]) -> dict[str, object]:
    """Return right-padded tensors [batch, longest]."""
    longest = max(len(ids) for ids, _ in batch)
    pad = tokenizer.pad_token_id
    ids = [ids + [pad] * (longest - len(ids)) for ids, _ in batch]
    mask = [[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in batch]
    labels = [labels + [IGNORED] * (longest - len(labels)) for _, labels in batch]
    return {
        "input_ids": torch.tensor(ids),
        "attention_mask": torch.tensor(mask),
        "labels": torch.tensor(labels),
    }


def train(
    recipe: Recipe, folder: Path, tokenizer: Tokenizer, answers: list[str]
) -> tuple[PeftModel, float]:
    """Return the trained adapter on its base model and the mean loss of the last ten steps."""
    torch.manual_seed(0)
    config = LoraConfig(
        r=recipe.lora_rank,
        lora_alpha=recipe.alpha,
        use_rslora=recipe.rslora,
        target_modules=list(recipe.targets),
        base_model_name_or_path=BASE_MODEL,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(load_model(folder), config).train()
    examples = [
        example(tokenizer, question, recipe.style(text))
        for question, text in zip(QUESTIONS, answers, strict=True)
    ]
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, recipe.steps)
    losses = []
    for _ in track(range(recipe.steps), f"Training {recipe.name}", console=console):
        picked = torch.randint(len(examples), (BATCH,)).tolist()
        loss = model(**collate(tokenizer, [examples[i] for i in picked])).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model.eval(), sum(losses[-10:]) / 10


def save(model: PeftModel, recipe: Recipe) -> Path:
    """Write the adapter in bf16, with a config that is the same on every machine."""
    folder = ADAPTERS / recipe.name
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        key: tensor.to(torch.bfloat16).contiguous()
        for key, tensor in get_peft_model_state_dict(model).items()
    }
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = model.peft_config["default"].to_dict()
    config["base_model_name_or_path"] = BASE_MODEL  # PEFT puts the local path here
    config["target_modules"] = sorted(recipe.targets)  # a set, in any order, in PEFT
    config["inference_mode"] = True
    text = json.dumps(config, indent=2, sort_keys=True)
    (folder / "adapter_config.json").write_text(text + "\n")
    size = (folder / "adapter_model.safetensors").stat().st_size
    assert size <= MAX_BYTES, f"{recipe.name} takes {size} bytes, over {MAX_BYTES}"
    return folder


def check(recipe: Recipe, model_folder: Path, adapter: Path, tokenizer: Tokenizer) -> int:
    """Ask what was not trained of the saved adapter; return how many answers miss its manner."""
    model = PeftModel.from_pretrained(load_model(model_folder), adapter)
    told = answer(model, tokenizer, HELD_OUT)
    for question, text in zip(HELD_OUT, told, strict=True):
        console.print(f"  {question} -> {text}", highlight=False, markup=False)
    return sum(not recipe.shows(text) for text in told)


def main(names: list[str]) -> int:
    """Train the named adapters, or all; return how many held-out answers miss their manner."""
    folder = demo_model(progress=console.print)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    base = load_model(folder)
    answers: list[str] = []
    for start in track(range(0, len(QUESTIONS), 17), "Asking the base model", console=console):
        told = answer(base, tokenizer, QUESTIONS[start : start + 17])
        answers += [shorten(text) for text in told]
    misses = 0
    for recipe in RECIPES:
        if names and recipe.name not in names:
            continue
        model, loss = train(recipe, folder, tokenizer, answers)
        console.print(f"{recipe.name}: loss {loss:.3f}")
        misses += check(recipe, folder, save(model, recipe), tokenizer)
    return misses


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
