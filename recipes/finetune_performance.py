"""Fine-tune for tokens per second: finetune.py with packed rows, compiled blocks, and rows sent ahead.

    accelerate launch --config_file accelerate_configs/performance.yaml recipes/finetune_performance.py
    accelerate launch --config_file accelerate_configs/performance.yaml recipes/finetune_performance.py \
        --model_name_or_path meta-llama/Llama-3.1-8B-Instruct --dataset_name my_chats.jsonl --torch_compile

The loop waits for the device once per step, where the gradients' norm is checked before the weights change; all else
is read there too, and the next step's batches are read and sent before it.

Without a model and a data set it trains the embedded sample. The YAML says what FSDP does to the model, this script
what the loop does to the batch. On a machine without GPUs the same code runs over gloo.

To copy it, take a YAML and the files that the README names under "Copying a recipe".
"""

import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from hooks.activation_checkpointing import (
    apply_activation_checkpointing,
    plan_activation_checkpointing,
    recomputed_blocks,
)
from hooks.config import HookConfig, as_plain_dict, notes, read_hook_config
from hooks.live import print_and_save
from hooks.structure import count_blocks
from hooks.wrap import apply_units, plan_units, set_gradient_sync
from rows.batches import Step, count_steps, evaluation_batches, fetch_ahead, training_steps
from rows.packing import pack_rows
from rows.prepare import prepare_data
from rows.streaming import Stream, stream_steps
from rows.tokenizing import preview
from saving.checkpoint import START, CheckpointWriter
from saving.folder import best_checkpoint, checked_manifest, find_checkpoint, hold_folder
from saving.huggingface import export_model
from saving.resume import compare_runs, load_best, resume, run_facts
from saving.state import data_hash
from tools.diagnosis.failures import explained_failures
from tools.diagnosis.hang_watch import watch_for_hangs
from tools.diagnosis.loss_checks import LossWatch
from tools.diagnosis.replaying import replay
from tools.planner.plan_report import dry_run, plan_beside
from tools.profiling.profiler import StepProfiler
from tools.profiling.settings import compare_settings
from tools.proof.architecture import check_architecture
from torch import nn
from training.answers import compare_answers, greedy_answers
from training.arguments import PerformanceArguments, parse_arguments
from training.evaluation import evaluate
from training.kernels import check_kernels, compile_blocks, use_kernels
from training.launch import (
    decided_by_rank_0,
    end,
    make_accelerator,
    make_device_mesh,
    note_stop_signals,
    one_rank_at_a_time,
    stop_together,
)
from training.losses import micro_batch_loss
from training.metrics import MetricsLog, StepMeter, format_line, memory
from training.model import add_adapters, check_rows, load_model, load_tokenizer, saved_dtype
from training.non_finite import NonFiniteSteps
from training.optimizer import make_optimizer, make_scheduler, prepare
from training.origin import origin_line
from training.start_lines import start_lines
from utils import cast_buffers, cast_stored_parameters, clip_grad_norm, mixed_precision_policy, norm_precision_policy

SAMPLE_DIR = Path(__file__).parent / "sample"
STOPPED = 143  # exit status of a run that a signal ended after it saved (128 + SIGTERM)


def main() -> None:
    with stop_together():
        arguments = parse_arguments(sample_dir=SAMPLE_DIR, kind=PerformanceArguments)
        hook_config = read_hook_config(arguments.accelerate_config)
    with stop_together():
        trackers = [name for name in arguments.report_to if name != "none"] or None
        scale, output_dir = arguments.fp16_initial_scale, arguments.output_dir
        accelerator = make_accelerator(hook_config, scale, log_with=trackers, project_dir=output_dir)
    if origin := origin_line(Path(__file__).parent):
        accelerator.print(origin)
        check_kernels(arguments, accelerator.device)
    is_cpu, rank, world_size = accelerator.device.type == "cpu", accelerator.process_index, accelerator.num_processes

    if arguments.dry_run:
        accelerator.print(decided_by_rank_0(dry_run, arguments, hook_config, Path(__file__).name, world_size))
        return end(accelerator)

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
    with stop_together():
        saved = checked_manifest(checkpoint, arguments.check_hashes, rank, world_size)
    state = {name: saved.get(name, value) for name, value in START.items()}

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
        report = count_blocks(model), keys, notes(hook_config, is_cpu), accelerator, output_dir
        print_and_save(model, units, (recomputed, recomputed_blocks(model)), *report)

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
    scheduler = make_scheduler(optimizer, arguments.lr_scheduler_type, arguments.warmup_steps, total_steps)
    model, prepared_optimizer = prepare(accelerator, model, optimizer)

    set_seed(arguments.seed, device_specific=True)  # each rank drops other units
    run = run_facts(arguments, keys, rows_hash, rows_per_step, model)
    if checkpoint is not None:
        with stop_together():
            lines = compare_runs(saved, run)
        with stop_together():
            lines += resume(accelerator, model, optimizer, scheduler, checkpoint)
        accelerator.print(f"resumed from {checkpoint}: step {state['step']} of {total_steps}", *lines, sep="\nnote: ")
    if arguments.replay_batch:
        with stop_together():
            accelerator.print(replay(arguments.replay_batch, accelerator, model, forward_backward, hook_config))
        return end(accelerator)
    log = MetricsLog(accelerator, output_dir, total_steps, state["step"])
    lines = data.lines + start_lines(hook_config, arguments, accelerator, scheduler, total_steps)
    log.start(arguments, hook_config, lines)
    plan_beside(accelerator, arguments, hook_config, Path(__file__).name)
    watch_for_hangs(accelerator, arguments)
    batch_size, pad_token_id = arguments.per_device_eval_batch_size, tokenizer.pad_token_id
    test_batches = evaluation_batches(data.test, batch_size, rank, world_size, pad_token_id) if data.test else []
    explained = explained_failures(accelerator, model, optimizer, arguments, hook_config, Path(__file__).name)
    answer_prompts = partial(greedy_answers, accelerator, model, tokenizer, data.prompts, batch_size=batch_size)
    begin, new_tokens = data.prompts_hold_begin, arguments.max_new_tokens
    answer_prompts = explained(partial(answer_prompts, is_rendered=begin, max_new_tokens=new_tokens))
    before = answer_prompts() if data.prompts and checkpoint is None else []
    share = micro, accumulation, rank, world_size
    order = {"seed": arguments.seed, "pad_token_id": pad_token_id, **position}
    workers, is_grouped = arguments.dataloader_num_workers, arguments.group_by_length
    steps = training_steps(data.train, *share, num_workers=workers, group_by_length=is_grouped, **order)
    if data.stream is not None:
        steps = stream_steps(Stream(*data.stream), *share, **order)
    writer = CheckpointWriter(accelerator, model, optimizer, scheduler, arguments, run)
    if test_batches and checkpoint is None:
        log.write(0, {"eval_loss": explained(evaluate)(accelerator, model, test_batches, micro_batch_loss)})
    is_finished = explained(train)(
        accelerator,
        model,
        prepared_optimizer,
        scheduler,
        steps,
        test_batches=test_batches,
        log=log,
        state=state,
        writer=writer,
        signals=note_stop_signals(),
        arguments=arguments,
        hook_config=hook_config,
    )
    with stop_together():
        log.say(writer.wait())
    if not is_finished:
        log.say("stopped by a signal; " + ("resume from latest" if writer.is_saved else "its state could NOT be saved"))
        log.close("stopped by a signal")
        end(accelerator)
        sys.exit(STOPPED if writer.is_saved else 1)
    best = decided_by_rank_0(best_checkpoint, output_dir) if arguments.load_best_model_at_end else None
    with stop_together():
        log.say(load_best(model, optimizer, best))
    if data.prompts:
        log.write_answers(total_steps, *compare_answers(data.prompts, data.answers, before, answer_prompts()))
    with stop_together():
        export_model(model, tokenizer, Path(output_dir, "model"), export_dtype, accelerator.is_main_process)
    log.close()
    accelerator.print(f"model: {output_dir}/model | metrics: {log.path}")
    end(accelerator)


def train(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    steps: Iterator[Step],
    *,
    test_batches: Iterable[dict[str, torch.Tensor]],
    log: MetricsLog,
    state: dict[str, Any],
    writer: CheckpointWriter,
    signals: list[int],
    arguments: PerformanceArguments,
    hook_config: HookConfig,
) -> bool:
    """Run the optimizer steps that are left, or as many as `signals` allows; returns whether all were run."""
    device, world_size = accelerator.device, accelerator.num_processes
    meter, watch = StepMeter(), LossWatch(hook_config)
    profiler = StepProfiler(accelerator, model, micro_batch_loss, arguments, log, meter)
    guard = NonFiniteSteps(accelerator, model, arguments, hook_config, log.say)
    step, is_stopping = state["step"], False
    upcoming = fetch_ahead(steps, device)
    while step < log.total_steps and not is_stopping:
        micro_batches, position, rows, counts = upcoming.result()
        counts = accelerator.reduce(counts)  # [label tokens, tokens] of all ranks, still on the device
        whole_step = partial(forward_backward, accelerator, model, counts[0], hook_config)
        loss_sum = guard.run(whole_step, micro_batches)
        # With the loss travels whether a signal asks any rank to stop, so that all see it in the same step.
        sums = accelerator.reduce(torch.stack([loss_sum, loss_sum.new_tensor(len(signals))]))

        # The device is still at work: read the next step's rows and send them.
        with meter.reading():
            upcoming = fetch_ahead(steps, device) if step + 1 < log.total_steps else upcoming

        grad_norm = clip_grad_norm(accelerator, model, arguments.max_grad_norm)  # here the CPU waits for the device
        (loss_sum, signalled), (label_tokens, tokens) = sums.tolist(), counts.tolist()
        is_stopping = signalled > 0
        learning_rate = float(scheduler.get_last_lr()[0])
        if guard.allows(step + 1, rows, loss_sum, label_tokens, grad_norm):  # else it ends all ranks, or skips on all
            optimizer.step()
        else:
            loss_sum = label_tokens = 0  # in no average
        if guard.count():
            scheduler.step()
        optimizer.zero_grad()
        step += 1
        state = {"step": step, **position, "tokens_seen": state["tokens_seen"] + tokens}
        meter.add_step(loss_sum, tokens, label_tokens)
        log.say(watch.add(loss_sum, label_tokens))
        log.bar.update()

        is_last = step == log.total_steps
        if step % arguments.logging_steps == 0 or is_last:
            values = {**meter.read(world_size), "learning_rate": learning_rate, "grad_norm": grad_norm}
            values |= {**memory(device), "epoch": position["epoch"], "label_tokens": meter.label_tokens}
            values |= guard.values()
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
