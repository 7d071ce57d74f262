"""Makes `models/micro`, the small checkpoint that is served when no model is named. Owns its config and contents.

    python models/make_micro.py [OUT_DIR]

It has V3.2's structure and the released attention dimensions, so that everything made for the real model runs on it:
sparse attention with an indexer, experts in groups beside a shared one, YaRN, block-FP8 weights under the released
tensor names, a multi-token-prediction layer, a sharded index. Weights are random: it streams text, not sense. The same
call writes the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import micro_text
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SEED = 20261
TILE = 128  # block-FP8: one scale for each 128 x 128 tile of a matrix
E4M3_MAX = 448.0
NUM_SHARDS = 2

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 256,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 256,
    "initializer_range": 0.02,
    "intermediate_size": 512,
    "kv_lora_rank": 512,
    "max_position_embeddings": 16384,
    "moe_intermediate_size": 64,
    "moe_layer_freq": 1,
    "n_group": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [TILE, TILE],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 2048,
}

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
# In the released order after the byte-pair vocabulary; whether a token is flagged special is also the release's.
ADDED_TOKENS = (
    ("｜DSML｜", True),
    ("<think>", False),
    ("</think>", False),
    ("<｜fim▁hole｜>", False),
    ("<｜fim▁begin｜>", False),
    ("<｜fim▁end｜>", False),
    ("<｜User｜>", False),
    ("<｜Assistant｜>", False),
    ("<|EOT|>", True),
    ("<｜tool▁calls▁begin｜>", False),
    ("<｜tool▁calls▁end｜>", False),
    ("<｜tool▁call▁begin｜>", False),
    ("<｜tool▁call▁end｜>", False),
    ("<｜tool▁outputs▁begin｜>", False),
    ("<｜tool▁outputs▁end｜>", False),
    ("<｜tool▁output▁begin｜>", False),
    ("<｜tool▁output▁end｜>", False),
    ("<｜tool▁sep｜>", False),
)
NUM_BPE_TOKENS = 2000
_PUNCTUATION = r"""!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~"""
SPLITS = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    (
        rf"[{_PUNCTUATION}][A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
)


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE over `micro_text`, split as V3.2 splits; no text gains a BOS."""
    tokenizer = Tokenizer(models.BPE())
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in SPLITS]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_BPE_TOKENS,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(micro_text.lines(20_000), trainer)
    for text, special in ADDED_TOKENS:
        if special:
            tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True)])
        else:
            tokenizer.add_tokens([AddedToken(text, normalized=True, special=False)])
    return tokenizer


class Weights:
    """Random tensors under the released names; `tensors` is the checkpoint."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.tensors: dict[str, torch.Tensor] = {}
        self._rng = np.random.Generator(np.random.Philox(SEED))

    def fill(self) -> None:
        """Makes every tensor of the main layers, the multi-token-prediction layers and both ends."""
        c = self.config
        self.plain("model.embed_tokens.weight", c["vocab_size"], c["hidden_size"], std=1.0)
        num_layers = c["num_hidden_layers"]
        for layer in range(num_layers + c["num_nextn_predict_layers"]):
            prefix = f"model.layers.{layer}."
            self._attention(prefix + "self_attn.")
            self._mlp_of_layer(prefix + "mlp.", dense=layer < c["first_k_dense_replace"])
            for name in ("input_layernorm", "post_attention_layernorm"):
                self.norm(f"{prefix}{name}.weight", c["hidden_size"])
        self.norm("model.norm.weight", c["hidden_size"])
        self.plain("lm_head.weight", c["vocab_size"], c["hidden_size"], std=3.0 * c["hidden_size"] ** -0.5)
        for layer in range(num_layers, num_layers + c["num_nextn_predict_layers"]):
            self._mtp_ends(f"model.layers.{layer}.")

    def _attention(self, p: str) -> None:
        c = self.config
        heads, nope, rope, v = (
            c[k] for k in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        hidden, q_rank, kv_rank = c["hidden_size"], c["q_lora_rank"], c["kv_lora_rank"]
        self.quantised(p + "q_a_proj", q_rank, hidden)
        self.norm(p + "q_a_layernorm.weight", q_rank)
        self.quantised(p + "q_b_proj", heads * (nope + rope), q_rank, gain=1.5)
        self.quantised(p + "kv_a_proj_with_mqa", kv_rank + rope, hidden)
        self.norm(p + "kv_a_layernorm.weight", kv_rank)
        self.quantised(p + "kv_b_proj", heads * (nope + v), kv_rank)
        self.quantised(p + "o_proj", hidden, heads * v)
        self.quantised(p + "indexer.wq_b", c["index_n_heads"] * c["index_head_dim"], q_rank)
        self.quantised(p + "indexer.wk", c["index_head_dim"], hidden)
        self.norm(p + "indexer.k_norm.weight", c["index_head_dim"])
        self.tensors[p + "indexer.k_norm.bias"] = self._normal(c["index_head_dim"]) * 0.2
        self.plain(p + "indexer.weights_proj.weight", c["index_n_heads"], hidden)

    def _mlp_of_layer(self, p: str, *, dense: bool) -> None:
        c = self.config
        if dense:
            self._mlp(p, c["intermediate_size"])
            return
        self.plain(p + "gate.weight", c["n_routed_experts"], c["hidden_size"])
        self.tensors[p + "gate.e_score_correction_bias"] = self._normal(c["n_routed_experts"]) * 0.05
        for expert in range(c["n_routed_experts"]):
            self._mlp(f"{p}experts.{expert}.", c["moe_intermediate_size"])
        self._mlp(p + "shared_experts.", c["moe_intermediate_size"] * c["n_shared_experts"])

    def _mlp(self, p: str, intermediate: int) -> None:
        hidden = self.config["hidden_size"]
        self.quantised(p + "gate_proj", intermediate, hidden)
        self.quantised(p + "up_proj", intermediate, hidden)
        self.quantised(p + "down_proj", hidden, intermediate)

    def _mtp_ends(self, p: str) -> None:
        """The release stores copies of embedding and head in each multi-token-prediction layer."""
        hidden = self.config["hidden_size"]
        for name in ("enorm", "hnorm", "shared_head.norm"):
            self.norm(f"{p}{name}.weight", hidden)
        self.plain(p + "eh_proj.weight", hidden, 2 * hidden)
        self.tensors[p + "embed_tokens.weight"] = self.tensors["model.embed_tokens.weight"].clone()
        self.tensors[p + "shared_head.head.weight"] = self.tensors["lm_head.weight"].clone()

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.from_numpy(self._rng.standard_normal(shape, dtype=np.float32))

    def norm(self, name: str, width: int) -> None:
        """A norm's gain near 1, float32."""
        self.tensors[name] = 1.0 + 0.1 * self._normal(width)

    def plain(self, name: str, out: int, into: int, *, std: float | None = None) -> None:
        """A matrix that the release keeps in bfloat16."""
        self.tensors[name] = (self._normal(out, into) * (into**-0.5 if std is None else std)).bfloat16()

    def quantised(self, name: str, out: int, into: int, *, gain: float = 1.0) -> None:
        """A block-FP8 matrix [out, into]: e4m3 values and one power-of-two scale for each tile."""
        matrix = self._normal(out, into) * (gain * into**-0.5)
        rows, columns = -(-out // TILE), -(-into // TILE)
        padded = torch.nn.functional.pad(matrix, (0, columns * TILE - into, 0, rows * TILE - out))
        amax = padded.view(rows, TILE, columns, TILE).abs().amax((1, 3))
        mantissa, exponent = torch.frexp(amax / E4M3_MAX)
        scale = torch.ldexp(torch.ones_like(amax), exponent - (mantissa == 0.5).int())
        spread = scale.repeat_interleave(TILE, 0)[:out].repeat_interleave(TILE, 1)[:, :into]
        self.tensors[name + ".weight"] = (matrix / spread).to(torch.float8_e4m3fn)
        self.tensors[name + ".weight_scale_inv"] = scale


def write(out_dir: Path) -> None:
    """Writes every file of the checkpoint but its card."""
    out_dir.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    assert tokenizer.get_vocab_size() <= CONFIG["vocab_size"], "the embedding has fewer rows than the tokenizer"
    tokenizer.save(str(out_dir / "tokenizer.json"), pretty=False)
    _write_json(out_dir / "config.json", CONFIG)
    _write_json(out_dir / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1, "do_sample": True})
    tokenizer_config = {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": CONFIG["max_position_embeddings"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    _write_json(out_dir / "tokenizer_config.json", tokenizer_config)
    weights = Weights(CONFIG)
    weights.fill()
    _write_shards(out_dir, weights.tensors)


def _write_shards(out_dir: Path, tensors: dict[str, torch.Tensor]) -> None:
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    total, shards, filled = sum(sizes.values()), [dict[str, torch.Tensor]() for _ in range(NUM_SHARDS)], 0
    for name, tensor in tensors.items():
        shards[min(filled * NUM_SHARDS // total, NUM_SHARDS - 1)][name] = tensor.contiguous()
        filled += sizes[name]
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{NUM_SHARDS:05d}.safetensors"
        save_file(shard, str(out_dir / file), metadata={"format": "pt"})
        (out_dir / file).chmod(0o644)  # safetensors keeps files to their owner
        weight_map.update(dict.fromkeys(shard, file))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(out_dir / "model.safetensors.index.json", index)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    out_dir = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "micro"
    write(out_dir)
    for path in sorted(out_dir.iterdir()):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        print(f"{path.stat().st_size:>10,} bytes  {digest}  {path.name}")


if __name__ == "__main__":
    main()
