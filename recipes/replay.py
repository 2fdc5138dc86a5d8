"""Run a step that was not finite once more, under hooks, and say where it began; trains nothing.

    accelerate launch --config_file YAML recipes/replay.py OUTPUT_DIR/non_finite
    accelerate launch --config_file YAML recipes/replay.py OUTPUT_DIR/non_finite/rank-1.safetensors   that rank's rows
    accelerate launch ... recipes/replay.py OUTPUT_DIR/non_finite --resume_from_checkpoint latest     other weights

Start it as the run was started. The script and its arguments come from OUTPUT_DIR/run.json; arguments given here take
their place.
"""

from tools.diagnosis.replaying import main

if __name__ == "__main__":
    main()
