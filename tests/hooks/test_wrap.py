"""Which modules form an FSDP unit, on meta-device models of several architectures: by name, and as a partition."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hook_cases import CONFIG
from hooks.activation_checkpointing import plan_activation_checkpointing
from hooks.config import HookConfig
from hooks.live import check_against_plan, read_units
from hooks.structure import count_blocks, final_norm, find_blocks, is_norm, outermost
from hooks.wrap import Policies, Unit, apply_units, check_plan, plan_units
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
)

NUM_BLOCKS = 5
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": NUM_BLOCKS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
OPT_SIZES = {"hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": NUM_BLOCKS, "num_attention_heads": 2}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama_tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "gpt2": GPT2Config(n_embd=16, n_layer=NUM_BLOCKS, n_head=2, vocab_size=64, n_positions=32),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=2),
    "qwen2_moe": Qwen2MoeConfig(
        **SIZES, num_experts=2, moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts_per_tok=1
    ),
    "opt": OPTConfig(**OPT_SIZES, vocab_size=64, max_position_embeddings=32, word_embed_proj_dim=16),
}
# model -> (prefix of the block list, input embedding, lm_head, modules of the tail beside the head, is tied)
STRUCTURE = {
    "llama": ("model.layers", "model.embed_tokens", "lm_head", ["model.norm"], False),
    "llama_tied": ("model.layers", "model.embed_tokens", "lm_head", ["model.norm"], True),
    "gpt2": ("transformer.h", "transformer.wte", "lm_head", ["transformer.ln_f"], True),
    "mixtral": ("model.layers", "model.embed_tokens", "lm_head", ["model.norm"], False),
    "qwen2_moe": ("model.layers", "model.embed_tokens", "lm_head", ["model.norm"], False),
    # OPT declares its final norm before its blocks, so it is not found beside the head and stays in the root
    "opt": ("model.decoder.layers", "model.decoder.embed_tokens", "lm_head", [], True),
    "lora": (
        "base_model.model.model.layers",
        "base_model.model.model.embed_tokens",
        "base_model.model.lm_head",
        ["base_model.model.model.norm"],
        False,
    ),
}
BLOCK_CLASSES = {
    "llama": "LlamaDecoderLayer",
    "llama_tied": "LlamaDecoderLayer",
    "gpt2": "GPT2Block",
    "mixtral": "MixtralDecoderLayer",
    "qwen2_moe": "Qwen2MoeDecoderLayer",
    "opt": "OPTDecoderLayer",
    "lora": "LlamaDecoderLayer",
}
MODELS = list(STRUCTURE)
SIZED = dataclasses.replace(CONFIG, fsdp_auto_wrap_policy="SIZE_BASED_WRAP")
NO_WRAP = dataclasses.replace(CONFIG, fsdp_auto_wrap_policy="NO_WRAP")


def build(name: str) -> nn.Module:
    """A new model without memory, as wrapping sees it while a run loads."""
    with torch.device("meta"):
        if name == "lora":
            lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
            return get_peft_model(AutoModelForCausalLM.from_config(CONFIGS["llama"]), lora)
        return AutoModelForCausalLM.from_config(CONFIGS[name])


@functools.cache
def model_of(name: str) -> nn.Module:
    """The same, shared by tests that only plan."""
    return build(name)


def modules_of(units: list[Unit]) -> list[list[str]]:
    return [list(unit.modules) for unit in units]


def block_names(name: str, inside: str = "") -> list[str]:
    return [f"{STRUCTURE[name][0]}.{i}{inside}" for i in range(NUM_BLOCKS)]


def user_function(folder: Path, body: str) -> str:
    path = folder / f"user_wrap_{abs(hash(body))}.py"
    path.write_text(f"def choose(*arguments):\n    model = arguments[-1]\n{body}\n")
    return f"{path}:choose"


def user_config(folder: Path, planned: str) -> HookConfig:
    return dataclasses.replace(CONFIG, hook_wrap_function=user_function(folder, f"    return {planned}"))


# --- blocks


@pytest.mark.parametrize("name", MODELS)
def test_no_wrap_makes_no_unit_beside_the_root(name: str) -> None:
    assert plan_units(model_of(name), NO_WRAP) == []


@pytest.mark.parametrize("name", MODELS)
def test_each_block_is_a_unit_without_naming_its_class(name: str) -> None:
    units = plan_units(model_of(name), CONFIG)
    assert modules_of(units) == [[block] for block in block_names(name)]
    assert {(unit.kind, unit.reshard_after_forward) for unit in units} == {("block", True)}
    assert count_blocks(model_of(name)) == NUM_BLOCKS


@pytest.mark.parametrize("name", MODELS)
def test_named_block_class_gives_the_same_units_as_finding_it(name: str) -> None:
    config = dataclasses.replace(CONFIG, fsdp_transformer_layer_cls_to_wrap=(BLOCK_CLASSES[name],))
    assert plan_units(model_of(name), config) == plan_units(model_of(name), CONFIG)


@pytest.mark.parametrize("n", range(1, NUM_BLOCKS + 3))
@pytest.mark.parametrize("name", MODELS)
def test_n_blocks_form_a_unit_and_the_remainder_a_smaller_one(name: str, n: int) -> None:
    units = plan_units(model_of(name), dataclasses.replace(CONFIG, hook_wrap_blocks_per_unit=n))
    assert len(units) == -(-NUM_BLOCKS // n)
    assert list(itertools.chain(*modules_of(units))) == block_names(name)
    assert all(len(unit.modules) == n for unit in units[:-1])
    assert len(units[-1].modules) == NUM_BLOCKS - n * (len(units) - 1)


@pytest.mark.parametrize("name", MODELS)
def test_layer_class_of_another_architecture_is_answered_with_the_classes_there_are(name: str) -> None:
    config = dataclasses.replace(CONFIG, fsdp_transformer_layer_cls_to_wrap=("FalconDecoderLayer",))
    with pytest.raises(ValueError) as caught:
        plan_units(model_of(name), config)
    assert "FalconDecoderLayer" in str(caught.value)
    assert BLOCK_CLASSES[name] in str(caught.value)


def test_one_wrong_class_beside_a_right_one_is_an_error() -> None:
    config = dataclasses.replace(CONFIG, fsdp_transformer_layer_cls_to_wrap=("LlamaDecoderLayer", "GPT2Block"))
    with pytest.raises(ValueError, match="GPT2Block not in this model"):
        plan_units(model_of("llama"), config)


@pytest.mark.parametrize(("name", "mlp"), [("llama", "LlamaMLP"), ("lora", "LlamaMLP"), ("gpt2", "GPT2MLP")])
@pytest.mark.parametrize("n", [1, 2])
def test_class_nested_in_a_block_gets_its_own_unit_before_the_block(name: str, mlp: str, n: int) -> None:
    classes = (BLOCK_CLASSES[name], mlp)
    config = dataclasses.replace(CONFIG, fsdp_transformer_layer_cls_to_wrap=classes, hook_wrap_blocks_per_unit=n)
    units = plan_units(model_of(name), config)
    assert sorted(modules_of(units[:NUM_BLOCKS])) == [[inner] for inner in block_names(name, ".mlp")]
    assert list(itertools.chain(*modules_of(units[NUM_BLOCKS:]))) == block_names(name)


@pytest.mark.parametrize("whole", ["LlamaForCausalLM", "ModuleList"])
def test_class_that_can_be_no_unit_is_refused(whole: str) -> None:
    config = dataclasses.replace(CONFIG, fsdp_transformer_layer_cls_to_wrap=(whole,))
    with pytest.raises(ValueError, match="cannot be carried out"):
        plan_units(model_of("llama"), config)


def test_model_without_blocks_is_an_error_that_names_the_way_out() -> None:
    with pytest.raises(ValueError, match="SIZE_BASED_WRAP"):
        plan_units(nn.Sequential(nn.Linear(2, 2)), CONFIG)


def test_outermost_drops_what_lies_inside_and_keeps_similar_names() -> None:
    module = nn.Identity()
    blocks = [(name, module) for name in ("h.1", "h.1.mlp", "h.10", "h.10.mlp.norm", "h.2")]
    assert [name for name, _ in outermost(blocks)] == ["h.1", "h.10", "h.2"]


# --- reshard


@pytest.mark.parametrize("reshard", [True, False])
def test_reshard_choice_of_the_yaml_is_carried_into_every_block_unit(reshard: bool) -> None:
    for base in (CONFIG, dataclasses.replace(SIZED, fsdp_min_num_params=1500)):
        config = dataclasses.replace(base, fsdp_reshard_after_forward=reshard)
        for name in MODELS:
            units = plan_units(model_of(name), config)
            assert units
            assert {unit.reshard_after_forward for unit in units} == {reshard}, name


@pytest.mark.parametrize("reshard", [True, False])
def test_embedding_follows_the_yaml_and_the_tail_is_never_resharded(reshard: bool) -> None:
    config = dataclasses.replace(CONFIG, hook_wrap_embeddings=True, fsdp_reshard_after_forward=reshard)
    kinds = {unit.kind: unit.reshard_after_forward for unit in plan_units(model_of("llama"), config)}
    assert kinds == {"block": reshard, "embeddings": reshard, "tail": False}
    kinds = {unit.kind: unit.reshard_after_forward for unit in plan_units(model_of("llama_tied"), config)}
    assert kinds == {"block": reshard, "embeddings": False}


# --- embeddings and norms


@pytest.mark.parametrize("name", MODELS)
def test_embeddings_apart_are_two_units_or_one_when_tied(name: str) -> None:
    _, embedding, head, beside, is_tied = STRUCTURE[name]
    units = plan_units(model_of(name), dataclasses.replace(CONFIG, hook_wrap_embeddings=True))
    assert modules_of(units[:NUM_BLOCKS]) == [[block] for block in block_names(name)]
    apart = [set(modules) for modules in modules_of(units[NUM_BLOCKS:])]
    assert apart == ([{embedding, *beside, head}] if is_tied else [{embedding}, {*beside, head}])


def all_norms(name: str) -> set[str]:
    named = model_of(name).named_modules()
    return {n for n, module in named if "norm" in type(module).__name__.lower() and not list(module.children())}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("base", [CONFIG, NO_WRAP, SIZED])
def test_norm_unit_holds_all_norms_and_is_never_resharded(name: str, base: HookConfig) -> None:
    config = dataclasses.replace(base, hook_norm_dtype="fp32", fsdp_min_num_params=1500)
    first, *rest = plan_units(model_of(name), config)
    assert set(first.modules) == all_norms(name)
    assert len(first.modules) == 2 * NUM_BLOCKS + 1
    assert (first.kind, first.reshard_after_forward) == ("norms", False)
    assert not set(itertools.chain(*modules_of(rest))) & all_norms(name)


@pytest.mark.parametrize("name", MODELS)
def test_tail_is_the_head_alone_beside_a_norm_unit(name: str) -> None:
    _, embedding, head, _, is_tied = STRUCTURE[name]
    units = plan_units(model_of(name), dataclasses.replace(CONFIG, hook_wrap_embeddings=True, hook_norm_dtype="fp32"))
    apart = modules_of(units[1 + NUM_BLOCKS :])
    assert apart == ([[embedding, head]] if is_tied else [[embedding], [head]])


@pytest.mark.parametrize("name", MODELS)
def test_final_norm_is_the_norm_declared_after_the_blocks(name: str) -> None:
    declared = STRUCTURE[name][3]
    assert final_norm(model_of(name)) is (model_of(name).get_submodule(declared[0]) if declared else None)


def test_norm_is_told_by_its_class() -> None:
    assert is_norm(nn.LayerNorm(2))
    assert is_norm(nn.RMSNorm(2))
    assert not is_norm(nn.Linear(2, 2))


def test_embeddings_apart_without_a_head_is_refused() -> None:
    with torch.device("meta"):
        headless = AutoModelForCausalLM.from_config(CONFIGS["llama"]).model
    with pytest.raises(ValueError, match="hook_wrap_embeddings"):
        plan_units(headless, dataclasses.replace(CONFIG, hook_wrap_embeddings=True))


# --- by size


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in dict.fromkeys(module.parameters()))


@pytest.mark.parametrize("name", MODELS)
def test_size_policy_with_a_low_threshold_skips_containers_and_single_linears(name: str) -> None:
    model = model_of(name)
    units = plan_units(model, dataclasses.replace(SIZED, fsdp_min_num_params=1))
    assert len(units) >= 2 * NUM_BLOCKS
    ends = {STRUCTURE[name][1], STRUCTURE[name][2]}
    for module_name in itertools.chain(*modules_of(units)):
        module = model.get_submodule(module_name)
        assert not isinstance(module, nn.ModuleList | nn.ModuleDict), module_name
        assert module_name in ends or not isinstance(module, nn.Linear), module_name
        assert not hasattr(module, "base_layer"), f"{module_name} is one linear and its adapter"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("threshold", [1, 500, 1000, 2000, 3000, 5000])
def test_units_by_size_reach_the_threshold_without_their_inner_units(name: str, threshold: int) -> None:
    model = model_of(name)
    config = dataclasses.replace(SIZED, fsdp_min_num_params=threshold)
    parts = [count(module) for module in model.modules() if not isinstance(module, nn.ModuleList)]
    if threshold > max(size for size in parts if size < count(model)):
        with pytest.raises(ValueError, match=f"fsdp_min_num_params: {threshold:,}, but no module"):
            plan_units(model, config)
        return
    units, seen = plan_units(model, config), set()
    assert units
    for unit in units:
        (module_name,) = unit.modules
        own = {id(p): p.numel() for p in model.get_submodule(module_name).parameters() if id(p) not in seen}
        assert sum(own.values()) >= threshold, module_name
        seen |= set(own)


def test_size_threshold_of_a_block_makes_each_block_a_unit() -> None:
    for name in MODELS:
        model = model_of(name)
        threshold = count(model.get_submodule(block_names(name)[0]))
        parts = [count(child) for _, child in model.get_submodule(block_names(name)[0]).named_modules()]
        assert sorted(parts)[-1] == threshold > sorted(parts)[-2]
        units = plan_units(model, dataclasses.replace(SIZED, fsdp_min_num_params=threshold))
        assert set(block_names(name)) <= set(itertools.chain(*modules_of(units))), name
        inner = [m for m in itertools.chain(*modules_of(units)) if m.startswith(STRUCTURE[name][0])]
        assert sorted(inner) == sorted(block_names(name)), name


def test_whole_model_or_peft_wrapper_is_never_a_unit_beside_the_root() -> None:
    for name in MODELS:
        model = model_of(name)
        for threshold in (1, 1000, 2000):
            units = plan_units(model, dataclasses.replace(SIZED, fsdp_min_num_params=threshold))
            for module_name in itertools.chain(*modules_of(units)):
                assert count(model.get_submodule(module_name)) < count(model), (name, threshold, module_name)


def test_size_policy_that_reaches_no_module_is_an_error_not_silence() -> None:
    for name in MODELS:
        with pytest.raises(ValueError, match="fsdp_min_num_params"):
            plan_units(model_of(name), dataclasses.replace(SIZED, fsdp_min_num_params=10**9))


# --- the user's function


def test_users_plan_is_taken_with_its_reshard_choices(tmp_path: Path) -> None:
    planned = '[(["model.layers.0", "model.layers.1"], False), ("model.layers.4", True)]'
    units = plan_units(model_of("llama"), user_config(tmp_path, planned))
    assert modules_of(units) == [["model.layers.0", "model.layers.1"], ["model.layers.4"]]
    assert [(unit.reshard_after_forward, unit.kind) for unit in units] == [(False, "user"), (True, "user")]


def test_users_plan_replaces_the_policy_and_keeps_the_norm_unit(tmp_path: Path) -> None:
    config = dataclasses.replace(user_config(tmp_path, '[("model.layers.0", True)]'), hook_norm_dtype="fp32")
    assert [unit.kind for unit in plan_units(model_of("llama"), config)] == ["norms", "user"]


@pytest.mark.parametrize(
    ("planned", "fragment"),
    [
        ("None", "expected a list"),
        ("['model.layers.0']", "expected a list"),
        ("{'model.layers.0': True}", "expected a list"),
        ("[(['model.layers.0'], True, 3)]", "expected a list"),
        ("[(3, True)]", "expected a list"),
        ("[(['model.layers.0'], 'no')]", "expected a list"),
        ("[(['model.layers.0'], 8)]", "expected a list"),
        ("model", "expected a list"),
        ("[([model.model.layers[0]], True)]", "no module named"),
        ("[(['model.layers.9'], True)]", "model.layers.9"),
        ("[(['model.layers'], True)]", "ModuleList"),
        ("[([''], True)]", "root"),
        ("[(['model.layers.0'], True), (['model.layers.0'], True)]", "model.layers.0"),
        ("[(['model.layers.0', 'model.layers.0'], True)]", "model.layers.0"),
        ("[([], True)]", "no parameter"),
        ("[(['model.rotary_emb'], True)]", "no parameter"),
        ("[(['model.layers.0.mlp.act_fn'], True)]", "no parameter"),
        ("[]", "hook_wrap_function"),
    ],
)
def test_users_plan_that_cannot_be_carried_out_is_refused(tmp_path: Path, planned: str, fragment: str) -> None:
    with pytest.raises(ValueError, match=fragment):
        plan_units(model_of("llama"), user_config(tmp_path, planned))


@pytest.mark.parametrize("name", ["llama_tied", "gpt2", "opt"])
def test_users_plan_that_splits_a_tied_weight_is_refused(tmp_path: Path, name: str) -> None:
    _, embedding, head, _, _ = STRUCTURE[name]
    for planned in (f"[(['{embedding}'], True)]", f"[(['{embedding}'], True), (['{head}'], True)]"):
        with pytest.raises(ValueError, match="tied"):
            plan_units(model_of(name), user_config(tmp_path, planned))
    together = plan_units(model_of(name), user_config(tmp_path, f"[(['{embedding}', '{head}'], False)]"))
    assert modules_of(together) == [[embedding, head]]


def test_norm_named_by_the_user_beside_a_norm_unit_is_refused(tmp_path: Path) -> None:
    config = dataclasses.replace(user_config(tmp_path, '[(["model.norm"], True)]'), hook_norm_dtype="fp32")
    with pytest.raises(ValueError, match=r"model\.norm is in unit 0 and in unit 1"):
        plan_units(model_of("llama"), config)


def test_all_problems_of_a_users_plan_are_reported_at_once(tmp_path: Path) -> None:
    planned = "[(['model.layers', 'nowhere'], True), (['model.rotary_emb'], True)]"
    with pytest.raises(ValueError) as caught:
        plan_units(model_of("llama"), user_config(tmp_path, planned))
    for fragment in ("ModuleList", "nowhere", "model.rotary_emb"):
        assert fragment in str(caught.value)


# --- every plan is a partition, and FSDP2 carries it out


def all_configs() -> Iterator[tuple[str, HookConfig]]:
    for policy, norms in itertools.product(("block", "size", "none"), (None, "fp32")):
        if policy == "none":
            yield f"none-{norms}", dataclasses.replace(NO_WRAP, hook_norm_dtype=norms)
        elif policy == "size":
            for threshold in (1, 700, 1500):
                config = dataclasses.replace(SIZED, fsdp_min_num_params=threshold, hook_norm_dtype=norms)
                yield f"size-{threshold}-{norms}", config
        else:
            for n, embeddings, reshard in itertools.product((1, 2, 5), (False, True), (False, True)):
                yield (
                    f"block-{n}-{embeddings}-{reshard}-{norms}",
                    dataclasses.replace(
                        CONFIG,
                        hook_wrap_blocks_per_unit=n,
                        hook_wrap_embeddings=embeddings,
                        fsdp_reshard_after_forward=reshard,
                        hook_norm_dtype=norms,
                    ),
                )


ALL_CONFIGS = dict(all_configs())


def holders(model: nn.Module, units: list[Unit]) -> dict[int, set[int]]:
    """id of each parameter -> indices of the units that hold it under any of its names (-1: the root)."""
    found: dict[int, set[int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        around = [
            (len(module), index)
            for index, unit in enumerate(units)
            for module in unit.modules
            if name.startswith(module + ".")
        ]
        found.setdefault(id(parameter), set()).add(max(around, default=(0, -1))[1])
    return found


def test_all_modes_are_covered() -> None:
    assert len(ALL_CONFIGS) == 32


@pytest.mark.parametrize("label", ALL_CONFIGS)
@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_is_in_exactly_one_unit_or_the_root(name: str, label: str) -> None:
    model = model_of(name)
    units = plan_units(model, ALL_CONFIGS[label])
    modules = list(itertools.chain(*modules_of(units)))
    assert len(modules) == len(set(modules))
    units_of = holders(model, units)
    assert {id(parameter) for parameter in model.parameters()} == set(units_of)
    assert all(len(indices) == 1 for indices in units_of.values())
    assert set(range(len(units))) <= set().union(*units_of.values())


@pytest.mark.parametrize("name", MODELS)
def test_inner_units_come_before_outer_ones(name: str) -> None:
    labels = [label for label in ALL_CONFIGS if label.endswith("None")]
    assert len(labels) == 16
    for label in labels:
        modules = [module for unit in plan_units(model_of(name), ALL_CONFIGS[label]) for module in unit.modules]
        for i, outer in enumerate(modules):
            assert not any(later.startswith(outer + ".") for later in modules[i + 1 :]), label


@pytest.fixture
def mesh() -> Iterator[dist.device_mesh.DeviceMesh]:
    """Two ranks of which only this one exists: enough to shard, and nothing is sent."""
    assert not dist.is_initialized()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def shard(model: nn.Module, units: list[Unit], config: HookConfig, mesh: dist.device_mesh.DeviceMesh) -> None:
    policies = Policies(units=MixedPrecisionPolicy(), norms=MixedPrecisionPolicy())
    apply_units(model, units, config, mesh, policies)


LIVE = ["block-2-True-True-fp32", "block-1-False-False-None", "size-1-None", "size-1500-None", "none-None"]


@pytest.mark.parametrize("label", LIVE)
@pytest.mark.parametrize("name", MODELS)
def test_report_reads_the_live_units(name: str, label: str, mesh: dist.device_mesh.DeviceMesh) -> None:
    config, model = ALL_CONFIGS[label], build(name)
    total = count(model)
    units = plan_units(model, config)
    shard(model, units, config, mesh)
    live = read_units(model)
    assert sum(unit["parameters"] for unit in live) == total
    root = [unit for unit in live if unit["modules"] == [""]]
    assert len(live) == len(units) + len(root)
    found = {(tuple(unit["modules"]), unit["reshard_after_forward"]) for unit in live if unit not in root}
    assert {(frozenset(modules), reshard) for modules, reshard in found} == {
        (frozenset(unit.modules), unit.reshard_after_forward) for unit in units
    }
    if name != "qwen2_moe":  # its one-row gate: next test
        check_against_plan(live, units, [], [])


@pytest.mark.parametrize("is_offloaded", [True, False])
def test_every_unit_and_the_root_keep_their_parameters_on_the_host_where_asked(
    is_offloaded: bool, mesh: dist.device_mesh.DeviceMesh
) -> None:
    """Read off the live units; on a CPU host and device are one, so where tensors lie says nothing."""
    config, model = dataclasses.replace(CONFIG, fsdp_offload_params=is_offloaded), build("llama")
    units = plan_units(model, config)
    shard(model, units, config, mesh)
    live = read_units(model)
    assert len(live) == len(units) + 1 and {unit["cpu_offload"] for unit in live} == {is_offloaded}


def test_weight_of_one_row_counts_as_sharded(mesh: dist.device_mesh.DeviceMesh) -> None:
    with torch.device("meta"):
        lora = LoraConfig(r=1, target_modules="all-linear", task_type="CAUSAL_LM")
        one_row_adapter = get_peft_model(AutoModelForCausalLM.from_config(CONFIGS["llama"]), lora)
    for model in (build("qwen2_moe"), one_row_adapter):  # rank 0 of 2 holds the whole of such a weight, rank 1 nothing
        assert any(parameter.shape[0] == 1 for parameter in model.parameters())
        units = plan_units(model, CONFIG)
        shard(model, units, CONFIG, mesh)
        check_against_plan(read_units(model), units, [], [])


def test_unit_that_is_not_sharded_is_told(mesh: dist.device_mesh.DeviceMesh) -> None:
    model = build("llama")
    units = plan_units(model, CONFIG)
    shard(model, units, CONFIG, mesh)
    live = read_units(model)
    live[2]["is_sharded"] = False
    with pytest.raises(ValueError, match=r"not sharded.*model\.layers\.2"):
        check_against_plan(live, units, [], [])


@pytest.mark.parametrize(
    ("planned", "num_units"),
    [
        ("[('model.layers.0', True), ('model.layers.0.mlp', True)]", 2),
        ("[('model', True), ('model.layers.3', False), ('model.layers.3.mlp', True)]", 3),
        ("[(['model.layers.0', 'lm_head'], True), ('model.layers.0.mlp', True)]", 2),
    ],
)
def test_users_plan_of_units_inside_units_is_carried_out(
    tmp_path: Path, planned: str, num_units: int, mesh: dist.device_mesh.DeviceMesh
) -> None:
    model, config = build("llama"), user_config(tmp_path, planned)
    units = plan_units(model, config)
    shard(model, units, config, mesh)
    live = read_units(model)
    check_against_plan(live, units, [], [])
    assert len(units) == num_units and len(live) == num_units + 1  # the root


def test_users_unit_that_holds_a_module_twice_is_refused_before_sharding(tmp_path: Path) -> None:
    planned = "[(['model.layers.0', 'model.layers.0.mlp'], True)]"
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp lies inside another module of the same unit"):
        plan_units(build("llama"), user_config(tmp_path, planned))


def test_report_tells_a_live_model_that_differs_from_the_plan(mesh: dist.device_mesh.DeviceMesh) -> None:
    model = build("llama")
    units = plan_units(model, CONFIG)
    shard(model, units[:-1], CONFIG, mesh)
    live = read_units(model)
    with pytest.raises(ValueError, match=r"planned, not done.*model\.layers\.4"):
        check_against_plan(live, units, [], [])
    with pytest.raises(ValueError, match=r"done, not planned.*model\.layers\.0"):
        check_against_plan(live, units[1:-1], [], [])
    with pytest.raises(ValueError, match="recompute planned"):
        check_against_plan(live, units[:-1], [], ["model.layers.0"])


def test_partition_check_accepts_the_empty_plan_and_refuses_an_unknown_module() -> None:
    check_plan(model_of("llama"), [])
    with pytest.raises(ValueError, match="no module named"):
        check_plan(model_of("llama"), [Unit(("model.layer.0",), True, "block")])


# --- which blocks recompute


def recompute(**changes: object) -> HookConfig:
    return dataclasses.replace(CONFIG, fsdp_activation_checkpointing=True, **changes)


@pytest.mark.parametrize("name", MODELS)
def test_every_nth_block_recomputes_beginning_with_the_first(name: str) -> None:
    for n in range(1, NUM_BLOCKS + 2):
        chosen = plan_activation_checkpointing(model_of(name), recompute(hook_checkpoint_every_n_blocks=n))
        assert chosen == block_names(name)[::n]


@pytest.mark.parametrize("name", MODELS)
def test_recompute_off_chooses_no_block(name: str) -> None:
    assert plan_activation_checkpointing(model_of(name), CONFIG) == []


@pytest.mark.parametrize("base", [NO_WRAP, SIZED])
def test_recompute_does_not_depend_on_the_wrap_policy(base: HookConfig) -> None:
    config = dataclasses.replace(base, fsdp_activation_checkpointing=True)
    assert plan_activation_checkpointing(model_of("llama"), config) == block_names("llama")


def test_class_nested_in_a_block_is_not_recomputed_by_itself() -> None:
    config = recompute(fsdp_transformer_layer_cls_to_wrap=("LlamaDecoderLayer", "LlamaMLP"))
    assert plan_activation_checkpointing(model_of("llama"), config) == block_names("llama")


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (lambda index, name, block: index in (1, 4), [1, 4]),
        (lambda index, name, block: name.endswith(".2"), [2]),
        (lambda index, name, block: type(block).__name__ == "LlamaDecoderLayer", [0, 1, 2, 3, 4]),
    ],
)
def test_users_function_picks_blocks_by_index_name_or_module(
    monkeypatch: pytest.MonkeyPatch, rule: Callable[..., bool], expected: list[int]
) -> None:
    monkeypatch.setattr("hooks.activation_checkpointing.load_function", lambda reference: rule)
    chosen = plan_activation_checkpointing(model_of("llama"), recompute(hook_checkpoint_function="mine.py:rule"))
    assert chosen == [block_names("llama")[i] for i in expected]


def test_users_function_that_picks_no_block_is_an_error(tmp_path: Path) -> None:
    reference = user_function(tmp_path, "    return False")
    with pytest.raises(ValueError, match="picked no block"):
        plan_activation_checkpointing(model_of("llama"), recompute(hook_checkpoint_function=reference))


def test_blocks_are_found_in_execution_order() -> None:
    for name in MODELS:
        assert [found for found, _ in find_blocks(model_of(name))] == block_names(name)
