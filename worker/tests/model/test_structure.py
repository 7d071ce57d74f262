"""What the model asks of a checkpoint, of a config and of its batch: names, shapes, dtypes, refusals, rotary angles."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from baleen_kernels.mha_dense import mha_dense
from baleen_kernels.mha_partial import mha_partial
from baleen_worker.model import attention_plan, expanded
from baleen_worker.model.attention_plan import AttentionForm, ExpandedRows, expanding_pays, plan_attention
from baleen_worker.model.context import ForwardContext, ForwardRow
from baleen_worker.model.deepseek_v32 import DeepseekForCausalLM
from baleen_worker.model.expanded import attend_expanded
from baleen_worker.model.numerics import Numerics
from baleen_worker.model.rope import rotary_frequencies, rotary_magnitude, rotary_table, softmax_scale
from cases import CASES, MSCALE, prepared
from expectation import assert_same
from product import FLOAT32, build, model_config
from stepper import Stepper, garbage_pools, in_chunks, whole
from tiny_models import V32, YARN, make_weights

BFLOAT16 = Numerics.for_dtype(torch.bfloat16)
RELEASED: dict[str, Any] = {
    **V32,
    "vocab_size": 129280,
    "hidden_size": 7168,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
    },
}


def _on_meta(config: dict[str, Any], numerics: Numerics = FLOAT32, **options: Any) -> DeepseekForCausalLM:
    with torch.device("meta"):
        return DeepseekForCausalLM(model_config(config), numerics, **options)


@pytest.mark.parametrize("name", list(CASES))
def test_parameters_are_the_checkpoint_tensors(name: str) -> None:
    config = CASES[name].config
    wanted = {key: tuple(tensor.shape) for key, tensor in make_weights(config, 0).items()}
    assert {key: tuple(tensor.shape) for key, tensor in _on_meta(config).state_dict().items()} == wanted


def test_released_checkpoint_in_fp8() -> None:
    """Names, shapes and scale grids of the release, the partial tile of kv_a_proj_with_mqa among them."""
    tensors = _on_meta(RELEASED, BFLOAT16, keep_fp8=True).state_dict()
    prefix = "model.layers.3."

    def described(name: str) -> tuple[tuple[int, ...], torch.dtype]:
        return tuple(tensors[prefix + name].shape), tensors[prefix + name].dtype

    e4m3, float32 = torch.float8_e4m3fn, torch.float32
    assert described("self_attn.kv_a_proj_with_mqa.weight") == ((576, 7168), e4m3)
    assert described("self_attn.kv_a_proj_with_mqa.weight_scale_inv") == ((5, 56), float32)
    assert described("self_attn.q_b_proj.weight_scale_inv") == ((192, 12), float32)
    assert described("self_attn.kv_b_proj.weight") == ((32768, 512), e4m3)
    assert described("self_attn.o_proj.weight_scale_inv") == ((56, 128), float32)
    assert described("self_attn.indexer.wq_b.weight") == ((8192, 1536), e4m3)
    assert described("self_attn.indexer.wk.weight_scale_inv") == ((1, 56), float32)
    assert described("self_attn.indexer.k_norm.bias") == ((128,), float32)
    assert described("self_attn.indexer.weights_proj.weight") == ((64, 7168), float32)
    assert described("mlp.gate.weight") == ((256, 7168), float32)
    assert described("mlp.gate.e_score_correction_bias") == ((256,), float32)
    assert described("mlp.experts.255.down_proj.weight_scale_inv") == ((56, 16), float32)
    assert described("mlp.shared_experts.up_proj.weight") == ((2048, 7168), e4m3)
    assert tensors["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert tensors["lm_head.weight"].dtype == float32
    # As released: 3 dense layers, 58 with experts, one more of 1571 for multi-token prediction, 92,425 tensors in all.
    per_layer = [sum(name.startswith(f"model.layers.{layer}.") for name in tensors) for layer in range(4)]
    assert per_layer == [27, 27, 27, 1565]
    assert len(tensors) == sum(per_layer) + 3
    assert 3 + 3 * per_layer[0] + 58 * per_layer[3] + (per_layer[3] + 6) == 92_425


def test_parameters_take_no_gradient() -> None:
    assert not any(parameter.requires_grad for parameter in _on_meta(V32).parameters())


def test_other_tile_sizes_are_refused() -> None:
    quantization = {**RELEASED["quantization_config"], "weight_block_size": [64, 64]}
    with pytest.raises(ValueError, match="only tiles of 128 x 128"):
        _on_meta({**V32, "quantization_config": quantization}, keep_fp8=True)


def test_hadamard_needs_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="index_head_dim of 24"):
        _on_meta({**V32, "index_head_dim": 24}, BFLOAT16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        Numerics.for_dtype(dtype)


@pytest.mark.parametrize(
    "overrides",
    [{}, {"rope_scaling": MSCALE}, {"rope_scaling": None, "rope_theta": 5e5}, {"rope_scaling": {**YARN, "factor": 1}}],
)
def test_rotary_angles_equal_those_of_transformers(overrides: dict[str, Any]) -> None:
    from transformers import AutoConfig
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32RotaryEmbedding, yarn_apply_mscale

    values = {**V32, "qk_rope_head_dim": 64, "index_head_dim": 128, **overrides}
    positions = torch.tensor([0, 1, 2, 63, 64, 4095, 4096, 40000, 163839])
    theirs: Any = AutoConfig.for_model(**values)
    cos, sin = DeepseekV32RotaryEmbedding(theirs)(torch.zeros(1), positions[None])
    config = model_config(values)
    frequencies = rotary_frequencies(64, config.rope_theta, config.rope_scaling)
    table = rotary_table(positions, frequencies, rotary_magnitude(config.rope_scaling))
    # An angle of 1e5 radians has a rounding step of 0.008 in float32.
    torch.testing.assert_close(table.cos, cos[0, :, :32], atol=0.02, rtol=0)
    torch.testing.assert_close(table.sin, sin[0, :, :32], atol=0.02, rtol=0)
    torch.testing.assert_close(table.cos[:5], cos[0, :5, :32], atol=1e-5, rtol=0)
    assert softmax_scale(config) == pytest.approx(
        yarn_apply_mscale(theirs.rope_parameters, 40**-0.5 * (40 / 88) ** 0.5)
    )


def test_released_softmax_scale() -> None:
    assert softmax_scale(model_config(RELEASED)) == pytest.approx(0.1352338, abs=1e-7)


def _plan_context(rows: list[tuple[int, int, bool]]) -> ForwardContext:
    """rows: (tokens, context, is prefill)."""
    start, forward_rows, positions = 0, [], []
    for num_tokens, context_len, is_prefill in rows:
        table = torch.arange(1, 2 + context_len // 64)
        forward_rows.append(ForwardRow(start, num_tokens, context_len, table, is_prefill))
        positions += range(context_len - num_tokens, context_len)
        start += num_tokens
    return ForwardContext(torch.tensor(positions), torch.zeros(start, dtype=torch.int64), forward_rows, 64)


def test_every_token_is_in_one_group() -> None:
    context = _plan_context(
        [(1, 300, False), (1, 290, False), (1, 5, False), (4, 4, True), (7, 90, True), (2, 2, True)]
    )
    plan = plan_attention(context, config=model_config({**V32, "index_topk": 16}), form=AttentionForm.AUTO)
    assert plan.expanded is not None
    assert plan.expanded.tokens.tolist() == [3, 4, 5, 6, 14, 15]
    groups = [rows.tokens.tolist() for rows in plan.absorbed]
    assert sorted(groups) == [[0, 1], [2], [7, 8, 9, 10, 11, 12, 13]]
    for rows in plan.absorbed:
        assert (rows.num_visible == context.positions[rows.tokens] + 1).all()


def test_expanding_pays_where_many_tokens_share_the_keys() -> None:
    """With the released widths some 174 tokens make up for expanding their keys; fewer, if the others are padded."""
    config = model_config(RELEASED)
    assert [expanding_pays(config, n, 4096 + n) for n in (1, 150, 200)] == [False, False, True]
    assert expanding_pays(config, 2048, 2048)
    assert not expanding_pays(config, 64, 64)
    assert expanding_pays(config, 64, 64, absorbed_keys=2048)


def test_a_piece_that_crosses_the_selection_is_parted(monkeypatch: pytest.MonkeyPatch) -> None:
    config = model_config({**V32, "index_topk": 16})
    context = _plan_context([(1, 9, False), (30, 40, True), (20, 20, True), (5, 12, True), (6, 60, True)])
    monkeypatch.setattr(attention_plan, "expanding_pays", lambda *_: True)
    plan = plan_attention(context, config=config, form=AttentionForm.AUTO)
    assert plan.expanded is not None
    assert plan.expanded.tokens.tolist() == [*range(1, 7), *range(31, 47), *range(51, 56)]
    assert (plan.expanded.cu_q, plan.expanded.cu_k) == ([0, 6, 22, 27], [0, 16, 32, 44])
    absorbed = sorted(rows.tokens.tolist() for rows in plan.absorbed)
    assert absorbed == [[0], [*range(7, 31)], [*range(47, 51)], [*range(56, 62)]]
    monkeypatch.setattr(attention_plan, "expanding_pays", lambda *_: False)
    plan = plan_attention(context, config=config, form=AttentionForm.AUTO)
    assert plan.expanded is None


@pytest.mark.parametrize("max_numbers", [1, 2 * 3 * 12 * 4, 2 * 3 * 12 * 7, 1 << 20])
def test_keys_expanded_part_by_part_give_the_same(max_numbers: int) -> None:
    """Queries of three rows: a whole prompt, one after a prefix, one token after a long prefix."""
    g = torch.Generator().manual_seed(0)
    heads, cu_q, cu_k = 3, [0, 9, 14, 15], [0, 9, 40, 90]
    q, k = (torch.randn(n, heads, 12, generator=g, dtype=torch.float64) for n in (15, 90))
    v = torch.randn(90, heads, 8, generator=g, dtype=torch.float64)
    slots = torch.randperm(90, generator=g)
    rows = ExpandedRows(torch.arange(15), slots, cu_q, cu_k)
    found = attend_expanded(
        q,
        rows,
        lambda kv_slots: (k[kv_slots], v[kv_slots]),
        softmax_scale=0.3,
        whole=mha_dense,
        partial=mha_partial,
        max_numbers=max_numbers,
    )
    expected = mha_dense(q, k[slots], v[slots], cu_q, cu_k, softmax_scale=0.3)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["v32", "v3"])
@pytest.mark.parametrize("sizes", [[90], [30], [50, 40]])
def test_parted_and_merged_attention_is_the_same_model(
    monkeypatch: pytest.MonkeyPatch, name: str, sizes: list[int]
) -> None:
    """Every piece is parted at the selection and every prefix expanded in parts of a few keys."""
    monkeypatch.setattr(attention_plan, "expanding_pays", lambda *_: True)
    monkeypatch.setattr(expanded, "MAX_EXPANDED_NUMBERS", 2 * 4 * 40 * 7)
    case = prepared(name)
    ids = case.sequences[0]
    result = Stepper(build(case.config, case.weights), [ids], [len(ids)]).run(in_chunks(len(ids), sizes))[0]
    assert_same(result, case.expected[0])


def test_bfloat16_is_close_to_float32() -> None:
    """The same weights and tokens in the deployed arithmetic: other numbers, the same model."""
    case = prepared("v32_selects_all")
    ids, expected = case.sequences[0], case.expected[0].logits
    result = Stepper(build(case.config, case.weights, numerics=BFLOAT16), [ids], [60]).run(in_chunks(90, [30, 1]))[0]
    assert result.logits.dtype == torch.float32
    similarity = torch.nn.functional.cosine_similarity(result.logits, expected, dim=-1)
    assert similarity.median() > 0.99
    assert not torch.equal(result.logits, expected)


@pytest.mark.parametrize("name", ["v32", "v3"])
def test_bfloat16_of_one_layer(name: str) -> None:
    """From the same input, with every key selected, the layer's output is within bfloat16's rounding."""
    case = prepared(name)
    config = {**case.config, "num_hidden_layers": 1, "first_k_dense_replace": 1, "index_topk": 128}
    if name == "v3":
        del config["index_topk"]
    keep = ("model.layers.0.", "model.embed", "model.norm", "lm_head")
    weights = {key: tensor for key, tensor in case.weights.items() if key.startswith(keep)}
    numerics = dataclasses.replace(BFLOAT16, index_q_fp8=False)
    exact, rounded = (
        Stepper(build(config, weights, numerics=n), case.sequences[:1]).run(whole(90))[0].logits
        for n in (FLOAT32, numerics)
    )
    error = (rounded - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert error.max() < 0.03


def test_a_row_does_not_read_beyond_its_context() -> None:
    """Poison in every slot that no row owns, the sink page included, leaves the logits finite and equal."""
    case = prepared("v32")
    model = build(case.config, case.weights)
    ids = [case.sequences[0], case.sequences[1][:20]]
    pools = garbage_pools(model, 8, torch.nan)
    steps = [[(0, 40)], [(1, 20)], *[[(0, 1)]] * 50]
    result = Stepper(model, ids, [40, 20], pools).run(steps)
    torch.testing.assert_close(result[0].logits, case.expected[0].logits, atol=1e-4, rtol=0)


def test_what_is_not_finite_stays_in_its_row() -> None:
    """A request whose cached keys are NaN spoils its own logits and nobody else's, in whatever order they come."""
    case = prepared("v32")
    model = build(case.config, case.weights)
    ids, lengths = case.sequences[0], [61, 90, 70]
    for order in ([0, 1, 2], [1, 0, 2], [2, 1, 0]):
        stepper = Stepper(model, [ids[:length] for length in lengths], [60] * 3)
        stepper.step([(i, 60) for i in range(3)])
        own = torch.arange(60) + stepper.page_tables[0][0] * 64
        for layer in range(model.config.num_hidden_layers):
            stepper.pools.write_latent(layer, own, torch.full((60, 32), torch.nan), torch.full((60, 16), torch.nan))
            stepper.pools.write_index_k(layer, own, torch.full((60, 32), torch.nan))
        stepper.step([(i, 1) for i in order])
        assert stepper.logits[0][60].isnan().all()
        for sequence in (1, 2):
            torch.testing.assert_close(stepper.logits[sequence][60], case.expected[0].logits[60], atol=1e-4, rtol=0)
