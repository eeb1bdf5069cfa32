"""A door that does nothing but what its config says: fail, sleep, stop on a signal."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from jaggrl.errors import UserError
from jaggrl.infra.cli import hydra_door, task_overrides
from jaggrl.infra.run_folder import decide
from jaggrl.infra.signals import StopSignal


@dataclass
class Size:
    width: int | str


@hydra_door("train", Path(os.environ.get("TOY_CONF", "conf")).absolute())
def main(cfg: DictConfig) -> int | None:
    rank = os.environ.get("RANK", "0")
    print(f"rank {rank} runs {task_overrides()} pid {os.getpid()} steps {cfg.steps}", flush=True)
    if cfg.fail == "user":
        raise UserError("this value\n  cannot work: use another")
    if cfg.fail == "bug":
        raise RuntimeError("boom")
    if rank != "0":
        return None
    config = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(config, dict)
    run = decide(Path("outputs"), "toy", task_overrides(), config, "code", cfg.resume)  # type: ignore[arg-type]
    print(run.reason, flush=True)
    with StopSignal() as stop:
        until = time.monotonic() + cfg.sleep
        while time.monotonic() < until and not stop.requested:
            time.sleep(0.02)
        run.close("stopped" if stop.requested else "finished")
        return stop.exit_code if stop.requested else None


if __name__ == "__main__":
    main()
