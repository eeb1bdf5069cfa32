"""The evaluation door: ``python -m jaggrl.evaluate weights=<run folder>`` prints the table and writes it as JSON."""

import logging
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from jaggrl.build import Config, build_policy, build_scorers, check_evaluation, resolve
from jaggrl.errors import UserError
from jaggrl.evaluation import Evaluator, held_out
from jaggrl.infra import distributed
from jaggrl.infra.cli import hydra_door
from jaggrl.infra.logging import setup_logging
from jaggrl.results import save_evaluation, save_samples

log = logging.getLogger(__name__)


@hydra_door("evaluate")
def main(cfg: DictConfig) -> int | None:
    """Load the weights, sample, score, print, write."""
    config = _only_measuring(resolve(cfg))
    folder = export_folder(config["weights"])
    if folder is not None:
        compare_with_run(config, folder)
    prompts = check_evaluation(config)
    settings = config["evaluation"]
    with distributed.joined(config["distributed"]["device"], config["distributed"]["timeout_s"]) as ranks:
        setup_logging(ranks.rank)
        policy = build_policy(config, ranks, folder)
        scorers = build_scorers(config, ranks)
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
            samples=settings["samples"],
        )
        evaluation = evaluator()
        if ranks.main:
            out = _output(config)
            meta = {
                "weights": str(folder) if folder else config["model"]["path"],
                **evaluator.setting,
            }
            file = save_evaluation(out, 0, evaluation, meta)
            save_samples(out, 0, evaluation)
            for name, value in evaluation.means().items():
                log.info("%-16s %.4f  (n %d)", name, value, int(evaluation.values[name].isfinite().sum()))
            log.info("written to %s", file)
    return None


def _only_measuring(config: Config) -> Config:
    """The config with what a training run has besides: no adapter to train, every reward of ``reward.eval`` used."""
    names = config["reward"]["eval"] or []
    if not names:
        raise UserError(
            "reward.eval is empty and nothing would be measured: name rewards, as in reward.eval=[hpsv2]"
        )
    reward = config["reward"] | {"weights": dict.fromkeys(names, 1.0)}
    return config | {"lora": None, "checkpointing": False, "reward": reward}


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


def compare_with_run(config: Config, folder: Path) -> None:
    """Refuse another model than the run's, where the export lies in its run folder; tell other settings."""
    file = folder.parent / "config.resolved.yaml"
    if not file.is_file():
        return
    run = OmegaConf.to_container(OmegaConf.load(file))
    assert isinstance(run, dict)
    for key, value in run["model"].items():
        if key != "scorers" and config["model"].get(key) != value:
            raise UserError(
                f"{folder} was trained with model.{key}={value}, not {config['model'].get(key)}: give that"
            )
    mine = config["evaluation"] | {"precision": config["precision"], "heldout": config["prompts"]["heldout"]}
    theirs = run["evaluation"] | {"precision": run["precision"], "heldout": run["prompts"]["heldout"]}
    other = [
        f"{key}={value} (there {theirs.get(key)})" for key, value in mine.items() if theirs.get(key) != value
    ]
    if other:
        log.warning("not the evaluation of the run itself: %s", ", ".join(other))


def _output(config: Config) -> Path:
    """One folder per evaluated model: of a run, by experiment and overrides."""
    if not config["weights"]:
        return Path(config["output"]) / "base" / Path(config["model"]["path"]).name
    folder = Path(config["weights"]).resolve()
    run = folder.parent if folder.name == "export" else folder
    return Path(config["output"]) / run.parent.name / run.name


if __name__ == "__main__":
    main()
