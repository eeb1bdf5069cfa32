"""Run under torchrun by test_routing.py: 200 sharded updates under route=auto, own samples per rank."""

import json
import sys
from pathlib import Path

from jaggrl.infra.distributed import shard, start, stop
from tests.backward.test_routing import auto_trainer
from tests.toys import toy_policy


def main(out: Path) -> None:
    ranks = start("cpu")
    policy = toy_policy()
    shard(policy.model.network, policy.model.blocks(), ranks, "fp32")
    # the toy's cosines lie around this threshold, so that routes change
    trainer = auto_trainer(ranks, policy, threshold=0.97, hysteresis=0.005, windows=[3, 4, 7], climb=0.9)
    decisions, rewards = [], []
    for _ in range(100):
        metrics = trainer.step()
        told = {k: v for k, v in metrics.items() if k.startswith("backward/")}
        decisions.append([told[k] for k in sorted(told)])
        rewards.append(float(trainer.last.trajectory.media_B.mean()))
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
