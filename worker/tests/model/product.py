"""Builds the product's model from a config in the released form and a checkpoint's tensors."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from baleen_worker.model.attention_plan import AttentionForm
from baleen_worker.model.deepseek_v32 import DeepseekForCausalLM
from baleen_worker.model.numerics import Numerics
from baleen_worker.model_config import ModelConfig, load_model_config

if TYPE_CHECKING:
    from torch import Tensor

FLOAT32 = Numerics.for_dtype(torch.float32)


def model_config(config: dict[str, Any]) -> ModelConfig:
    """Reads the config as a user's model folder is read."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return load_model_config(Path(folder))


def build(
    config: dict[str, Any],
    weights: dict[str, Tensor],
    *,
    numerics: Numerics = FLOAT32,
    keep_fp8: bool = False,
    attention_form: AttentionForm = AttentionForm.AUTO,
) -> DeepseekForCausalLM:
    """The model with those weights. Names and shapes must match exactly; dtypes are converted to the parameters'."""
    with torch.device("meta"):
        model = DeepseekForCausalLM(model_config(config), numerics, keep_fp8=keep_fp8, attention_form=attention_form)
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    model.load_state_dict(
        {name: tensor.to(dtypes.get(name, tensor.dtype)) for name, tensor in weights.items()}, assign=True
    )
    return model
