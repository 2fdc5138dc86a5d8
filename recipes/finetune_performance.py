"""Fine-tune for tokens per second: finetune.py with packed rows, compiled blocks, and rows sent ahead.

    accelerate launch --config_file accelerate_configs/performance.yaml recipes/finetune_performance.py
    accelerate launch --config_file accelerate_configs/performance.yaml recipes/finetune_performance.py \
        --model_name_or_path meta-llama/Llama-3.1-8B-Instruct --dataset_name my_chats.jsonl --torch_compile

The loop waits for the device where the gradients' norm is checked before the weights change; the next step's batches
are read and sent before that.

Without a model and a data set it trains the embedded sample. The YAML says what FSDP does to the model, this script
what the loop does to the batch. On a machine without GPUs the same code runs over gloo.

To copy it: python recipes/copy_recipe.py finetune_performance TO
"""

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from hooks.apply import apply_hooks, plan_hooks
from hooks.config import HookConfig, as_plain_dict, read_hook_config
from hooks.live import report_wrap, save_report
from hooks.structure import set_use_cache
from hooks.wrap import set_gradient_sync
from rows.batches import Step
from rows.prepare import Data, prepare_data
from saving.checkpoint import CheckpointWriter
from saving.folder import best_checkpoint, open_run
from saving.huggingface import export_model
from saving.resume import identity_of_run, load_best, resume
from saving.state import LiveState, data_hash
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from training.ahead import fetch_ahead
from training.answers import Answers
from training.arguments import PerformanceArguments, parse_arguments
from training.evaluation import evaluate
from training.failures import explained_failures
from training.hang_watch import watch_for_hangs
from training.kernels import check_kernels, compile_blocks, use_kernels
from training.launch import (
    decided_by_rank_0,
    end,
    gather,
    make_accelerator,
    make_device_mesh,
    note_stop_signals,
    same_everywhere,
    stop_together,
)
from training.loss_watch import LossWatch
from training.losses import micro_batch_loss
from training.metrics import MetricsLog, StepMeter, memory
from training.model import (
    add_adapters,
    check_architecture,
    check_rows,
    dtype_named,
    load_tokenizer,
    open_model,
    weight_files,
)
from training.non_finite import NonFiniteSteps
from training.optimizer import make_optimizer, make_scheduler, prepare
from training.origin import origin_lines
from training.profiling import StepProfiler
from training.progress import Progress, follow_blocks
from training.start_lines import preview, start_lines
from transformers import PreTrainedTokenizerBase
from utils import clip_grad_norm, precision_policies, read_together

SAMPLE_DIR = Path(__file__).parent / "sample"
STOPPED = 143  # exit status of a run that a signal ended after it saved (128 + SIGTERM)


def main() -> None:
    # Where one rank alone may fail (a file, a device), stop_together ends all: the others would wait for it for ever.
    with stop_together():
        arguments = parse_arguments(sample_dir=SAMPLE_DIR, kind=PerformanceArguments)
        config = read_hook_config(arguments.accelerate_config)
    with stop_together():
        accelerator = make_accelerator(config, arguments)
        check_kernels(arguments, accelerator.device)
    rank, world_size = accelerator.process_index, accelerator.num_processes

    # Data: every rank reads the same rows; which ones it takes follows from one global order.
    with stop_together():
        tokenizer = load_tokenizer(arguments)
        data = prepare_data(arguments, tokenizer, rank, world_size)
        rows_hash = data_hash(data.train)  # what a checkpoint says it was trained on
    if arguments.preview:
        accelerator.print("\n".join([*data.lines, preview(data.train, tokenizer, arguments.preview)]))
        return end(accelerator)

    with stop_together():
        run = open_run(arguments.output_dir, arguments.resume_from_checkpoint, arguments.check_hashes)

    mesh = make_device_mesh(accelerator)
    set_seed(arguments.seed)  # the same random adapters on every rank
    with stop_together():
        model = build_model(arguments, config, accelerator, mesh, data)

    # The optimizer comes after wrapping and before any forward; the schedule counts its steps, on any number of ranks.
    with stop_together():
        data.pack()
        adamw = make_optimizer(model, arguments, config)
    total_steps = data.count_steps(run.state)
    scheduler = make_scheduler(adamw, arguments.lr_scheduler_type, arguments.warmup_steps, total_steps)
    model, optimizer = prepare(accelerator, model, adamw)  # Accelerate's optimizer, around ours
    live = LiveState(accelerator, model, optimizer, scheduler, run.state)

    set_seed(arguments.seed, device_specific=True)  # each rank draws other dropout masks
    facts = identity_of_run(vars(arguments), as_plain_dict(config), rows_hash, model)
    log = MetricsLog(accelerator, arguments.output_dir, total_steps, run.state["step"])
    with stop_together():
        same_everywhere({**facts, "state": run.state, "file": weight_files(arguments)})
        resumed = resume(live, run, facts)
    log.say("\nnote: ".join(resumed))
    lines = [*origin_lines(Path(__file__).parent), *data.lines]
    log.start(arguments, config, lines + start_lines(config, arguments, accelerator, scheduler, total_steps))
    progress = follow_blocks(model, Progress(run.state["step"]))
    watch_for_hangs(progress, arguments.output_dir, rank, world_size, arguments.hang_timeout)

    steps, test_batches = data.steps(run.state, gather), data.test_batches()
    answers = Answers(accelerator, model, tokenizer, data.questions, arguments)
    writer = CheckpointWriter(live, arguments, facts)
    with explained_failures(progress, accelerator, model, optimizer, arguments.output_dir):
        if run.checkpoint is None:
            answers.before = answers.give(progress)
            evaluate_and_log(live, test_batches, log, progress)
        progress.signals = note_stop_signals()
        is_finished = train(
            live, steps, test_batches, log=log, progress=progress, writer=writer, arguments=arguments, config=config
        )
        finish(live, tokenizer, answers, is_finished, log=log, progress=progress, writer=writer, arguments=arguments)


def build_model(
    arguments: PerformanceArguments, config: HookConfig, accelerator: Accelerator, mesh: DeviceMesh, data: Data
) -> nn.Module:
    """The wrapped model. The order is fixed: shapes, adapters, the hooks in the order of hooks/apply.py, weights."""
    with open_model(arguments, accelerator.print) as (model, weights):  # without memory
        check_rows(model, data.train, data.test)
        check_architecture(model, arguments.packing, accelerator.print)
        data.lines += use_kernels(model, arguments, config.hook_param_dtype)
        model = add_adapters(model, arguments)
        plan = plan_hooks(model, config)
        dtype, policies = dtype_named(arguments.dtype), precision_policies(config)
        compiled = partial(compile_blocks, class_names=config.fsdp_transformer_layer_cls_to_wrap)
        compiled = compiled if arguments.torch_compile else None
        apply_hooks(model, plan, config, mesh, policies, frozen_dtype=dtype, compile_blocks=compiled)
        weights.fill(accelerator.device, config.fsdp_offload_params)
    report = report_wrap(model, plan, config, mesh.device_type == "cpu")
    accelerator.print("\n".join(report.lines))
    accelerator.on_main_process(save_report)(report, arguments.output_dir)
    return model


def train(
    live: LiveState,
    steps: Iterator[Step],
    test_batches: Sequence[dict[str, torch.Tensor]],
    *,
    log: MetricsLog,
    progress: Progress,
    writer: CheckpointWriter,
    arguments: PerformanceArguments,
    config: HookConfig,
) -> bool:
    """Run the optimizer steps that are left, or as many as a signal allows; returns whether all were run."""
    accelerator, model, device = live.accelerator, live.model, live.accelerator.device
    meter, watch = StepMeter(), LossWatch(config)
    profiler = StepProfiler(accelerator, model, micro_batch_loss, arguments, log=log, meter=meter)
    guard = NonFiniteSteps(accelerator, model, arguments, config, state=live.state, say=log.say)
    step, is_stopping = live.state["step"], False
    upcoming = fetch_ahead(steps, device)
    while step < log.total_steps and not is_stopping:
        step += 1
        progress.begin(step)
        with progress.mark("reading the data"):
            batches, counts = upcoming.result()
        counts = accelerator.reduce(counts)  # [label tokens, tokens] of all ranks, still on the device
        whole_step = partial(
            forward_backward, accelerator, model, label_tokens=counts[0], config=config, progress=progress
        )
        loss_sum = guard.run(whole_step, batches.micro_batches)
        # With the loss travels whether a signal asks any rank to stop, so that all see it in the same step.
        sums = accelerator.reduce(torch.stack([loss_sum, loss_sum.new_full((), len(progress.signals))]))
        # The device is still at work: read the next step's rows and send them.
        with progress.mark("reading the data"), meter.reading():
            upcoming = fetch_ahead(steps, device) if step < log.total_steps else upcoming

        with progress.mark("clipping"):
            grad_norm = clip_grad_norm(accelerator, model, arguments.max_grad_norm)
            # All that the host must know of the step, at once: here alone the CPU waits for the device.
            loss_sum, signalled, label_tokens, tokens, grad_norm = read_together(sums, counts, grad_norm)
        is_stopping = signalled > 0
        learning_rate = float(live.scheduler.get_last_lr()[0])
        if is_taken := guard.allows(step, batches.rows, loss_sum, label_tokens, grad_norm):  # or ends the run
            with progress.mark("the optimizer's step"):
                live.optimizer.step()
            is_taken = not accelerator.optimizer_step_was_skipped  # by fp16's loss scaler
            meter.add_loss(loss_sum, label_tokens)
            log.say(watch.add(loss_sum, label_tokens))
        if is_taken:
            live.scheduler.step()
        live.optimizer.zero_grad()
        tokens_seen = live.state["tokens_seen"] + tokens
        live.state = {"step": step, **batches.position, "tokens_seen": tokens_seen, **guard.count(is_taken)}
        meter.add_step(tokens)
        log.bar.update()

        is_last = step == log.total_steps
        if step % arguments.logging_steps == 0 or is_last:
            values = {**meter.read(accelerator.num_processes), "learning_rate": learning_rate, "grad_norm": grad_norm}
            values |= {**memory(device), "epoch": live.state["epoch"], "label_tokens": meter.label_tokens}
            log.write_step(step, values | guard.values())
            meter.reset()
        if is_last or (arguments.eval_steps and step % arguments.eval_steps == 0):
            evaluate_and_log(live, test_batches, log, progress)
            meter.reset()
        if is_stopping or (arguments.save_steps and (step % arguments.save_steps == 0 or is_last)):
            with progress.mark("saving"), stop_together():
                saved = writer.save()
            log.say(f"step {step}/{log.total_steps} | {saved}")
            meter.reset()
        profiler.step(batches.micro_batches, is_last or is_stopping)
    return not is_stopping or step == log.total_steps


def forward_backward(
    accelerator: Accelerator,
    model: nn.Module,
    micro_batches: list[dict[str, torch.Tensor]],
    *,
    label_tokens: torch.Tensor,
    config: HookConfig,
    progress: Progress,
) -> torch.Tensor:
    """Add up the gradients of a step of so many label tokens (all ranks); returns this rank's summed token loss."""
    loss_sum = torch.zeros((), device=accelerator.device)
    for i, batch in enumerate(micro_batches):
        set_gradient_sync(model, config, is_last_micro_batch=i == len(micro_batches) - 1)
        with progress.mark("forward"):
            loss, token_loss = micro_batch_loss(model, batch, label_tokens, accelerator.num_processes)
        with progress.mark("backward"):
            accelerator.backward(loss)
        loss_sum += token_loss
        del loss  # else this micro-batch's graph would live on beside the next one's
    return loss_sum


def evaluate_and_log(
    live: LiveState, test_batches: Sequence[dict[str, torch.Tensor]], log: MetricsLog, progress: Progress
) -> None:
    """The loss on the held-out rows, where there are any: on the screen, in the metrics, in the next checkpoint."""
    if not test_batches:
        return
    with progress.mark("evaluation"):
        eval_loss = evaluate(live.accelerator, live.model, test_batches, micro_batch_loss)
    step = live.state["step"]
    log.write(step, {"eval_loss": eval_loss})
    if step:
        log.say(f"step {step}/{log.total_steps} | eval_loss {eval_loss:.4f}")
        live.state["eval_loss"] = eval_loss


def finish(
    live: LiveState,
    tokenizer: PreTrainedTokenizerBase,
    answers: Answers,
    is_finished: bool,
    *,
    log: MetricsLog,
    progress: Progress,
    writer: CheckpointWriter,
    arguments: PerformanceArguments,
) -> None:
    """Wait for the last checkpoint, keep the best weights, answer once more, export the model."""
    progress.enter("")  # from here on ranks need not wait for one another soon
    with stop_together():
        log.say(writer.wait())
    if not is_finished:
        log.say("stopped by a signal; " + ("resume from latest" if writer.is_saved else "its state could NOT be saved"))
        log.close("stopped by a signal")
        end(live.accelerator)
        sys.exit(STOPPED if writer.is_saved else 1)
    folder = arguments.output_dir
    best = decided_by_rank_0(best_checkpoint, folder) if arguments.load_best_model_at_end else None
    with stop_together():
        log.say(load_best(live, best))
    log.write_answers(log.total_steps, *answers.compare(progress))
    set_use_cache(live.model, True)  # training had it off
    with stop_together():
        dtype = dtype_named(arguments.dtype) or live.model.config.dtype
        export_model(writer, tokenizer, Path(folder, "model"), dtype, best)
    log.close()
    live.accelerator.print(f"model: {folder}/model | metrics: {log.path}")
    end(live.accelerator)


if __name__ == "__main__":
    main()
