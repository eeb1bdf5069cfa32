"""The training door: ``python -m jaggrl.train``, plainly, under torchrun, or with ``-m`` as a sweep."""

from omegaconf import DictConfig

from jaggrl.infra.cli import hydra_door


@hydra_door("train")
def main(cfg: DictConfig) -> int | None:
    """One training job; imported only now, so that a misspelt command line need not wait for torch."""
    from jaggrl.job import run

    return run(cfg)


if __name__ == "__main__":
    main()
