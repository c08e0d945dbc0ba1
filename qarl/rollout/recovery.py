"""Publish and sample in spite of failures, so that the trainer's steps contain no error handling."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

from qarl.lora.adapter import Adapter
from qarl.rollout import engine_config
from qarl.rollout.engine import EngineFailed, RolloutBatch, RolloutEngine
from qarl.rollout.engine_config import SamplingConfig
from qarl.rollout.publish.manifest import PublishReport
from qarl.rollout.publish.writers import ReloadFailed, TensorsMoved


class EngineRecovery:
    """Publishes and samples with `engine`, and replaces it if it is lost (`rollout.rebuild_on_failure`).

    `rebuilds`: number of engines that were started to replace a lost engine."""

    def __init__(self, engine: RolloutEngine, *, rebuild_on_failure: bool) -> None:
        self.engine = engine
        self.rebuild_on_failure = rebuild_on_failure
        self.rebuilds = 0

    def publish_adapter(
        self, publish_base: Callable[[], PublishReport], adapter: Adapter, *, version: int
    ) -> PublishReport:
        """Publish an adapter, after its base if the engine does not have it. If the engine is lost, replace it once.

        The report has the bytes of everything that was published."""

        def send() -> PublishReport:
            sent = None if self.engine.has_weights else publish_base()
            report = self.engine.publish_adapter(adapter, version=version)
            if sent is None:
                return report
            seconds = {
                name: sent.seconds.get(name, 0.0) + value for name, value in report.seconds.items()
            }
            return replace(sent, bytes=sent.bytes + report.bytes, seconds=sent.seconds | seconds)

        return self.rebuilding_if_lost(send)

    def rebuilding_if_lost(self, publish: Callable[[], PublishReport]) -> PublishReport:
        """Return the report of `publish()`. If the engine is lost and may be replaced, start a new engine and call it
        again, unless the new engine would have the same fault."""
        try:
            return publish()
        except TensorsMoved:
            raise
        except ReloadFailed as error:
            self._rebuild(error)
        return publish()

    def generate(
        self,
        prompts: list[list[int]],
        sampling: SamplingConfig,
        seeds: list[int] | None,
        *,
        publish: Callable[[], object],
    ) -> RolloutBatch:
        """Call `RolloutEngine.generate`. If the engine is lost, replace it, call `publish` and try once more."""
        try:
            return self.engine.generate(prompts, sampling, seeds)
        except EngineFailed as error:
            self._rebuild(error)
            publish()
            return self.engine.generate(prompts, sampling, seeds)

    def sleep(self) -> None:
        """Call `RolloutEngine.sleep`. If that breaks an engine that may be replaced, only warn. The next publish then
        starts a new engine."""
        try:
            self.engine.sleep()
        except EngineFailed as error:
            if not self.rebuild_on_failure:
                raise
            print(
                f"warning: {error}\n  the next publish restarts the rollout engine", file=sys.stderr
            )

    def _rebuild(self, error: Exception) -> None:
        """Replace a lost engine with a new one. Raise `error` if it may not be replaced."""
        if not self.rebuild_on_failure:
            raise error
        print(f"warning: {error}\n  the rollout engine is restarted", file=sys.stderr)
        engine_config.drop_frames(error)
        self.engine.rebuild()
        self.rebuilds += 1
