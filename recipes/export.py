"""Write a checkpoint as a Hugging Face folder that plain transformers or peft loads.

    python recipes/export.py outputs/run1/checkpoint-500 --output_dir my_model
    python recipes/export.py outputs/lora/checkpoint-500 --output_dir merged --merge_adapter --dtype bfloat16

One process on a CPU, which holds one file of --max_shard_size at a time (and a block of the model), never all weights.
"""

from tools.export.exporting import main

if __name__ == "__main__":
    main()
