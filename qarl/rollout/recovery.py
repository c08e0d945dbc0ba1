"""An engine that publishes and samples in spite of failures, so that the trainer's steps contain no error handling."""

from __future__ import annotations

from collections.abc import Sequence

from qarl.console import say
from qarl.rollout import engine_config
from qarl.rollout.engine import EngineFailed, RolloutEngine, WeightSource
from qarl.rollout.engine_config import EngineConfig, SamplingConfig
from qarl.rollout.publish.manifest import PublishReport
from qarl.rollout.publish.writers import ReloadFailed, TensorsMoved
from qarl.rollout.requests import RolloutBatch
from qarl.rollout.sessions import Run, whole_requests


class RecoveringEngine(RolloutEngine):
    """A `RolloutEngine` that replaces vLLM if it is lost, and gives the new one the weights of the last publish."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._last_publish: tuple[WeightSource, int] | None = None

    def publish_from(self, source: WeightSource, *, version: int) -> PublishReport:
        """Publish as `RolloutEngine` does. If vLLM is lost, replace it and publish once more, unless the new one would
        have the same fault."""
        self._last_publish = (source, version)
        try:
            return source(self, version=version)
        except TensorsMoved:
            raise
        except ReloadFailed as error:
            self._replace_vllm(error)
        return source(self, version=version)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        seeds: Sequence[int] | None = None,
        *,
        max_tokens: Sequence[int] | None = None,
        run: Run = whole_requests,
    ) -> RolloutBatch:
        """Sample as `RolloutEngine` does. If vLLM is lost, replace it, publish the weights again and try once more.

        Sessions are lost with vLLM, so a turn of one is not tried again."""
        try:
            return super().generate(prompts, sampling, seeds, max_tokens=max_tokens, run=run)
        except EngineFailed as error:
            if run is not whole_requests:
                raise
            self._replace_vllm(error)
        if self._last_publish is not None:
            source, version = self._last_publish
            self.publish_from(source, version=version)
        return super().generate(prompts, sampling, seeds, max_tokens=max_tokens, run=run)

    def sleep(self) -> None:
        """Sleep as `RolloutEngine` does. If that breaks vLLM, only warn. The next publish then starts a new one."""
        try:
            super().sleep()
        except EngineFailed as error:
            say(f"warning: {error}\n  the next publish restarts the rollout engine")

    def _replace_vllm(self, error: Exception) -> None:
        """Start a new vLLM in the place of a lost one."""
        say(f"warning: {error}\n  the rollout engine is restarted")
        engine_config.drop_frames(error)
        self.rebuild()
        self.rebuilds += 1
