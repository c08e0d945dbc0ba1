"""verl's vLLM server, for engines with adapters: each request names the adapter that was published last.

verl's own server always asks for an adapter with the same name and id, and generates without one if the engine has
none. Here the server asks the engine's worker before each request which adapter it has
(`QaRLWorkerExtension.qarl_adapter`), and a request to an engine without a current one raises. Each version has a name
and an id of its own, so vLLM cannot reuse a cached prefix of an older one.

Only requests through the server's `generate`, which verl's agent loop calls, carry the adapter. The server's HTTP
endpoint has the client of vLLM itself, so it serves the base without the adapter.

`RolloutReplicaRegistry.register` is verl's extension point. Engines without adapters get verl's own server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from verl.workers.rollout.replica import RolloutReplicaRegistry

from qarl.errors import UserError
from qarl.rollout.publish.adapters import adapter_request


class AdaptedClient:
    """vLLM's engine client of a server. Everything but the methods here is the client's own."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def generate(self, *, lora_request: Any = None, **arguments: Any) -> AsyncIterator[Any]:
        """Generate with the engine's adapter. Raise UserError if it has no current one."""
        async for output in self._client.generate(lora_request=await self._adapter(), **arguments):
            yield output

    async def _adapter(self) -> Any:
        for answer in await self._client.collective_rpc("qarl_adapter"):
            if isinstance(answer, str):
                what = "the rollout engine refuses to generate"
                fix = "see the error of the last publish"
                raise UserError(what, why=answer, fix=fix)
        return adapter_request(*answer)


def load_replica() -> type[Any]:
    """Return verl's class of replicas of vLLM servers, which starts the server of this module if it is needed."""
    import ray
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

    class AdapterServer(vLLMHttpServer):
        engine: Any

        async def run_server(self, args: Any) -> None:
            await super().run_server(args)
            self.engine = AdaptedClient(self.engine)

        def _resolve_sleep_level(self) -> int:
            """Return 1: the engine's weights wait in host memory, and a publish after the sleep is the adapter alone.
            At level 2, verl's choice for weights that it publishes whole, the base would be lost."""
            return 1

        async def qarl_has_base(self) -> bool:
            """Return whether the engine has the weights that adapters are added to."""
            return all(await self.engine.collective_rpc("qarl_has_base"))

    class QaRLReplica(vLLMReplica):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            vllm = (self.config.engine_kwargs or {}).get("vllm") or {}
            if vllm.get("enable_lora") and str(vllm.get("worker_extension_cls")).startswith(
                "qarl."
            ):
                self.server_class = ray.remote(AdapterServer)

    return QaRLReplica


RolloutReplicaRegistry.register("vllm", load_replica)
