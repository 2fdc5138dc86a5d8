"""The private names of libraries: used in these files alone, and each does what its function says.

After an upgrade a test below names the function whose private name has moved; its docstring says which public way there
was not.
"""

import ast
import contextlib
import re
from collections.abc import Iterator
from functools import partial

import datasets
import pytest
import torch
import torch.distributed as dist
from accelerate.commands.launch import launch_command_parser
from hooks import private_accelerate, private_torch, private_transformers
from launching import CONFIGS, RECIPES
from rows import private_datasets
from safetensors.torch import load_file
from saving import private_transformers as saving_transformers
from test_house import files
from tiny_models import tiny_llama
from tools import private_torch as tools_torch
from tools import private_transformers as tools_transformers
from tools.proof.shrink import build_tiny_model
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import (
    AutoConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralForCausalLM,
    core_model_loading,
)

PLACES = {
    "hooks/private_accelerate.py",
    "hooks/private_torch.py",
    "hooks/private_transformers.py",
    "rows/private_datasets.py",
    "saving/private_transformers.py",
    "tools/private_torch.py",
    "tools/private_transformers.py",
}
# Documented, whatever their first letter: by Python (of a named tuple, os and sys) and by HfArgumentParser.
DOCUMENTED = {"_replace", "_exit", "_current_frames", "_argument_group_name"}
# Private, whatever their first letter: no library documents them.
UNDOCUMENTED = {"core_model_loading", "revert_weight_conversion", "render_jinja_template", "nondefault", "save_on_cpu"}
UNDOCUMENTED |= {"find_packed_sequence_indices", "per_layer_overrides", "fsdp_params", "all_gather_outputs"}
UNDOCUMENTED |= {"post_forward_mesh_info", "unsharded_accumulated_grad", "init_all_gather_outputs"}
PRIVATE = re.compile(r"_[A-Za-z]\w*")
OURS = {"_row", "_where", "_problem", "_no_json"}  # columns of rows/, as text


def is_private(name: str) -> bool:
    """Whether a part of a dotted name is private."""
    return any((PRIVATE.fullmatch(p) and p not in DOCUMENTED) or p in UNDOCUMENTED for p in name.split("."))


def private_names(tree: ast.AST) -> Iterator[str]:
    """Every private name that a file reads, sets or imports, and those in texts (of getattr and the like): whole ones,
    and beginnings that an f-string completes."""
    parts_of_names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("endswith", "removesuffix"):
                parts_of_names |= {id(inner) for argument in node.args for inner in ast.walk(argument)}
        elif isinstance(node, ast.JoinedStr):
            parts_of_names |= {id(part) for part in node.values[1:]}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(alias.name for alias in node.names)]
        elif isinstance(node, ast.keyword):
            names = [node.arg or ""]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts_of_names:
            names = [node.value] if re.fullmatch(r"[\w.]+", node.value) and node.value not in OURS else []
        yield from (name for name in names if is_private(name))


def test_private_names_are_used_in_their_files_alone():
    trees = {file: ast.parse((RECIPES / file).read_text(encoding="utf-8")) for file in files()}
    found = {file: list(private_names(tree)) for file, tree in trees.items()}
    assert {file for file, names in found.items() if names} == PLACES, {f: n for f, n in found.items() if n}
    assert len(trees) > 100 and sum(map(len, found.values())) > 30  # all were seen


@pytest.mark.parametrize(
    "code",
    [
        "x._y",
        "x._y = 1",
        "import a._b",
        "from a._b import c",
        "from a import _b",
        "from a.core_model_loading import b",
        "getattr(x, '_y', None)",
        "getattr(x, f'_y_{z}')",
        "f(_y=1)",
        "f(**{'_y': 1})",
        "patch('a._b.c')",
        "arguments.nondefault",
    ],
)
def test_private_name_is_seen(code):
    assert list(private_names(ast.parse(code)))


def test_every_function_says_which_public_way_was_looked_for():
    functions = 0
    for file in PLACES:
        for node in ast.walk(ast.parse((RECIPES / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                functions += 1
                assert "Public way looked for:" in " ".join(ast.get_docstring(node).split()), (file, node.name)
    assert functions == 27


# -- hooks/private_torch.py and tools/private_torch.py --


@pytest.fixture
def sharded() -> Iterator[FSDPModule]:
    """Two layers in one unit, the last one in the root's, over two ranks of which only this one exists."""
    assert not dist.is_initialized()
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(3)))
        mesh = dist.init_device_mesh("cpu", (2,))
        policies = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)}
        policies["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        fully_shard([model[0], model[1]], mesh=mesh, **policies)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        yield model
    finally:
        dist.destroy_process_group()


def test_groups_are_those_of_fully_shard(sharded):
    root, unit = sorted(private_torch.fsdp_groups(sharded), key=lambda group: len(group.parameters))
    assert root.modules == (sharded,) and unit.modules == (sharded[0], sharded[1])
    assert unit.parameters == [sharded[0].weight, sharded[1].weight] and root.parameters == [sharded[2].weight]
    assert unit.reshards_after_forward and not root.reshards_after_forward
    assert unit.mp_policy.reduce_dtype is torch.float64 and root.mp_policy.reduce_dtype is None
    assert isinstance(unit.offload_policy, CPUOffloadPolicy) and not isinstance(root.offload_policy, CPUOffloadPolicy)


def test_trace_is_told_of_units_and_their_gradients(sharded, monkeypatch):
    told, whole, allocate, reduces = [], [], getattr(*tools_torch.ALLOCATES), tools_torch.REDUCES[1]
    for owner, name in (*tools_torch.BEGINS, tools_torch.REDUCES):
        method = getattr(owner, name)

        def noted(group, *args, name=name, method=method):
            before = tools_torch.gradients(group)
            result = method(group, *args)
            told.append((name, tools_torch.unit_name(group), before, tools_torch.gradients(group)))
            return result

        monkeypatch.setattr(owner, name, noted)
    gathered = tools_torch.gathered
    monkeypatch.setattr(*tools_torch.ALLOCATES, lambda p, *args: allocate(p, *args) or whole.extend(gathered(p)))
    sharded.set_requires_gradient_sync(False)
    sharded(torch.ones(1, 4)).sum().backward()
    begins = [("pre_forward", "root"), ("pre_forward", "0, 1"), ("pre_backward", "root"), ("pre_backward", "0, 1")]
    found = list(dict.fromkeys((name, unit) for name, unit, _, _ in told))
    assert found[:4] == begins and set(found[4:]) == {(reduces, "root"), (reduces, "0, 1")}
    assert [tensor.numel() for tensor in whole] == [16] * 5  # of both ranks; the unit's once more in backward
    reduced = {unit: (before, after) for name, unit, before, after in told if name == reduces}
    assert all(of_now.shape == (4, 4) for of_now, _, _ in reduced["root"][0])
    assert all(kept.dtype is torch.float64 and shard is None for _, kept, shard in reduced["0, 1"][1])
    sharded.set_requires_gradient_sync(True)
    sharded(torch.ones(1, 4)).sum().backward()
    reduced = {unit: after for name, unit, _, after in told if name == reduces}
    assert all(shard is not None for after in reduced.values() for _, _, shard in after)


def test_shard_is_replaced_in_place(sharded):
    tensor, shard = sharded[2].weight, torch.full((2, 4), 7.0)
    held = DTensor.from_local(torch.zeros(2, 4), tensor.device_mesh, [Shard(0)])
    private_torch.set_shard(held, shard)
    with torch.no_grad():
        assert held.to_local() is shard


class Seen(tools_torch.OperatorMode):
    """Notes each operator."""

    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


def test_operators_are_those_that_run():
    query = torch.ones(1, 1, 8, 8, requires_grad=True)
    with Seen() as seen:
        torch.nn.functional.scaled_dot_product_attention(query, query, query).sum().backward()
        torch.nn.functional.grouped_mm(torch.ones(16, 16).bfloat16(), torch.ones(1, 16, 16).bfloat16(), offs=ENDS)
    packets = {operator.overloadpacket for operator in seen.operators}
    assert {tools_torch.ATTENTION, tools_torch.ATTENTION_BACKWARD, tools_torch.GROUPED_MATMUL} <= packets
    assert len(set(private_torch.attention_operators())) == 4


ENDS = torch.tensor([16], dtype=torch.int32)  # of each expert's rows


def test_collectives_of_fsdp_are_those(sharded):
    with Seen() as seen:
        sharded(torch.ones(1, 4)).sum().backward()
    assert {tools_torch.ALL_GATHER, tools_torch.REDUCE_SCATTER} <= set(seen.operators)


def test_sharding_propagates_where_the_trace_looks_away(sharded, monkeypatch):
    owner, name = tools_torch.PROPAGATES
    method, calls = getattr(owner, name), []
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: calls.append(name) or method(*args, **kwargs))
    torch.cat([sharded[0].weight, sharded[1].weight, sharded[2].weight] * 3)  # not in DTensor's cache yet
    assert calls


def test_fake_tensors_have_a_device_and_no_values():
    with tools_torch.fake_tensors():
        weight = torch.empty(2**20, 2**20)
        assert weight.device.type == "cpu" and (weight @ weight).shape == weight.shape
        with pytest.raises(tools_torch.NEEDS_VALUES):
            weight.sum().item()
        with pytest.raises(tools_torch.NEEDS_VALUES):
            weight.nonzero()


# -- hooks/private_accelerate.py --


def test_launchers_arguments_are_completed_by_their_yaml():
    config = str(CONFIGS / "mem_limit.yaml")
    arguments = launch_command_parser().parse_args(["--config_file", config, "--fsdp_offload_params", "true", "x.py"])
    assert "fsdp_offload_params" in private_accelerate.given_flags(arguments)
    assert private_accelerate.given_flags(None) == private_accelerate.given_flags(object()) == frozenset()
    assert not arguments.use_fsdp
    whole = private_accelerate.with_yaml(arguments)
    assert whole.use_fsdp and str(whole.fsdp_version) == "2" and whole.fsdp_offload_params == "true"


# -- private_transformers.py of hooks/, saving/ and tools/ --


def test_model_says_what_is_not_split_and_what_stays_in_fp32():
    model = build_tiny_model(AutoConfig.for_model("dots1"))
    assert private_transformers.unsplit_classes(model) == {"Dots1DecoderLayer"}
    patterns = private_transformers.strict_fp32_patterns(model)
    assert patterns and all(any(pattern in name for name in model.state_dict()) for pattern in patterns), patterns
    assert private_transformers.unsplit_classes(torch.nn.ReLU()) == set()


@torch.no_grad()
def test_masks_without_reading_are_made_or_left_out_as_told():
    model, ids = tiny_llama(), torch.arange(8)[None]
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    run = partial(model, ids, position_ids=positions, use_cache=False)
    expected = run().logits
    with private_transformers.masks_without_reading(True):
        assert torch.equal(run().logits, expected)
    with private_transformers.masks_without_reading(False):
        assert not torch.allclose(run().logits, expected, atol=1e-2)


def test_attention_is_what_was_set():
    model = tiny_llama()
    model.set_attn_implementation("eager")
    assert tools_transformers.attention_of(model.config) == "eager"
    other = tools_transformers.with_attention(model.config, "sdpa")
    assert tools_transformers.attention_of(model.config) == "eager"
    assert tools_transformers.attention_of(LlamaForCausalLM(other).config) == "sdpa"
    assert all(tools_transformers.supports_attention(model, kind) for kind in ("sdpa", "flash_attn"))
    assert not tools_transformers.supports_attention(GptOssForCausalLM, "sdpa")


def test_tensors_on_disk_are_those_that_save_pretrained_writes(tmp_path):
    model = build_tiny_model(AutoConfig.for_model("mixtral"))
    model.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    found = saving_transformers.as_on_disk(model, model.state_dict())
    assert found.keys() == written.keys() != model.state_dict().keys()
    assert all(torch.equal(found[name], written[name]) for name in found)


def test_files_are_read_where_the_model_is_built(tmp_path):
    model = build_tiny_model(AutoConfig.for_model("mixtral"))
    model.save_pretrained(tmp_path)
    tensors, seen = load_file(tmp_path / "model.safetensors"), []

    def load(built, state_dict, files, load_config, *others):
        seen.extend([built, files, load_config])
        assert all(p.is_meta for p in built.parameters())
        return private_transformers.read_whole(built, state_dict, files, load_config, *others)

    with private_transformers.opening_with(load):
        loaded = MixtralForCausalLM.from_pretrained(tmp_path)
    built, files, load_config = seen
    assert built is loaded and files == [str(tmp_path / "model.safetensors")]
    assert all(torch.equal(p, model.get_parameter(name)) for name, p in loaded.named_parameters())

    names = loaded.state_dict()
    found = {key: private_transformers.conversion_of(key, loaded, names, load_config) for key in tensors}
    assert {name for name, _ in found.values()} == names.keys()
    assert found["model.norm.weight"] == ("model.norm.weight", [])
    merged, operations = found["model.layers.0.block_sparse_moe.experts.1.w1.weight"]
    assert merged == "model.layers.0.mlp.experts.gate_up_proj" and len(operations) == 2  # stacked, then side by side
    keeps = [[private_transformers.keeps_slices(operation, dim) for operation in operations] for dim in range(3)]
    assert keeps == [[True, True], [True, False], [True, True]]
    assert not private_transformers.keeps_slices(core_model_loading.Transpose(), 0)

    piece = {key: tensor + 1 for key, tensor in tensors.items() if ".layers.0." in key}
    info = private_transformers.load_tensors(loaded, piece, load_config, "cpu")
    assert not (info.mismatched_keys or info.conversion_errors or info.error_msgs)
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, model.state_dict()[name] + (".layers.0." in name)), name


def test_names_that_a_family_leaves_out_are_in_no_file_that_save_pretrained_writes(tmp_path):
    class Family(LlamaForCausalLM):
        _keys_to_ignore_on_save = ("model.norm.weight",)

    assert saving_transformers.never_saved(tiny_llama()) == set()
    model = Family(tiny_llama().config)
    assert saving_transformers.never_saved(model) == {"model.norm.weight"}
    model.save_pretrained(tmp_path)
    assert model.state_dict().keys() - load_file(tmp_path / "model.safetensors").keys() == {"model.norm.weight"}


def test_overrides_are_what_the_config_says_of_single_layers():
    config = LlamaConfig(num_hidden_layers=4, per_layer_config={2: {"intermediate_size": 8}})
    found = {n: o for n, v in vars(config).items() if (o := tools_transformers.layer_overrides(n, v)) is not None}
    ((name, overrides),) = found.items()
    assert {layer: override["intermediate_size"] for layer, override in overrides.items()} == {2: 8}
    setattr(config, name, tools_transformers.with_overrides(vars(config)[name], [None, {"intermediate_size": 16}]))
    assert config.per_layer_config[1].intermediate_size == 16
    assert config.per_layer_config[2].intermediate_size == LlamaConfig().intermediate_size


@torch.no_grad()
def test_documents_of_a_packed_row_see_each_other_without_the_mask():
    model, ids = tiny_llama(), torch.arange(8)[None]
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    alone = model(ids[:, 4:]).logits
    run = partial(model, ids, position_ids=positions, use_cache=False)
    assert torch.allclose(run().logits[:, 4:], alone, atol=1e-5)
    with tools_transformers.without_packed_mask():
        assert not torch.allclose(run().logits[:, 4:], alone, atol=1e-2)


def test_recompute_offloads_with_what_it_is_given():
    model, calls = tiny_llama().train(), []
    model.activation_checkpointing_enable(offload=True)
    with tools_transformers.saving_with(lambda **_: calls.append(1) or contextlib.nullcontext()):
        model(torch.arange(8)[None], use_cache=False)
    assert len(calls) == 4  # blocks


# -- rows/private_datasets.py --


def test_fingerprint_is_that_of_the_rows():
    rows, same, other = (datasets.Dataset.from_dict({"n": numbers}) for numbers in ([1], [1], [2]))
    fingerprints = [private_datasets.fingerprint(one) for one in (rows, same, other)]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
    assert private_datasets.fingerprint(rows.map(lambda row: row, new_fingerprint="ours")) == "ours"
