"""torch's generators, which a forward draws from, to run it again with the same dropout masks."""

import torch


def generator_states(device: torch.device) -> dict[str, torch.Tensor]:
    """Their states by device type; cheap enough for every step."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = getattr(torch, device.type).get_rng_state(device)
    return states


def set_generator_states(states: dict[str, torch.Tensor], device: torch.device) -> None:
    """Put back what generator_states returned; of another device type, what this one has."""
    torch.set_rng_state(states["cpu"])
    if device.type != "cpu" and device.type in states:
        getattr(torch, device.type).set_rng_state(states[device.type], device)
