"""Know before you launch: memory and communication of a training step, without a GPU and without the weights.

    python recipes/plan.py --model_name_or_path Qwen/Qwen3-8B --accelerate_config accelerate_configs/mem_limit.yaml \
        --num_processes 8 --per_device_train_batch_size 1 --max_length 4096 --gpu_memory 80GiB
    python recipes/plan.py ... --compare                 the three scenarios; names the fastest that fits
    python recipes/plan.py ... --max max_length          the longest rows that fit (or per_device_train_batch_size)
    python recipes/plan.py ... --script finetune_mem_limit.py --use_peft --lora_r 16

Besides its own options it takes those of the script. The script's own step runs on tensors without memory behind them
(tools/planner), so that every key of the YAML and every argument counts as it is carried out.
"""

from pathlib import Path

from tools.planner.command import main

if __name__ == "__main__":
    main(Path(__file__).parent / "sample")
