"""Sharded training equals unsharded training, for every layout the YAML can ask for.

One run of exactness_worker.py in 2 processes makes all cells; the tests below read its figures. Tolerances: against
the proof's reference (same arithmetic, another order of additions) fp32 and bf16 agree to a few units in the last
place, 1e-6 relative at every step (a bf16 reduction too: the reference reduces in bf16, and fp32 in its place would be
2e-3 off); with a deferred reduction the additions are grouped otherwise, 5e-6. Against one unsharded fp32 process that
runs all rows at once 1e-6 as well. Weights after a step 5e-5, as everywhere in this project: AdamW divides by gradients
near zero.
"""

import math
from dataclasses import replace
from itertools import combinations

import pytest
from cells import check_cell, run_cells
from exactness_worker import grid

CELLS = [cell.name for cell in grid()]
PLAIN = [name for name in CELLS if "fp32-full" in name and "hook" not in name and "fsdp" not in name]


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    return run_cells(tmp_path_factory.mktemp("exactness") / "results.json")


def test_grid_has_every_meeting_of_three_of_wrap_dtype_training_and_accumulation_under_every_recompute(results):
    assert len(CELLS) == len(set(CELLS)) == len(results["cells"])
    sizes = {"wrap": 7, "dtype": 2, "training": 2, "accumulation": 2}
    plain = [cell for cell in grid() if not cell.extra and not cell.tied and cell.reduce_dtype == "fp32"]
    for names in combinations(sizes, 3):
        met = {(c.recompute, *(getattr(c, name) for name in names)) for c in plain}
        modes = ("none", "every", "every_2nd")
        assert sum(recompute in modes for recompute, *_ in met) == len(modes) * math.prod(sizes[n] for n in names)
    assert results["world_size"] == 2


@pytest.mark.parametrize("name", CELLS)
def test_sharded_run_equals_its_reference(results, name):
    check_cell(name, results["cells"][name])


def test_cells_with_an_unsharded_reference_are_those_in_fp32_without_another_dial(results):
    assert len(PLAIN) == 40
    assert {name for name, cell in results["cells"].items() if "unsharded" in cell} == set(PLAIN)


@pytest.mark.parametrize("name", PLAIN)
def test_sharded_run_equals_one_unsharded_process_on_all_rows(results, name):
    errors = results["cells"][name]["unsharded"]
    assert all(errors[kind] <= 1e-6 for kind in ("loss", "norm", "gradient")), errors


def test_recompute_is_bit_equal_to_no_recompute_with_and_without_dropout(results):
    compared = {
        n: c["same_bits_as_without_recompute"]
        for n, c in results["cells"].items()
        if "same_bits_as_without_recompute" in c
    }
    cells = set(grid())
    assert len(compared) == sum(c.recompute != "none" and replace(c, recompute="none") in cells for c in cells) > 80
    assert [name for name, is_equal in compared.items() if not is_equal] == []


def test_trained_weights_are_fp32_masters_and_a_frozen_base_stays_bf16(results):
    full = [c["stored"] for n, c in results["cells"].items() if "bf16-full" in n]
    lora = [c["stored"] for n, c in results["cells"].items() if "bf16-lora" in n]
    assert full and all(stored == ["torch.float32"] for stored in full)
    assert lora and all(stored == ["torch.bfloat16", "torch.float32"] for stored in lora)


def test_every_rank_reads_the_same_norm(results):
    assert results["norms_equal_on_all_ranks"]


@pytest.mark.parametrize("processes", [1, 3])
def test_other_world_sizes_are_as_exact(tmp_path, processes):
    found = run_cells(tmp_path / "results.json", "quick", world_size=processes)
    assert found["world_size"] == processes
    assert len(found["cells"]) == 6
    for name, cell in found["cells"].items():
        check_cell(name, cell)


def test_unit_that_is_planned_but_not_wrapped_stops_the_run(results):
    assert "planned, not done: unit [(('model.layers.3',), True)]" in results["faults"]["a key ignored"]


def test_optimizer_bound_to_unsharded_tensors_stops_the_run(results):
    assert "is in the optimizer 0 times" in results["faults"]["optimizer before wrapping"]
    assert "is not sharded" in results["faults"]["optimizer after a forward"]


def test_overflow_on_one_rank_is_skipped_on_all_and_halves_the_scale(results):
    assert results["faults"]["overflow on one rank"]["ranks"] == [{"changed": False, "scale": 4.0}] * 2


def test_fp16_skips_overflowing_steps_on_all_ranks_and_clips_unscaled_gradients(results):
    """Against fp32 at the weights of the start, which two skipped steps leave. fp16 rounds to 5e-4: 2e-3."""
    found = results["fp16"]
    assert found["same_on_all_ranks"] and found["fp16_state_dtypes"] == ["torch.float32"]
    rows = found["fp16"]
    assert [row["skipped_steps"] for row in rows] == [1, 2, 2]
    assert [row["loss_scale"] for row in rows] == [2.0**18, 2.0**14, 2.0**14]
    assert {row["learning_rate"] for row in rows} == {1e-3}  # a skipped step does not advance the schedule
    assert rows[0]["loss"] == pytest.approx(found["fp32_loss"][0], rel=2e-3)
    assert rows[2]["loss"] == pytest.approx(found["fp32_loss"][2], rel=2e-3)
    assert rows[2]["grad_norm"] == pytest.approx(found["fp32_norms"][2], rel=2e-3)


def test_fused_optimizer_would_hide_skipped_steps_under_fp16(results):
    first, second, _ = results["fp16"]["fused"]
    assert first["loss_scale"] == 2.0**18 and first["skipped_steps"] == 0  # skipped, and nobody told
    assert first["learning_rate"] > second["learning_rate"]


def test_evaluation_between_backward_and_step_changes_nothing(results):
    assert results["evaluation"]["same_bits"]
    assert results["evaluation"]["naive_norm_error"] > 1e-2  # without the reshard after it


def test_evaluation_loss_is_the_token_mean_over_all_rows(results):
    assert results["evaluation"]["loss_error"] <= 1e-6


def test_collectives_are_no_more_than_accelerates_own_path_at_the_same_units(results):
    counts = results["collectives"]
    assert counts["embeddings"] == counts["accelerate"]  # accelerate wraps embeddings and tail apart as well
    assert counts["block"][0] < counts["accelerate"][0] and counts["block"][1] < counts["accelerate"][1]
    assert counts["norms"] == [counts["block"][0] + 1, counts["block"][1] + 1]


def test_nan_on_one_rank_ends_every_rank_before_the_weights_change(results):
    assert results["non_finite"]["ranks"] == [{"exit_code": 1, "steps": 0}] * 2


def test_ranks_whose_answers_end_at_different_lengths_both_return(results):
    assert results["generated_lengths"] == [1, 5]


def test_rotary_buffers_stay_fp32_and_persistent_buffers_stay_whole(results):
    assert results["buffers"] == {"rotary": ["torch.float32"], "statistics": [0.0, 1.0, 2.0], "is_plain": True}


def test_no_micro_batchs_graph_outlives_it(results):
    assert len(results["logits_alive"]) == 3 + 2 + 1 + 2 - 1 and not any(results["logits_alive"])


def test_exported_tied_model_stores_its_head_once_and_has_equal_logits(results):
    exported = results["export"]
    assert exported["head_stored"] is False and exported["odd_names"] == []
    assert exported["logit_difference"] == 0.0
    assert exported["dtypes"] == ["torch.bfloat16"]
    assert exported["config"] == [["LlamaForCausalLM"], "bfloat16", True]
