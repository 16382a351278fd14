"""PEFT adapters for the tiny checkpoint, made and saved by PEFT itself."""

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make(
    checkpoint: Path,
    folder: Path,
    seed: int,
    *,
    std: float = 0.1,
    save_embedding_layers: bool | str = False,
    **config: object,
) -> PeftModel:
    """Save a random adapter in `folder`, A and B normal with this deviation; returns PEFT's own model with it."""
    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    options = {"r": 8, "lora_alpha": 16, "target_modules": ALL, "lora_dropout": 0.1} | config
    model = get_peft_model(base, LoraConfig(**options))
    for name, parameter in model.named_parameters():
        if "magnitude" in name:
            parameter.data.mul_(1 + 0.3 * torch.rand_like(parameter))
        elif "lora_" in name:
            torch.nn.init.normal_(parameter, std=std)
        elif name.endswith("bias") and parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.5)
        elif parameter.requires_grad:  # rows of tokens, modules saved whole
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder, save_embedding_layers=save_embedding_layers)
    return model.eval()
