"""The evaluation door: ``python -m jaggrl.evaluate weights=<run folder>`` prints the table and writes it as JSON."""

import logging
from pathlib import Path

from omegaconf import DictConfig

from jaggrl.build import Config, build_policy, build_scorers, resolve
from jaggrl.errors import UserError
from jaggrl.evaluation import Evaluator, held_out
from jaggrl.infra import distributed
from jaggrl.infra.cli import hydra_door
from jaggrl.infra.logging import setup_logging
from jaggrl.prompts import load_prompts
from jaggrl.results import save_evaluation, save_samples

log = logging.getLogger(__name__)


@hydra_door("evaluate")
def main(cfg: DictConfig) -> int | None:
    """Load the weights, sample, score, print, write."""
    config = resolve(cfg)
    folder = export_folder(config["weights"])
    prompts = load_prompts(config["prompts"]["heldout"])
    settings = config["evaluation"]
    ranks = distributed.start(config["distributed"]["device"], config["distributed"]["timeout_s"])
    setup_logging(ranks.rank)
    try:
        policy = build_policy(config | {"lora": None, "checkpointing": False}, ranks, folder)
        names = {**config["reward"], "weights": dict.fromkeys(config["reward"]["eval"], 1.0)}
        scorers = build_scorers(config | {"reward": names}, ranks)
        evaluator = Evaluator(
            ranks,
            policy,
            scorers,
            held_out(prompts.prompts, settings["prompts"]),
            settings["steps"],
            settings["seed"],
            settings["micro_batch"],
            config["reward"]["batch_size"],
            settings["grid"],
        )
        evaluation = evaluator()
        if ranks.main:
            out = _output(config)
            meta = {
                "weights": str(folder) if folder else config["model"]["path"],
                "prompts_sha256": prompts.sha256,
                "n": len(evaluator.prompts),
                "cards": {name: vars(scorer.card) for name, scorer in scorers.items()},
                **settings,
            }
            file = save_evaluation(out, 0, evaluation, meta)
            save_samples(out, 0, evaluation)
            for name, value in evaluation.means().items():
                log.info("%-16s %.4f  (n %d)", name, value, int(evaluation.values[name].isfinite().sum()))
            log.info("written to %s", file)
    finally:
        distributed.stop()
    return None


def export_folder(weights: str | None) -> Path | None:
    """The export of a run folder, or the given export folder itself."""
    if weights is None:
        return None
    for folder in (Path(weights) / "export", Path(weights)):
        if (folder / "transformer").is_dir() or (folder / "pytorch_lora_weights.safetensors").is_file():
            return folder
    raise UserError(
        f"weights={weights} is no run folder with an export (is the run finished?) and no export folder"
    )


def _output(config: Config) -> Path:
    """One folder per evaluated model."""
    name = Path(config["weights"]).resolve().name if config["weights"] else "base"
    return Path(config["output"]) / name


if __name__ == "__main__":
    main()
