"""The probe door: ``python -m jaggrl.probe`` measures backward strategies on a model's real gradients."""

import logging
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from jaggrl.backward.interpolants import Exact
from jaggrl.backward.strategy import Backward
from jaggrl.build import Config, build_policy, build_scorers, build_trainer, check, make, resolve
from jaggrl.errors import UserError, unknown
from jaggrl.infra import distributed
from jaggrl.infra.cli import hydra_door
from jaggrl.infra.logging import setup_logging
from jaggrl.probe_report import ProbeReport
from jaggrl.probing import Probe

log = logging.getLogger(__name__)


@hydra_door("probe")
def main(cfg: DictConfig) -> int | None:
    """Check, load, measure, print, write."""
    config = resolve(cfg)
    settings = config["probe"]
    strategies = _strategies(config)
    if settings["whole_trajectory"] and "timestep_fraction" in config["algorithm"]:
        config["algorithm"]["timestep_fraction"] = 1.0
    plan = check(config)
    ranks = distributed.start(config["distributed"]["device"], config["distributed"]["timeout_s"])
    setup_logging(ranks.rank)
    try:
        policy = build_policy(config, ranks)
        trainer = build_trainer(config, plan, ranks, policy, build_scorers(config, ranks))
        probe = Probe(trainer, strategies, settings["after_updates"])

        def tick(done: int) -> None:
            cosines = {n: m.whole[-1].cosine for n, m in probe.measured.items() if n != "exact"}
            told = "  ".join(f"{name} {cosine:.3f}" for name, cosine in cosines.items())
            log.info("rollout %d/%d  cosine of the update: %s", done, settings["rollouts"], told)

        probe.run(settings["rollouts"], tick)
        report = ProbeReport(probe, config["strategies"], _setting(config, probe))
        if ranks.main:
            folder = Path(settings["output"]) / (settings["name"] or _name(config))
            log.info("\n%s", report.write(folder.absolute(), settings["recommend"]))
            log.info("written to %s", folder)
    finally:
        distributed.stop()
    return None


def _strategies(config: Config) -> dict[str, Backward]:
    """The strategies to measure, by their names in the config."""
    settings = config["probe"]
    if not isinstance(settings["rollouts"], int) or settings["rollouts"] < 1:
        raise UserError(f"probe.rollouts={settings['rollouts']} must be a whole number of at least 1")
    nodes = {name: node for name, node in config["strategies"].items() if node is not None}
    for name, node in nodes.items():
        if "_target_" not in node:
            raise UserError(
                f"strategies.{name} has keys but no strategy: choose one, or ~strategies.{name} as well"
            )
    built = {name: make(node, "backward") for name, node in nodes.items()}
    interpolating = [name for name, b in built.items() if not isinstance(b.interpolant, Exact)]
    if settings["recommend"] not in interpolating:
        raise unknown("probe.recommend", settings["recommend"], interpolating)
    return built


def _name(config: Config) -> str:
    """``flux-PolicyGradient``."""
    model = Path(config["model"]["path"]).name
    return f"{model}-{config['algorithm']['_target_'].rsplit('.', 1)[-1]}"


def _setting(config: Config, probe: Probe) -> dict[str, Any]:
    """What was probed, for the header."""
    trainer = probe.trainer
    samples = len(trainer.samples) * trainer.ranks.world // trainer.loop.updates_per_rollout
    return {
        "model": config["model"]["path"],
        "algorithm": config["algorithm"]["_target_"].rsplit(".", 1)[-1],
        "reward": ", ".join(name for name, weight in config["reward"]["weights"].items() if weight),
        "rollouts": probe.rollouts,
        "samples per update": samples,
        "ranks": trainer.ranks.world,
        "group size": trainer.loop.group_size,
        "precision": trainer.policy.precision,
        "after updates": probe.after_updates,
        "seed": trainer.loop.seed,
    }


if __name__ == "__main__":
    main()
