"""Prove, on a laptop's CPU, that your model trains exactly under your YAML.

    python recipes/verify.py --model_name_or_path Qwen/Qwen3-8B --accelerate_config accelerate_configs/mem_limit.yaml
    python recipes/verify.py --model_name_or_path my_folder --accelerate_config my.yaml --use_peft --json

Only the model's config is read. A tiny model of the same architecture is trained for three steps by two processes with
the recipe's hooks and loop, and compared with one process that holds it whole, in fp32: loss, every gradient, the
norm, the weights, each step from the same weights. Prints a table; exits 1 if a check fails, naming the module that is
first to differ, and 2 if the tiny model does not run even unsharded.
"""

from tools.proof.proof import main

if __name__ == "__main__":
    main()
