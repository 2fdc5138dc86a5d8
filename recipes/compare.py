"""What recompute costs and what coarser units return: a few steps of a script as asked, and under other settings.

    accelerate launch --config_file accelerate_configs/default.yaml recipes/compare.py --steps 5 recipes/finetune.py ...

The script's own arguments follow its name. Prints a table of tokens per second and peak memory as ratios to the run as
asked, and writes it to OUTPUT_DIR/profile/compare.json; trains nothing that is kept.
"""

from tools.profiling.settings import main

if __name__ == "__main__":
    main()
