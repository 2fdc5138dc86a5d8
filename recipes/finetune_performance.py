"""Fine-tune for tokens per second: finetune.py with packed rows, compiled blocks, and rows sent ahead.

    accelerate launch --config_file accelerate_configs/performance.yaml recipes/finetune_performance.py
    accelerate launch --config_file accelerate_configs/performance.yaml recipes/finetune_performance.py \
        --model_name_or_path meta-llama/Llama-3.1-8B-Instruct --dataset_name my_chats.jsonl --torch_compile

The loop waits for the device once per step, where the gradients' norm is checked before the weights change; all else
is read there too, and the next step's batches are read and sent before it.

Without a model and a data set it trains the embedded sample. The YAML says what FSDP does to the model, this script
what the loop does to the batch. On a machine without GPUs the same code runs over gloo.

To copy it: architecture.py, argument_checks.py, arguments.py, batches.py, block_kernels.py, chat_text.py,
checkpoint.py, data.py, data_files.py, data_folders.py, data_formats.py, data_sources.py, data_turns.py, evaluation.py,
greedy_answers.py, hf_folder.py, hook_activation_checkpointing.py, hook_config.py, hook_keys.py, hook_wrap.py,
label_mask.py, launch.py, launcher_config.py, losses.py, metrics.py, model_flops.py, model_loading.py,
model_structure.py, optimizer.py, packing.py, prepare_data.py, profile_compare.py, profile_report.py, profiler.py,
resume.py, run_folder.py, shrink.py, shrink_layers.py, start_lines.py, streaming.py, training_state.py, utils.py,
wrap_report.py and a YAML.
"""

import math
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from architecture import check_architecture
from arguments import PerformanceArguments, parse_arguments
from batches import count_steps, evaluation_batches, fetch_ahead, training_steps
from block_kernels import check_kernels, compile_blocks, use_kernels
from checkpoint import START, CheckpointWriter
from data import preview
from evaluation import evaluate
from greedy_answers import compare_answers, greedy_answers
from hf_folder import export_model
from hook_activation_checkpointing import (
    apply_activation_checkpointing,
    plan_activation_checkpointing,
    recomputed_blocks,
)
from hook_config import HookConfig, as_plain_dict, notes, read_hook_config
from hook_wrap import apply_units, plan_units, set_gradient_sync
from launch import (
    decided_by_rank_0,
    end,
    make_accelerator,
    make_device_mesh,
    note_stop_signals,
    one_rank_at_a_time,
    stop_together,
)
from losses import describe_non_finite, micro_batch_loss
from metrics import MetricsLog, StepMeter, format_line, memory
from model_loading import add_adapters, check_rows, load_model, load_tokenizer, saved_dtype
from model_structure import count_blocks
from optimizer import make_optimizer, prepare
from packing import pack_rows
from prepare_data import prepare_data
from profile_compare import compare_settings
from profiler import StepProfiler
from resume import compare_runs, load_weights, resume, run_facts
from run_folder import best_checkpoint, check_files, find_checkpoint, hold_folder, read_manifest
from start_lines import start_lines
from streaming import Stream, stream_steps
from torch import nn
from training_state import data_hash
from transformers import get_scheduler
from utils import cast_buffers, cast_stored_parameters, clip_grad_norm, mixed_precision_policy, norm_precision_policy
from wrap_report import report_wrap, save_report

SAMPLE_DIR = Path(__file__).parent / "sample"
STOPPED = 143  # exit status of a run that a signal ended after it saved (128 + SIGTERM)
MAX_SKIPPED_STEPS = 50  # fp16: halving the initial scale that often reaches its floor; then it is no overflow


def main() -> None:
    with stop_together():
        arguments = parse_arguments(sample_dir=SAMPLE_DIR, kind=PerformanceArguments)
        hook_config = read_hook_config(arguments.accelerate_config)
    with stop_together():
        trackers, output_dir = [name for name in arguments.report_to if name != "none"], arguments.output_dir
        scale = arguments.fp16_initial_scale
        accelerator = make_accelerator(hook_config, scale, log_with=trackers or None, project_dir=output_dir)
        check_kernels(arguments, accelerator.device)
    is_cpu, rank, world_size = accelerator.device.type == "cpu", accelerator.process_index, accelerator.num_processes

    # Data: every rank reads the same rows; which ones it takes follows from one global order.
    with stop_together():
        tokenizer = load_tokenizer(arguments)
        data = prepare_data(arguments, tokenizer)
        rows_hash = data_hash(data.train)
    if arguments.preview:
        accelerator.print("\n".join([*data.lines, preview(data.train, tokenizer, arguments.preview)]))
        return end(accelerator)

    # Where the run stands: at its start, or where a checkpoint was written.
    lock = hold_folder(output_dir)  # noqa: F841 (held while it lives)
    checkpoint = decided_by_rank_0(find_checkpoint, arguments.resume_from_checkpoint, output_dir)
    state, saved = dict(START), {}
    with stop_together():
        if checkpoint is not None:
            check_files(checkpoint, "" if arguments.check_hashes else None, rank, world_size)
            saved = read_manifest(checkpoint)
            state = {name: saved[name] for name in START}
        if arguments.load_best_model_at_end and not data.test:
            raise ValueError("--load_best_model_at_end needs a test split (or --validation_split_percentage).")

    # Model and hooks. The order is fixed: load, adapters, recompute, (compile), wrap, optimizer, prepare.
    set_seed(arguments.seed)  # the same random adapters on every rank
    mesh = make_device_mesh(accelerator)
    with stop_together(), one_rank_at_a_time():
        model = load_model(arguments)
        check_rows(model, data.train, data.test)
        data.lines += use_kernels(model, arguments, hook_config.hook_param_dtype)
        check_architecture(model.config, arguments.packing)
        if arguments.packing:
            data.train, packed_line = pack_rows(data.train.to_list(), arguments.max_length)
            data.lines.append(packed_line)
        export_dtype = saved_dtype(model) if arguments.dtype == "auto" else getattr(torch, arguments.dtype)
        model = add_adapters(model, arguments)
        recomputed = plan_activation_checkpointing(model, hook_config)
        units = plan_units(model, hook_config)
        apply_activation_checkpointing(model, recomputed, hook_config, is_cpu)
        if arguments.torch_compile:
            compile_blocks(model, hook_config.fsdp_transformer_layer_cls_to_wrap)
        policy, norm_policy = mixed_precision_policy(hook_config), norm_precision_policy(hook_config)
        apply_units(model, units, hook_config, mesh, policy, norm_policy)
        frozen_dtype = None if arguments.dtype == "auto" else getattr(torch, arguments.dtype)
        cast_stored_parameters(model, hook_config, frozen_dtype)
        cast_buffers(model, hook_config)
        keys = as_plain_dict(hook_config)
        report, lines = report_wrap(model, units, recomputed, recomputed_blocks(model), count_blocks(model), keys)
        lines += [f"note: {note}" for note in notes(hook_config, is_cpu)]
        accelerator.print("\n".join(lines))
        accelerator.on_main_process(save_report)(report, output_dir)

    # Optimizer after wrapping and before any forward; the schedule counts optimizer steps on any number of ranks.
    with stop_together():
        betas, epsilon = (arguments.adam_beta1, arguments.adam_beta2), arguments.adam_epsilon
        decay, uses_scaler = arguments.weight_decay, accelerator.scaler is not None
        offloads = hook_config.hook_offload_optimizer and not hook_config.fsdp_offload_params
        optimizer = make_optimizer(model, arguments.learning_rate, decay, betas, epsilon, uses_scaler, offloads)
    micro, accumulation = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps
    rows_per_step, position = micro * accumulation * world_size, {name: state[name] for name in ("epoch", "rows_seen")}
    length = arguments.num_train_epochs, arguments.max_steps, state["step"]
    total_steps = count_steps(len(data.train), rows_per_step, *length, **position)
    warmup_steps = arguments.warmup_steps if arguments.warmup_steps >= 1 else arguments.warmup_steps * total_steps
    scheduler = get_scheduler(arguments.lr_scheduler_type, optimizer, math.ceil(warmup_steps), total_steps)
    model, prepared_optimizer = prepare(accelerator, model, optimizer)

    set_seed(arguments.seed, device_specific=True)  # each rank drops other units
    run = run_facts(arguments, keys, rows_hash, rows_per_step, model)
    if checkpoint is not None:
        with stop_together():
            lines = compare_runs(saved, run)
        with stop_together():
            lines += resume(accelerator, model, optimizer, scheduler, checkpoint)
        accelerator.print(f"resumed from {checkpoint}: step {state['step']} of {total_steps}", *lines, sep="\nnote: ")
    accelerator.print("\n".join([*data.lines, *start_lines(hook_config, arguments, accelerator, total_steps)]))
    accelerator.init_trackers(Path(output_dir).name)

    batch_size, pad_token_id = arguments.per_device_eval_batch_size, tokenizer.pad_token_id
    test_batches = evaluation_batches(data.test, batch_size, rank, world_size, pad_token_id) if data.test else []
    prompts, expected = data.prompts, data.answers
    options = data.prompts_hold_begin, batch_size, arguments.max_new_tokens
    answer_prompts = partial(greedy_answers, accelerator, model, tokenizer, prompts, *options)
    before = answer_prompts() if prompts and checkpoint is None else []
    share = micro, accumulation, rank, world_size, arguments.seed, pad_token_id
    steps = training_steps(data.train, *share, arguments.dataloader_num_workers, arguments.group_by_length, **position)
    if data.stream is not None:
        steps = stream_steps(Stream(*data.stream), *share, **position)
    log = MetricsLog(accelerator, output_dir, total_steps, state["step"])
    if test_batches and checkpoint is None:
        log.write(0, {"eval_loss": evaluate(accelerator, model, test_batches, micro_batch_loss)})
    writer = CheckpointWriter(accelerator, model, optimizer, scheduler, arguments, run)
    parts = accelerator, model, prepared_optimizer, scheduler, steps, test_batches, log, state, writer
    is_finished = train(*parts, note_stop_signals(), arguments, hook_config)
    with stop_together():
        log.say(writer.wait())
    if not is_finished:
        log.say("stopped by a signal; " + ("resume from latest" if writer.is_saved else "its state could NOT be saved"))
        log.close()
        end(accelerator)
        sys.exit(STOPPED if writer.is_saved else 1)
    best = decided_by_rank_0(best_checkpoint, output_dir) if arguments.load_best_model_at_end else None
    if best is not None:
        with stop_together():
            load_weights(model, optimizer, best)
        log.say(f"lowest eval_loss: {best}, loaded")
    if prompts:
        scores, text = compare_answers(prompts, expected, before, answer_prompts())
        log.write(total_steps, scores)
        log.say(text)
    log.close()
    with stop_together():
        export_model(model, tokenizer, Path(output_dir, "model"), export_dtype, accelerator.is_main_process)
    accelerator.print(f"model: {output_dir}/model | metrics: {log.path} | what FSDP did: {output_dir}/wrap_report.json")
    end(accelerator)


def train(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    steps: Iterator[tuple[list[dict[str, torch.Tensor]], dict[str, int]]],
    test_batches: Iterable[dict[str, torch.Tensor]],
    log: MetricsLog,
    state: dict[str, Any],
    writer: CheckpointWriter,
    signals: list[int],
    arguments: PerformanceArguments,
    hook_config: HookConfig,
) -> bool:
    """Run the optimizer steps that are left, or as many as `signals` allows; returns whether all were run."""
    device, world_size, meter = accelerator.device, accelerator.num_processes, StepMeter()
    step, is_stopping, skipped, skipped_in_a_row = state["step"], False, 0, 0
    profiler = StepProfiler(accelerator, model, micro_batch_loss, arguments, log, meter)
    upcoming = fetch_ahead(steps, device)
    while step < log.total_steps and not is_stopping:
        micro_batches, position, counts = upcoming.result()
        counts = accelerator.reduce(counts)  # [label tokens, tokens] of all ranks, still on the device
        loss_sum = forward_backward(accelerator, model, counts[0], hook_config, micro_batches)
        # With the loss travels whether a signal asks any rank to stop, so that all see it in the same step.
        sums = accelerator.reduce(torch.stack([loss_sum, loss_sum.new_tensor(len(signals))]))

        # The device is still at work: read the next step's rows and send them.
        with meter.reading():
            upcoming = fetch_ahead(steps, device) if step + 1 < log.total_steps else upcoming

        grad_norm = clip_grad_norm(accelerator, model, arguments.max_grad_norm)  # here the CPU waits for the device
        (loss_sum, signalled), (label_tokens, tokens) = sums.tolist(), counts.tolist()
        is_stopping = signalled > 0
        may_overflow = accelerator.scaler is not None and skipped_in_a_row < MAX_SKIPPED_STEPS
        if problem := describe_non_finite(loss_sum, grad_norm, step + 1, may_overflow):
            with stop_together():  # every rank holds the same sums, and ends before the weights change
                raise ValueError(problem)
        learning_rate = float(scheduler.get_last_lr()[0])
        optimizer.step()
        if accelerator.optimizer_step_was_skipped:
            skipped += 1  # fp16 overflow: the scaler lowered its scale, all ranks alike, and no weight changed
            skipped_in_a_row += 1
        else:
            skipped_in_a_row = 0
            scheduler.step()
        optimizer.zero_grad()
        step += 1
        state = {"step": step, **position, "tokens_seen": state["tokens_seen"] + tokens}
        meter.add_step(loss_sum, tokens, label_tokens)
        log.bar.update()

        is_last = step == log.total_steps
        if step % arguments.logging_steps == 0 or is_last:
            values = {**meter.read(world_size), "learning_rate": learning_rate, "grad_norm": grad_norm}
            values |= {**memory(device), "epoch": position["epoch"], "label_tokens": meter.label_tokens}
            if accelerator.scaler is not None:
                values |= {"loss_scale": accelerator.scaler.get_scale(), "skipped_steps": skipped}
            log.say(format_line(step, log.total_steps, values))
            log.write(step, values)
            meter.reset()
        if test_batches and (is_last or (arguments.eval_steps and step % arguments.eval_steps == 0)):
            eval_loss = evaluate(accelerator, model, test_batches, micro_batch_loss)
            log.say(f"step {step}/{log.total_steps} | eval_loss {eval_loss:.4f}")
            log.write(step, {"eval_loss": eval_loss})
            state["eval_loss"] = eval_loss
            meter.reset()
        if is_stopping or (arguments.save_steps and (step % arguments.save_steps == 0 or is_last)):
            with stop_together():
                saved = writer.save(state)
            log.say(f"step {step}/{log.total_steps} | {saved}")
            meter.reset()
        profiler.step(micro_batches, is_last or is_stopping)
    return not is_stopping or step == log.total_steps


def forward_backward(
    accelerator: Accelerator,
    model: nn.Module,
    label_tokens: torch.Tensor,
    hook_config: HookConfig,
    micro_batches: list[dict[str, torch.Tensor]],
) -> torch.Tensor:
    """Add up the gradients of a step of so many label tokens (all ranks); returns this rank's summed token loss."""
    loss_sum = torch.zeros((), device=accelerator.device)
    for i, batch in enumerate(micro_batches):
        set_gradient_sync(model, hook_config, is_last_micro_batch=i == len(micro_batches) - 1)
        loss, token_loss = micro_batch_loss(model, batch, label_tokens, accelerator.num_processes)
        accelerator.backward(loss)
        loss_sum += token_loss
        del loss  # else this micro-batch's graph would live on beside the next one's
    return loss_sum


if __name__ == "__main__":
    compare_settings(main, PerformanceArguments, SAMPLE_DIR) or main()
