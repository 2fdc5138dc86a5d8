"""A loss that jumps about: told from ordinary noise, and said once."""

from collections import deque
from collections.abc import Sequence
from statistics import median

from hooks.config import HookConfig

WINDOW = 50  # optimizer steps
ENOUGH = 20  # steps before one is judged
SPIKES = 3  # in a window: one hard batch, or two, is no instability
SIGMAS = 6.0  # of a heavy-tailed noise of 30%, three in a thousand steps reach it
RELATIVE, ABSOLUTE = 0.2, 0.1  # least height above the median, as a share of it and in nats per token


def is_spike(loss: float, before: Sequence[float]) -> bool:
    """Whether a step's loss stands far above those of the steps before it.

    Far: SIGMAS robust standard deviations (1.4826 times the median absolute deviation), and so much as to matter. A
    loss that falls, also fast, is never far above what came before.
    """
    if len(before) < ENOUGH:
        return False
    middle = median(before)
    sigma = 1.4826 * median(abs(value - middle) for value in before)
    return loss - middle > max(SIGMAS * sigma, RELATIVE * middle, ABSOLUTE)


class LossWatch:
    """Watches the loss of each step over the last WINDOW steps."""

    def __init__(self, config: HookConfig) -> None:
        norms = config.hook_norm_dtype or config.hook_param_dtype
        steps = ["hook_norm_dtype: fp32"] if norms != "fp32" else []
        steps += ["a lower --learning_rate or --max_grad_norm"]
        steps += ["hook_reduce_dtype: fp32"] if config.hook_reduce_dtype != "fp32" else []
        self.advice = ", then ".join(steps)
        self.losses: deque[float] = deque(maxlen=WINDOW)
        self.spikes: deque[bool] = deque(maxlen=WINDOW)
        self.is_said = False

    def add(self, loss_sum: float, label_tokens: float) -> str:
        """Add a step (sums over all ranks); returns a line the first time that the loss jumps about, else ""."""
        if not label_tokens:  # skipped
            return ""
        loss = loss_sum / label_tokens
        self.spikes.append(is_spike(loss, self.losses))
        self.losses.append(loss)
        if self.is_said or sum(self.spikes) < SPIKES:
            return ""
        self.is_said = True
        highest, middle = max(self.losses), median(self.losses)
        return (
            f"note: the loss jumps about: {sum(self.spikes)} of the last {len(self.spikes)} steps stood far above the "
            f"steps before them (median {middle:.3f}, highest {highest:.3f}). Where few rows make a step and some are "
            f"far harder, that is the data. Else try, in this order: {self.advice}"
        )
