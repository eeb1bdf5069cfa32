"""Run under torchrun by test_routing.py: 200 sharded updates under route=auto, own samples per rank."""

import json
import sys
from pathlib import Path

from jaggrl.infra.distributed import shard, start, stop
from jaggrl.models.policy import Policy, make_trainable
from jaggrl.trajectory import Trajectory
from tests.backward.test_routing import auto_trainer
from tests.toys import ToyModel


def main(out: Path) -> None:
    ranks = start("cpu")
    model = ToyModel()
    make_trainable(model, None, checkpointing=False)
    shard(model.network, model.blocks(), ranks, "fp32")
    policy = Policy(model, None, "fp32", ranks.device)
    # the toy's cosines lie around this threshold, so that routes change
    trainer = auto_trainer(ranks, policy, threshold=0.97, hysteresis=0.005, windows=[3, 4, 7], climb=0.9)
    decisions, rewards, sample = [], [], trainer.sample

    def noted() -> Trajectory:
        trajectory = sample()
        rewards.append(float(trajectory.media_B.mean()))
        return trajectory

    trainer.sample = noted
    for _ in range(100):
        metrics = trainer.step()
        told = {k: v for k, v in metrics.items() if k.startswith("backward/")}
        decisions.append([told[k] for k in sorted(told)])
    (out / f"{ranks.rank}.json").write_text(
        json.dumps(
            {
                "decisions": decisions,
                "rewards": rewards,
                "updates": trainer.policy.version,
                "share": metrics["backward/probe_share"],
            }
        )
    )
    stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
