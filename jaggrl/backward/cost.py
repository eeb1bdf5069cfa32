"""What a strategy costs before it runs: passes and forward-equivalents of the update, and the saving against exact.

Units (forward-equivalents): a forward is 1; a backward is 2, or 1 under LoRA (frozen weights need no weight gradient),
plus 1 with activation checkpointing (the recomputed forward). Per window of W steps (JAGG's cost table):

    exact              W (1 + b)
    JAGG               W + 2 b
    JAGG, served       2 + 2 b    while the parameters are the rollout's: the first update of each rollout
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaggrl.backward.strategy import Backward


def backward_units(lora: bool, checkpointing: bool) -> float:
    """Forwards that one backward costs."""
    return (1 if lora else 2) + int(checkpointing)


@dataclass(frozen=True)
class Prediction:
    """Expected passes per sample of one rollout's updates, and units (forward-equivalents) per sample."""

    grad_forwards: float
    nograd_forwards: float
    served: float
    backwards: float
    windows: int
    interpolated: int
    units: float
    """Of the update stage, reference forwards included."""
    exact_units: float
    """The same by exact backward."""
    rollout_units: float

    @property
    def total(self) -> float:
        """Of a sample's share of the rollout and its updates."""
        return self.units + self.rollout_units

    @property
    def update_saving(self) -> float:
        """Share of the update stage that is saved against exact."""
        return 1 - self.units / self.exact_units

    @property
    def step_saving(self) -> float:
        """Share of rollout and update together that is saved."""
        return 1 - (self.units + self.rollout_units) / (self.exact_units + self.rollout_units)

    def describe(self) -> str:
        """One line for the start of a run."""
        return (
            f"backward: {self.interpolated} of {self.windows} windows interpolated; per sample "
            f"{self.backwards:g} backwards, {self.grad_forwards:g} forwards with and "
            f"{self.nograd_forwards:g} without graph, {self.served:g} served; {self.units:g} units against "
            f"{self.exact_units:g} by exact: predicted saving {self.update_saving:.1%} of the update, "
            f"{self.step_saving:.1%} of the step"
        )


def predict(
    backward: Backward,
    group_sizes: Sequence[tuple[int, float]],
    updates: int,
    checkpointing: bool,
    lora: bool,
    references: int,
    rollout_forwards: float,
    stored: bool = True,
    exact: bool = True,
    share: float = 1.0,
) -> Prediction:
    """Expected cost of one sample's share of a rollout and its updates.

    Args:
        backward: the strategy. Under ``route=auto`` every window it could interpolate is taken as
            interpolated.
        group_sizes: (W, position) of each window.
        updates: optimizer steps per rollout; only the first one sees the rollout's own parameters.
        checkpointing: activations are recomputed in the backward.
        lora: only adapters are trained.
        references: forwards of other policies (reference, old) that every trained step also takes.
        rollout_forwards: forward-equivalents of the rollout, per sample.
        stored: the algorithm's windows lie on the rollout's own states, so that velocities can be served.
        exact: the rollout's velocities are the network's, not those of a feature cache.
        share: of the samples that the updates train on.
    """
    b = backward_units(lora, checkpointing)
    fresh, served_share = (1 / updates if exact else 0.0), 0.0
    if stored:
        served_share = {"off": 0.0, "fresh": fresh}.get(backward.served, 1.0)
    grad, nograd, served, interpolated = 0.0, 0.0, 0.0, 0
    for size, position in group_sizes:
        routed = backward.can_interpolate(position, size) and (
            backward.auto is not None or position < backward.jagg_frac
        )
        interpolated += routed
        anchors, middles = backward.interpolant.counts(size) if routed else (size, 0)
        grad += anchors
        served += middles * served_share
        nograd += middles * (1 - served_share)
        nograd += _ahead(backward, anchors, middles, fresh, stored) if routed else 0.0
    steps = sum(size for size, _ in group_sizes)
    extra = steps * references
    return Prediction(
        share * grad,
        share * nograd,
        share * served,
        share * grad,
        len(group_sizes),
        interpolated,
        share * (grad * (1 + b) + nograd + extra),
        share * (steps * (1 + b) + extra),
        rollout_forwards,
    )


def _ahead(backward: Backward, anchors: float, middles: float, fresh: float, stored: bool) -> float:
    """Forwards of the sequential mode for middle steps that look at the anchors' velocities."""
    if backward.graph != "sequential" or not middles:
        return 0.0
    if stored and backward.served == "corrected":
        return anchors * (1 - fresh)
    if not backward.interpolant.by_velocity:
        return 0.0
    known = {"off": 0.0, "fresh": fresh, "always": 1.0}[backward.served] if stored else 0.0
    return anchors * (1 - known)
