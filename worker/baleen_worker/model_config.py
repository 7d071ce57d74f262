"""What a model folder says about its model: config.json, read once, checked, and then frozen.

Owns which architectures and options are served. Reads no tensor and needs no torch. Field names are the keys of
config.json; what a key means is said in the DeepSeek-V3 and V3.2 model cards. Two spellings of the rotary settings are
read: `rope_theta` with `rope_scaling`, and `rope_parameters` as transformers 5 writes them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from baleen_worker.json_keys import CheckpointError, JsonKeys, parse_object, read_bytes, shown

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"

# model_type -> the architecture that it goes with.
ARCHITECTURES = {"deepseek_v32": "DeepseekV32ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}

# Keys that change the computation and have one value here. Absent and null mean that value too.
_FIXED: dict[str, object] = {
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_interleave": True,
    "indexer_rope_interleave": False,
    "partial_rotary_factor": 1,
}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """YaRN: the context of the first training stage was stretched by `factor`. `mscale` 0 means that it is not set."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float


@dataclass(frozen=True, slots=True)
class BlockQuantization:
    """Matrices stored in FP8 e4m3 with one float32 scale per tile of `weight_block_size` (rows, columns)."""

    weight_block_size: tuple[int, int]
    scale_fmt: str | None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model as config.json describes it.

    `index_*` are 0 where the architecture has no indexer. `eos_token_ids` joins config.json and
    generation_config.json. `dtype` is what the checkpoint calls its own, not what it is served in.
    `moe_layers[i]` says whether layer i routes to experts, `index_layers[i]` whether it has an indexer of its own; a
    layer of a sparse model that has none reuses the selection of the layer before it (IndexCache). `config_digest` is
    the SHA-256, in hex, of config.json and of what overrides it.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    quantization_config: BlockQuantization | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str
    moe_layers: tuple[bool, ...]
    index_layers: tuple[bool, ...]
    config_digest: str

    @property
    def has_indexer(self) -> bool:
        """Whether attention is sparse (DSA)."""
        return self.index_topk > 0

    def is_moe_layer(self, layer: int) -> bool:
        """Whether that layer routes to experts; the others have one dense feed-forward."""
        return self.moe_layers[layer]


def load_model_config(model_dir: Path, overrides: str = "") -> ModelConfig:
    """Reads and checks config.json, and generation_config.json where there is one.

    `overrides` is a JSON object whose keys replace those of config.json, "" for none.
    Raises CheckpointError, which lists everything that is missing or unsupported at once.
    """
    path = model_dir / CONFIG_FILE
    raw = read_bytes(path)
    values = parse_object(path, raw)
    if overrides:
        values = {**values, **parse_object(Path("--json-model-override-args"), overrides.encode())}
        raw += overrides.encode()
    keys = JsonKeys(path, values)
    _check_architecture(keys)
    for key, value in _FIXED.items():
        keys.fixed(key, value)

    sparse = keys.values.get("model_type") == "deepseek_v32"
    num_layers = keys.count("num_hidden_layers")
    num_heads = keys.count("num_attention_heads")
    if keys.optional_count("num_key_value_heads", num_heads) != num_heads:
        keys.problem("num_key_value_heads", "must equal num_attention_heads, because latents are shared by all heads")
    max_positions = keys.count("max_position_embeddings")
    rope_theta, rope_scaling = _rope(keys, max_positions)
    config = ModelConfig(
        model_type=str(keys.values.get("model_type")),
        vocab_size=keys.count("vocab_size"),
        hidden_size=keys.count("hidden_size"),
        intermediate_size=keys.count("intermediate_size"),
        moe_intermediate_size=keys.count("moe_intermediate_size"),
        num_hidden_layers=num_layers,
        num_nextn_predict_layers=keys.optional_count("num_nextn_predict_layers", 0, minimum=0),
        num_attention_heads=num_heads,
        q_lora_rank=keys.count("q_lora_rank") if sparse else keys.count_or_null("q_lora_rank"),
        kv_lora_rank=keys.count("kv_lora_rank"),
        qk_nope_head_dim=keys.count("qk_nope_head_dim"),
        qk_rope_head_dim=keys.count("qk_rope_head_dim"),
        v_head_dim=keys.count("v_head_dim"),
        index_n_heads=keys.count("index_n_heads") if sparse else 0,
        index_head_dim=keys.count("index_head_dim") if sparse else 0,
        index_topk=keys.count("index_topk") if sparse else 0,
        n_routed_experts=keys.count("n_routed_experts"),
        n_shared_experts=keys.optional_count("n_shared_experts", 1),
        num_experts_per_tok=keys.count("num_experts_per_tok"),
        n_group=keys.optional_count("n_group", 1),
        topk_group=keys.optional_count("topk_group", 1),
        norm_topk_prob=keys.flag("norm_topk_prob", True),
        routed_scaling_factor=keys.number("routed_scaling_factor"),
        rms_norm_eps=keys.number("rms_norm_eps"),
        max_position_embeddings=max_positions,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=keys.flag("tie_word_embeddings", False),
        quantization_config=_quantization(keys),
        bos_token_id=keys.token_ids("bos_token_id")[0] if keys.values.get("bos_token_id") is not None else None,
        eos_token_ids=_eos_token_ids(model_dir, keys),
        dtype=str(keys.values.get("dtype") or keys.values.get("torch_dtype") or "float32"),
        moe_layers=_moe_layers(keys, num_layers),
        index_layers=_index_layers(keys, num_layers) if sparse else (False,) * num_layers,
        config_digest=hashlib.sha256(raw).hexdigest(),
    )
    keys.raise_if_bad()
    _check_sizes(config, keys)
    keys.raise_if_bad()
    return config


def _check_architecture(keys: JsonKeys) -> None:
    model_type = keys.values.get("model_type")
    served = ", ".join(ARCHITECTURES)
    if model_type is None:
        raise CheckpointError(f"{keys.path}: missing key model_type; the model types served are {served}")
    if model_type not in ARCHITECTURES:
        raise CheckpointError(f"{keys.path}: model_type {shown(model_type)} is not served; those served are {served}")
    expected = ARCHITECTURES[str(model_type)]
    architectures = keys.values.get("architectures")
    if architectures is not None and architectures != [expected]:
        keys.problem("architectures", f"must be [{shown(expected)}] for model_type {shown(model_type)}")


def _rope(keys: JsonKeys, max_position_embeddings: int) -> tuple[float, RopeScaling | None]:
    """The base of the rotary frequencies, and YaRN where it is on."""
    modern = keys.object("rope_parameters")
    legacy = keys.object("rope_scaling")
    if "rope_theta" in (modern or {}):
        theta = keys.section("rope_parameters", modern or {}).number("rope_theta")
    else:
        theta = keys.number("rope_theta")
    name = "rope_parameters" if modern is not None else "rope_scaling"
    settings = modern if modern is not None else legacy
    if settings is None:
        return theta, None
    scaling = keys.section(name, settings)
    kind_key = "rope_type" if settings.get("rope_type") is not None else "type"
    kind = settings.get(kind_key, "default" if modern is not None else None)
    if kind == "default":
        scaling.fixed("partial_rotary_factor", 1)
        return theta, None
    if kind != "yarn":
        scaling.problem(kind_key, 'is not supported: only "yarn" and "default" are')
        return theta, None
    scaling.fixed("attention_factor", None)
    scaling.fixed("truncate", True)
    scaling.fixed("partial_rotary_factor", 1)
    original = scaling.optional_count("original_max_position_embeddings", max_position_embeddings)
    return theta, RopeScaling(
        factor=scaling.number("factor", max_position_embeddings / original),
        original_max_position_embeddings=original,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        mscale=scaling.number("mscale", 0.0),
        mscale_all_dim=scaling.number("mscale_all_dim", 0.0),
    )


def _quantization(keys: JsonKeys) -> BlockQuantization | None:
    values = keys.object("quantization_config")
    if values is None:
        return None
    section = keys.section("quantization_config", values)
    tile = values.get("weight_block_size")
    if values.get("quant_method") != "fp8":
        section.problem("quant_method", 'is not supported: only "fp8" with weight_block_size is')
        return None
    section.fixed("fmt", "e4m3")
    section.fixed("activation_scheme", "dynamic")
    sizes = cast("list[object]", tile) if isinstance(tile, list) else []
    rows_columns = [size for size in sizes if isinstance(size, int) and not isinstance(size, bool) and size > 0]
    if len(sizes) != 2 or len(rows_columns) != 2:
        section.problem("weight_block_size", "must be [rows, columns] of a tile: FP8 without tiles is not supported")
        return None
    scale_fmt = values.get("scale_fmt")
    return BlockQuantization((rows_columns[0], rows_columns[1]), None if scale_fmt is None else str(scale_fmt))


def _moe_layers(keys: JsonKeys, num_layers: int) -> tuple[bool, ...]:
    """By `mlp_layer_types` where it is given, else dense layers first."""
    types = keys.values.get("mlp_layer_types")
    if types is None:
        first, every = keys.count("first_k_dense_replace", minimum=0), keys.optional_count("moe_layer_freq", 1)
        return tuple(layer >= first and layer % every == 0 for layer in range(num_layers))
    listed = cast("list[object]", types) if isinstance(types, list) else []
    if len(listed) != num_layers or not all(kind in ("dense", "sparse") for kind in listed):
        keys.problem("mlp_layer_types", f'must list "dense" or "sparse" for each of the {num_layers} layers')
    return tuple(kind == "sparse" for kind in listed)


def _index_layers(keys: JsonKeys, num_layers: int) -> tuple[bool, ...]:
    """By `indexer_types`, else by `index_topk_pattern`, else every `index_topk_freq`-th layer after the first two."""
    types, pattern = keys.values.get("indexer_types"), keys.values.get("index_topk_pattern")
    if types is not None:
        listed = cast("list[object]", types) if isinstance(types, list) else []
        if len(listed) != num_layers or not all(kind in ("full", "shared") for kind in listed):
            keys.problem("indexer_types", f'must list "full" or "shared" for each of the {num_layers} layers')
        own = [kind != "shared" for kind in listed]
        name = "indexer_types"
    elif pattern is not None:
        letters = pattern if isinstance(pattern, str) else "?"
        if len(letters) > num_layers or not set(letters) <= {"F", "S"}:
            keys.problem(
                "index_topk_pattern", f'must be letters "F" or "S", at most one for each of {num_layers} layers'
            )
        own = [letter != "S" for letter in letters.ljust(num_layers, "F")]
        name = "index_topk_pattern"
    else:
        every = keys.optional_count("index_topk_freq", 1)
        own = [max(layer - 1, 0) % every == 0 for layer in range(num_layers)]
        name = "index_topk_freq"
    if not own or not own[0]:
        keys.problem(name, "leaves the first layer without a selection: it must have an indexer of its own")
    return tuple(own)


def _eos_token_ids(model_dir: Path, keys: JsonKeys) -> tuple[int, ...]:
    ids = keys.token_ids("eos_token_id")
    path = model_dir / GENERATION_CONFIG_FILE
    if path.exists():
        generation = JsonKeys(path, parse_object(path, read_bytes(path)))
        ids += generation.token_ids("eos_token_id")
        generation.raise_if_bad()
    return tuple(dict.fromkeys(ids))


def _check_sizes(config: ModelConfig, keys: JsonKeys) -> None:
    """What must fit together; called when every key has a usable value."""
    if config.qk_rope_head_dim % 2:
        keys.problem("qk_rope_head_dim", "must be even, because positions rotate pairs of channels")
    if config.has_indexer and config.index_head_dim < config.qk_rope_head_dim:
        keys.problem("index_head_dim", f"must be at least qk_rope_head_dim, {config.qk_rope_head_dim}")
    if not any(config.moe_layers):
        return
    group_size, rest = divmod(config.n_routed_experts, config.n_group)
    if rest:
        keys.problem("n_group", f"must divide n_routed_experts, {config.n_routed_experts}")
    elif group_size < 2:
        keys.problem("n_group", "leaves groups of one expert, but groups are ranked by their two best")
    if config.topk_group > config.n_group:
        keys.problem("topk_group", f"must be at most n_group, {config.n_group}")
    if config.num_experts_per_tok > config.topk_group * group_size:
        keys.problem("num_experts_per_tok", f"exceeds the {config.topk_group * group_size} experts of the kept groups")
