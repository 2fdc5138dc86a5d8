"""Blocks, shared parameters and modules kept in fp32, found on tiny models of the families that have them."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from hook_cases import CONFIG
from hooks.structure import find_blocks, kept_in_fp32
from hooks.wrap import plan_units
from tiny_models import tiny_llama
from tools.proof.shrink import build_tiny_model
from torch.distributed.fsdp import fully_shard
from transformers import CONFIG_MAPPING


def tiny(model_type):
    return build_tiny_model(CONFIG_MAPPING[model_type]())


@pytest.mark.parametrize(
    ("model_type", "classes"),
    [
        ("git", {"GitVisionEncoderLayer", "GitLayer"}),
        ("gemma3", {"SiglipEncoderLayer", "Gemma3DecoderLayer"}),
        ("jamba", {"JambaMambaDecoderLayer", "JambaAttentionDecoderLayer"}),
        ("hrm_text", {"HrmTextDecoderLayer"}),
        ("gemma3n_text", {"Gemma3nTextDecoderLayer"}),  # its lists of Linears are no blocks
    ],
)
def test_blocks_of_every_tower_and_kind_are_found(model_type, classes):
    blocks = find_blocks(tiny(model_type))
    assert {type(block).__name__ for _, block in blocks} == classes
    assert len(blocks) >= 2 * len(classes)


@pytest.mark.parametrize("model_type", ["zamba", "zamba2"])
def test_parameters_shared_between_blocks_are_one_unit_that_stays_gathered(model_type):
    model = tiny(model_type)
    (shared,) = [unit for unit in plan_units(model, CONFIG) if unit.kind == "shared"]
    assert len(shared.modules) == 2 and shared.reshard_after_forward is False
    first, second = (dict(model.get_submodule(name).named_parameters()) for name in shared.modules)
    assert first and all(first[name] is second[name] for name in first)


def test_head_whose_bias_its_parent_holds_as_well_is_wrapped_with_that_parent():
    config = dataclasses.replace(CONFIG, hook_wrap_embeddings=True)
    (ends,) = [unit for unit in plan_units(tiny("bert"), config) if unit.kind == "embeddings"]
    assert ends.modules == ("bert.embeddings.word_embeddings", "cls.predictions")


@pytest.mark.parametrize(
    ("model_type", "module", "tensor"),
    [
        ("deepseek_v3", "mlp.gate", None),
        ("kimi_linear", "gate", "dt_bias"),
        ("flint", "gate", "sinks"),
        ("inkling_text", "attn_sconv", "global_scale"),  # the convolution inside it is only read by its parent
        ("bailing_hybrid", "gate", "conv1d.weight"),  # a convolution whose forward never runs
    ],
)
def test_what_the_model_keeps_in_fp32_is_a_unit_where_a_module_holds_nothing_else(model_type, module, tensor):
    model = tiny(model_type)
    modules, tensors = kept_in_fp32(model)
    assert any(name.endswith(module) for name in modules)
    assert any(name.endswith(tensor) for name in tensors) if tensor else not tensors
    units = {
        dtype: plan_units(model, dataclasses.replace(CONFIG, hook_param_dtype=dtype)) for dtype in ("bf16", "fp32")
    }
    assert [unit.modules for unit in units["bf16"] if unit.kind == "fp32"] == [tuple(modules)]
    assert not [unit for unit in units["fp32"] if unit.kind == "fp32"]


def test_module_that_the_user_wraps_leaves_the_fp32_unit_and_the_order_of_the_others_stays(tmp_path):
    """The order is that of the gathered parameters: it must not depend on a process's hash seed."""
    model = tiny("deepseek_v2")
    kept = kept_in_fp32(model)[0]
    (tmp_path / "mine.py").write_text(f"def wrap(model):\n    return [({[kept[1]]!r}, True)]\n")
    config = dataclasses.replace(CONFIG, hook_param_dtype="bf16", hook_wrap_function=f"{tmp_path / 'mine.py'}:wrap")
    units = plan_units(model, config)
    assert [unit.modules for unit in units] == [(kept[0], *kept[2:]), (kept[1],)]


def test_most_models_keep_nothing_in_fp32():
    assert kept_in_fp32(tiny_llama()) == ([], [])


def test_model_that_is_sharded_already_is_refused(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = tiny_llama()
        fully_shard(model)
        with pytest.raises(ValueError, match=r"sharded already .*load it without distributed_config"):
            plan_units(model, CONFIG)
    finally:
        dist.destroy_process_group()


def test_blocks_run_in_the_order_in_which_they_are_found():
    model, order = tiny("jamba"), []
    for name, block in find_blocks(model):
        block.register_forward_hook(lambda *_, name=name: order.append(name))
    model(input_ids=torch.randint(67, 96, (1, 8)), use_cache=False)
    assert order == [name for name, _ in find_blocks(model)]
