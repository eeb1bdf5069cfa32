"""The life of a training run: folder, resume, evaluation before and after, the loop, logs, checkpoints, results."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from jaggrl.build import Config, Plan, build_policy, build_scorers, build_trainer
from jaggrl.errors import UserError
from jaggrl.evaluation import Evaluation, Evaluator, held_out
from jaggrl.forecast import affordable, announcement, forecast
from jaggrl.infra.checkpoint import Checkpoints, step_of
from jaggrl.infra.distributed import Ranks, broadcast, largest
from jaggrl.infra.environment import git_commit
from jaggrl.infra.logging import MetricsLog, Progress, read_metrics
from jaggrl.infra.report import gains_table, stage_seconds, write_result
from jaggrl.infra.run_folder import config_hash
from jaggrl.infra.signals import Stopped, StopSignal
from jaggrl.infra.wandb_run import WandbRun, open_wandb
from jaggrl.models.export import export, load_training_state, training_state
from jaggrl.results import (
    compare_evaluations,
    draw_run,
    load_evaluation,
    look_back,
    save_evaluation,
    save_samples,
    take_baseline,
)
from jaggrl.selfcheck import findings, table

log = logging.getLogger(__name__)


class Session:
    """One training run in its folder. ``run`` returns the exit code of a stop, or None when the run is finished."""

    def __init__(self, config: Config, plan: Plan, ranks: Ranks, folder: Path, stop: StopSignal) -> None:
        self.config = config
        self.plan = plan
        self.ranks = ranks
        self.folder = folder
        self.stop = stop
        self.policy = build_policy(config, ranks)
        scorers = build_scorers(config, ranks)
        self.trainer = build_trainer(config, plan, ranks, self.policy, scorers, self._tick)
        settings = config["evaluation"]
        self.evaluator = Evaluator(
            ranks,
            self.policy,
            {
                name: scorers[name]
                for name in dict.fromkeys([*self.trainer.reward.weights, *config["reward"]["eval"]])
            },
            held_out(plan.heldout_prompts.prompts, settings["prompts"]),
            settings["steps"],
            settings["seed"],
            settings["micro_batch"],
            config["reward"]["batch_size"],
            settings["grid"],
            self._tick,
            settings["samples"],
        )
        self.checkpoints = Checkpoints(folder / "checkpoints", config["checkpoint"]["keep"])
        self.seconds = {"training": 0.0, "evaluation": 0.0}
        self.prediction = forecast(plan, self.trainer, config["checkpointing"])
        samples = plan.loop.prompts_per_rollout * plan.loop.group_size
        self.rollouts = affordable(
            config["rollouts"],
            config["budget"],
            samples,
            lambda rollout: forecast(plan, self.trainer, config["checkpointing"], rollout).total,
        )
        self._between = {"time/eval_s": 0.0, "time/save_s": 0.0}
        """Seconds beside the steps since the last line of metrics."""
        self._saved = 0
        """The step of the newest checkpoint."""
        self._version = self.policy.version
        """The policy's version when the present rollout, or evaluation, began."""

    @property
    def weights(self) -> str:
        """The weights that evaluation and export use."""
        return "ema" if self.config["ema_decay"] else "current"

    def run(self) -> int | None:
        """Train to the end, or to a stop request."""
        resumed = self._resume()
        for level, line in announcement(self.config, self.plan, self.trainer, self.prediction, self.rollouts):
            log.log(level, "%s", line)
        metrics_log = MetricsLog(self.folder, resumed) if self.ranks.main else None
        wandb = self._open_wandb() if self.ranks.main else WandbRun()
        progress = Progress(self.rollouts, self.trainer.steps_done) if self.ranks.main else None
        code: int | None = 1
        try:
            code = self._train(metrics_log, wandb, progress)
        finally:
            if progress is not None:
                progress.close()
            if metrics_log is not None:
                metrics_log.close()
            wandb.finish(code or 0)
        return code

    def _train(
        self, metrics_log: MetricsLog | None, wandb: WandbRun, progress: Progress | None
    ) -> int | None:
        """Before, rollouts, after, results; the exit code of a stop."""
        try:
            if self.trainer.steps_done == 0:
                self._baseline()
                self._evaluate(0, wandb)
            while self.trainer.steps_done < self.rollouts:
                self._step(metrics_log, wandb, progress)
                self._tick()
            final = self._evaluate(self.trainer.steps_done, wandb)
        except Stopped:
            self._save()
            log.warning(
                "stopped by %s after step %d; the same command goes on",
                self.stop.name,
                self.trainer.steps_done,
            )
            return self.stop.exit_code
        if progress is not None:
            progress.close()
        self._finish(final)
        return None

    def _tick(self, stage: str = "evaluation") -> None:
        """Between two forwards: when a rank was asked to stop all leave at once, unless weights have moved."""
        if self.policy.version == self._version:
            flag = torch.tensor(float(self.stop.requested), device=self.ranks.device)
            if largest(flag) > 0:
                raise Stopped

    def _step(self, metrics_log: MetricsLog | None, wandb: WandbRun, progress: Progress | None) -> None:
        """One rollout and its updates, and its trace."""
        begin = time.perf_counter()
        self._version = self.policy.version
        metrics = self.trainer.step()
        self._version = self.policy.version
        seconds = time.perf_counter() - begin
        self.seconds["training"] += seconds
        step = self.trainer.steps_done
        samples = self.plan.loop.prompts_per_rollout * self.plan.loop.group_size
        metrics |= {"time/step_s": seconds, "perf/images_per_s": samples / seconds}
        if self.ranks.device.type == "cuda":
            metrics["perf/peak_mem_gb"] = torch.cuda.max_memory_allocated() / 1e9
        if step == 1:
            self._self_check(metrics)
        every = self.config["evaluation"]["every"]
        try:
            if every and step % every == 0 and step < self.rollouts:
                means = self._evaluate(step, wandb).means()
                metrics |= {f"eval/{name}": value for name, value in means.items()}
        finally:  # a stop during the evaluation loses the evaluation, not the step
            if metrics_log is not None and progress is not None:
                metrics |= self._between
                self._between = dict.fromkeys(self._between, 0.0)
                metrics_log.write(step, metrics)
                wandb.log(step, metrics)
                shown = {"reward": metrics["reward/total/mean"], "grad": metrics["train/grad_norm"]}
                progress.step(step, seconds, shown)
        last = step == self.rollouts
        if last or step % self.config["checkpoint"]["every"] == 0:
            self._save()

    def _self_check(self, metrics: dict[str, float]) -> None:
        """Print the first rollout's table; ``check=error`` stops on a finding."""
        if self.config["check"] == "off":
            return
        found = findings(self.trainer, metrics)
        log.info("%s", table(found))
        bad = [f.name for f in found if not f.good]
        if bad and self.config["check"] == "error":
            raise UserError(f"check=error: {', '.join(bad)}; see the table above, or use check=warn")

    def _baseline(self) -> None:
        """Another run's evaluation of the untrained model, where ``evaluation.baseline`` names one."""
        source = self.config["evaluation"]["baseline"]
        if source is None:
            return
        problem = (
            take_baseline(Path(source), self.folder, self.evaluator.setting) if self.ranks.main else None
        )
        if problem := broadcast(problem):
            raise UserError(problem)

    def _evaluate(self, step: int, wandb: WandbRun) -> Evaluation:
        """Evaluate unless this run already did at this step (a resumed run keeps its 'before')."""
        known = load_evaluation(self.folder, step, self.evaluator.setting) if self.ranks.main else None
        if (known := broadcast(known)) is not None:
            return known
        begin = time.perf_counter()
        self._version = self.policy.version
        evaluation = self.evaluator(self.weights if step else "current")
        self.seconds["evaluation"] += time.perf_counter() - begin
        self._between["time/eval_s"] += time.perf_counter() - begin
        if self.ranks.main:
            meta = self.evaluator.setting | {"weights": self.weights if step else "current"}
            save_evaluation(self.folder, step, evaluation, meta)
            files = save_samples(self.folder, step, evaluation)
            wandb.log(step, {f"eval/{name}": value for name, value in evaluation.means().items()})
            wandb.images(step, "samples/eval", files, evaluation.captions)
            prompts = len(self.evaluator.prompts)
            scored = {name: int(v.isfinite().sum()) for name, v in evaluation.values.items()}
            told = "  ".join(
                f"{name} {value:.4f}" + (f" ({scored[name]} scored)" if scored[name] < prompts else "")
                for name, value in evaluation.means().items()
            )
            log.info("held-out at step %d (%d prompts): %s", step, prompts, told)
        return evaluation

    def _state(self) -> dict[str, Any]:
        return {
            **training_state(self.policy, self.trainer.optimizer),
            "trainer": self.trainer.state_dict(),
            "seconds": dict(self.seconds),
        }

    def _save(self) -> None:
        """A checkpoint of everything that the next process needs, unless it is there."""
        if self.trainer.steps_done != self._saved:
            begin = time.perf_counter()
            self.checkpoints.save(self.trainer.steps_done, self._state())
            self._between["time/save_s"] += time.perf_counter() - begin
            self._saved = self.trainer.steps_done

    def _resume(self) -> int | None:
        """Load the newest checkpoint; returns its step, or None at the beginning."""
        path = self.checkpoints.latest()
        self._saved = step_of(path) if path else 0
        known = look_back(self.folder, self._saved, self.evaluator.setting) if self.ranks.main else None
        if problem := broadcast(known):
            raise UserError(problem)
        state = self._state()
        if path is None:
            self.checkpoints.check_space(state)
            return None
        self.checkpoints.load(path, state)
        load_training_state(self.policy, self.trainer.optimizer, state)
        self.trainer.load_state_dict(state["trainer"])
        self.seconds.update(state["seconds"])
        log.info("resumed from %s", path)
        return self._saved

    def _open_wandb(self) -> WandbRun:
        settings = self.config["logger"]
        name = f"{self.folder.parent.name}/{self.folder.name}"
        told = {**self.config, "git": git_commit()}
        return open_wandb(settings["wandb"], settings["project"], settings["entity"], self.folder, name, told)

    def _finish(self, final: Evaluation) -> None:
        """Export, pictures, tables, result.json."""
        with self.policy.using(self.weights):
            snippet: Sequence[str] = export(self.policy, self.folder / "export", self.ranks.main)
        before = load_evaluation(self.folder, 0)
        if not self.ranks.main or before is None:
            return
        gains = compare_evaluations(before, final, self.trainer.reward.weights, self.config["seed"])
        rows = read_metrics(self.folder)
        facts = {
            "optimizer_updates": self.policy.version,
            "skipped_updates": self.trainer.skipped,
            "forward_equivalents": self.trainer.cost,
            "seconds": {**self.seconds, "stages": stage_seconds(rows)},
            "seed": self.config["seed"],
            "config_hash": config_hash(self.config),
        }
        write_result(self.folder, gains, facts)
        draw_run(self.folder, before, final)
        log.info("held-out prompts, before and after:\n%s", gains_table(gains))
        log.info(
            "pictures: before_after.png, curves.png, timing.png; numbers: result.json; all in %s", self.folder
        )
        log.info("load the trained model with diffusers:\n  %s", "\n  ".join(snippet))
