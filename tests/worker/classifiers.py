"""Models that classify, and adapters that do, as transformers and PEFT make and compute them."""

import copy
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from tests.worker.peft_adapters import train


def save_classifier(
    reference: PreTrainedModel, folder: Path, num_labels: int, **config: Any
) -> PreTrainedModel:
    """Put a random head on the layers of a causal model, save it as transformers does."""
    name = type(reference).__name__.replace("CausalLM", "SequenceClassification")
    name = name.replace("Gemma3For", "Gemma3TextFor")  # the other one sees images
    shape = copy.deepcopy(reference.config)
    shape.num_labels = num_labels
    for key, value in config.items():
        setattr(shape, key, value)
    model = getattr(transformers, name)(shape).to(reference.dtype).eval()
    model.model.load_state_dict(reference.model.state_dict())
    with torch.no_grad():
        generator = torch.Generator().manual_seed(num_labels)
        head = torch.randn(model.score.weight.shape, generator=generator)
        model.score.weight.copy_(head * 0.3)
    model.save_pretrained(folder)
    return model


def save_classifying_adapter(
    classifier: PreTrainedModel, folder: Path, seed: int = 0, **config: Any
) -> None:
    """Write an adapter with a head of its own, as PEFT trains one for a model that classifies."""
    torch.manual_seed(seed)
    keys = {"r": 4, "lora_alpha": 3, "target_modules": ["q_proj", "o_proj", "up_proj"], **config}
    peft_config = LoraConfig(task_type="SEQ_CLS", init_lora_weights=False, **keys)
    model = get_peft_model(copy.deepcopy(classifier), peft_config)
    train(model, seed)
    model.save_pretrained(folder)


@torch.no_grad()
def rounded(classifier: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model whose weights are those of `dtype`, and nothing else of it is."""
    model: PreTrainedModel = copy.deepcopy(classifier)
    for parameter in model.parameters():
        parameter.copy_(parameter.to(dtype))
    return model


@torch.inference_mode()
def class_logits(
    classifier: PreTrainedModel, tokens: tuple[int, ...], adapter: Path | None = None
) -> Tensor:
    """Return the logits [labels] of a prompt, computed in float32."""
    model: Any = classifier
    if adapter is not None:
        model = PeftModel.from_pretrained(copy.deepcopy(classifier), adapter)
    logits: Tensor = model.eval()(torch.tensor([tokens])).logits[0]
    return logits
