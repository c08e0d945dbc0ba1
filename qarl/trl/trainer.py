"""`QaRLTrainer`: TRL's `GRPOTrainer` on quantized rollouts, with QaRL's forward, publish, loss and checks.

    rollouts      `rollout_func` calls QaRL's vLLM in this process (`qarl.trl.rollouts`).
    log-probs     QaRL's quantized and aligned forward (`qarl.trl.log_probs`) replaces TRL's fused lm_head.
    turns         QaRL's engine samples them all, and TRL's tools or QaRL's environment answer (`qarl.trl.turns`).
    rewards       TRL computes them, and a response without a reward is an error (`qarl.trl.rollouts`).
    advantages    TRL's, but exactly 0 where rewards are equal (`qarl.trl.advantages`).
    loss          `compute_loss` calls TBPO, or one of TRL's losses.
    optimizer     `create_optimizer` returns AdamW with FP32 copies of the weights. TRL decides which parameters have
                  weight decay.
    adapters      `peft_config` gives the model QaRL's adapters (`qarl.trl.adapters`), and checkpoints have them alone.

Log-probs, calls of tools, rewards, advantages and checkpoints of adapters override private methods of TRL and
transformers, so TRL's version is pinned (`qarl.trl.checks`). TRL provides data, logs, checkpoints and `accelerate
launch`. To the standard deviation by which it divides rewards TRL adds 1e-4, and QaRL's local backend 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.trainer import TRAINING_ARGS_NAME
from trl import GRPOTrainer

from qarl.checkpoint.storage import write_json
from qarl.checks.bands import narrow_bands
from qarl.checks.model import level_notes
from qarl.checks.model_folder import load_hf_config
from qarl.checks.registry import make_checks
from qarl.console import note
from qarl.errors import UserError
from qarl.lora.adapter import write_adapter
from qarl.objectives.metrics import loss_statistics
from qarl.process import keep_freed_memory
from qarl.progress import live
from qarl.rollout.engine import RolloutEngine
from qarl.tbpo import TBPOConfig, tbpo_loss
from qarl.tbpo.reading import read
from qarl.trainer.policy import Policy
from qarl.trainer.prepare import engine_config
from qarl.trl.adapters import base_and_section, ignore_frozen, load_adapter
from qarl.trl.advantages import equal_responses
from qarl.trl.arguments import columns_of
from qarl.trl.checks import (
    FILE,
    check_adapter_args,
    check_args,
    check_resume,
    check_room,
    inputs_of,
    settings_of,
)
from qarl.trl.config import QaRLConfig, in_trls_words, run_config, trls_words
from qarl.trl.loading import check_unquantized, load_policy, model_folder, quantized
from qarl.trl.log_probs import as_batch, log_probs_of_rows, sampled_mask
from qarl.trl.metrics import StepMetrics
from qarl.trl.optimizer import MasterAdamW
from qarl.trl.rollouts import Rollouts, check_scored, checked_functions, longest_prompt
from qarl.trl.turn_checks import check_given, check_reward_source, prompt_template, try_turns
from qarl.trl.turns import Given, Turns
from qarl.turns.conversation import Span, spans_of


class QaRLTrainer(GRPOTrainer):
    """`policy`: the quantized model. `engine`: the rollout engine. `run`: QaRL's config of this run."""

    args: Any
    optimizer: Any
    rollouts: Rollouts
    rows: list[dict[str, Any]]
    """The batch's rows of the dataset, while it is sampled."""

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: Any = None,
        args: QaRLConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        environment: str | Callable[..., Any] | None = None,
        **arguments: Any,
    ) -> None:
        """Take the arguments of `GRPOTrainer`. `model`: a folder or name, or a causal LM loaded from one.

        `environment`: a function that answers the model's turns, or its name (docs/do/turns.md).

        Raises:
            UserError: a setting, the model or this machine is not supported. This is raised before an engine starts.
        """
        check_args(args, arguments)
        assert args is not None
        if not args.disable_tqdm:
            live.lines_only()  # TRL has a bar of its own on the terminal
        given = Given.of(environment, arguments)
        check_given(given, args, train_dataset)
        check_reward_source(reward_funcs, given, columns_of(train_dataset))
        start = TemporaryDirectory()
        model, lora = base_and_section(model, arguments.pop("peft_config", None), start.name)
        if lora:
            check_adapter_args(args, begun="path" in lora)
        folder = model_folder(model)
        how: dict[str, Any] = {"lora": lora, "environment": given.spec}
        self.run = run_config(args, folder, max_prompt_length=1, **how)
        path, trusted = self.run.model.path, self.run.model.trust_remote_code
        check_unquantized(model, in_trls_words(lambda: load_hf_config(path, trusted)))
        answers = given.answers(self.run)
        tokenizer = (
            processing_class or in_trls_words(lambda: make_checks(self.run, data=False)).tokenizer
        )
        if isinstance(tokenizer, str):
            fix = "pass AutoTokenizer.from_pretrained(FOLDER), or leave it out"
            what = "processing_class is text, not a tokenizer"
            raise UserError(what, where="processing_class", fix=fix)
        template = prompt_template(given, tokenizer)
        known = () if given.factory is not None else (train_dataset, eval_dataset)
        length = longest_prompt(args, tokenizer, *known, template=template)
        self.run = run_config(args, folder, max_prompt_length=length, **how)
        inputs = in_trls_words(lambda: make_checks(self.run, data=False))
        check_room(args, self.run, inputs)
        functions = checked_functions(reward_funcs, args, tokenizer)
        self.policy = load_policy(model, self.run)
        start.cleanup()
        if self.policy.adapters is not None:
            ignore_frozen(self.policy.model)
        read = inputs_of(inputs.hf_config, tokenizer, folder, reward_funcs, given)
        adapter = self.run.lora.model_dump(exclude={"path"})
        self._settings = settings_of(args, self.policy, adapter, read)
        self.reference: Policy | None = None
        self.tbpo = TBPOConfig.of(args)
        self._spans: list[list[Span]] | None = None
        super().__init__(
            self.policy.model,
            functions,
            args,
            train_dataset,
            eval_dataset,
            tokenizer,
            rollout_func=lambda prompts, _: self._roll_out(prompts),
            **arguments,
        )
        if self.aux_loss_enabled:
            what = "QaRLTrainer does not add the routers' auxiliary loss"
            where = "router_aux_loss_coef"
            why = "this loss needs the routers' logits, which QaRL's forward does not return"
            raise UserError(what, where=where, why=why, fix="set router_aux_loss_coef=0")
        if self.ref_model is not None:
            self.reference = quantized(self.ref_model, self.run)
        self._step_metrics = StepMetrics(self.run, self.policy, self.accelerator)
        if self.policy.device.type == "cpu":
            keep_freed_memory()
        print(trls_words(self.policy.report))
        for text in level_notes(self.run, inputs.hf_config):
            note(trls_words(text))
        if self.loss_type == "tbpo" and (narrow := narrow_bands(self.run)):
            note(trls_words(f"{narrow.what}; {narrow.fix}"))
        turns = Turns.of(given, answers, self, self.run, self.policy, reward_funcs)
        try_turns(turns, self)
        self.engine = RolloutEngine(engine_config(self.run, self.policy))
        self.rollouts = Rollouts(self.policy, self.engine, turns)

    @property
    def _is_first(self) -> bool:
        """Whether no update has been made since the responses were sampled."""
        return bool(self.state.global_step == self._sampled_at)

    @property
    def _in_sessions(self) -> bool:
        """Whether the engine keeps a conversation's keys and values from turn to turn, which the forward follows."""
        turns = self.rollouts.turns
        return turns is not None and turns.conversations.sessions is not None

    @property
    def training(self) -> bool:
        """Whether this is a training step and not an evaluation."""
        return bool(self.policy.model.training)

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *more: Any, **named: Any
    ) -> Any:
        """Train as `GRPOTrainer` does. Raise UserError if the checkpoint's run was quantized differently."""
        check_resume(resume_from_checkpoint, self.args, self._settings)
        return super().train(resume_from_checkpoint, *more, **named)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            write_json(Path(output_dir or self.args.output_dir) / FILE, self._settings)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if self.policy.adapters is None:
            super()._save(output_dir, state_dict)
            return
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        write_adapter(folder, self.policy.adapters.adapter())
        self.processing_class.save_pretrained(folder)
        torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self.policy.adapters is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            load_adapter(self.policy, resume_from_checkpoint)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer | None = self.optimizer
        if optimizer is None:
            trained = self.policy.model
            args = self.args
            optimizer = self.optimizer = MasterAdamW(
                trained.named_parameters(),
                decayed=self.get_decay_parameter_names(trained),
                keep_masters=args.master_dtype == "fp32",
                sum_in_fp32=self.accelerator.num_processes == 1,
                lr=args.learning_rate,
                betas=(args.adam_beta1, args.adam_beta2),
                eps=args.adam_epsilon,
                weight_decay=args.weight_decay,
                seed=args.seed,
            )
        return optimizer

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> torch.Tensor:
        mask = sampled_mask(inputs)
        self._spans = [spans_of(row) for row in mask.tolist()] if self._in_sessions else None
        if self.training and self.state.global_step == 0:
            self._step_metrics.check_noise_once(model, inputs, mask, self._spans)
        if self.loss_type == "tbpo":
            loss = self._tbpo_loss(model, inputs)
        else:
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self.training:
            old = inputs.get("old_per_token_logps")
            old = self._log_probs if old is None else old
            rollout = inputs["sampling_per_token_logps"]
            if self.loss_type != "tbpo":
                keep = mask != 0
                statistics = loss_statistics(
                    self._log_probs, old, old, rollout, inputs["advantages"], keep, {}
                )
                self._step_metrics.add(*read([statistics]), first=self._is_first)
            self._step_metrics.compare(old, rollout, mask, trained=self.state.global_step > 0)
        return loss

    def _tbpo_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """Return TBPO's loss of a micro-batch. It is scaled so that accelerate's result (the sum over micro-batches,
        averaged over processes) is the mean over all responses of an optimizer step."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        mask = sampled_mask(inputs)
        log_probs, entropies, _ = self._get_per_token_logps_and_entropies(
            model, ids, attention_mask, mask.shape[1], compute_entropy=True
        )
        old = inputs.get("old_per_token_logps")
        steps = self.current_gradient_accumulation_steps if self.training else 1
        loss, statistics = tbpo_loss(
            log_probs,
            log_probs.detach() if old is None else old,
            inputs["sampling_per_token_logps"],
            inputs["advantages"],
            mask,
            self.tbpo,
            global_batch_size=len(ids) * steps,
        )
        if self.training:
            self._step_metrics.add(statistics, first=self._is_first)
        assert entropies is not None
        entropy = (entropies * mask).sum() / mask.sum().clamp(min=1)
        mode = "train" if self.training else "eval"
        self._metrics[mode]["entropy"].append(
            self.accelerator.gather(entropy.detach()).nanmean().item()
        )
        return loss

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        """Return log-probs and entropies from QaRL's forward, in the format of TRL's method.

        `model`: the policy's model, DDP's wrapper around it, or the reference model."""
        is_reference = self.reference is not None and model is self.ref_model
        policy = self.reference if is_reference else self.policy
        assert policy is not None
        policy.called = model
        batch = as_batch(input_ids, attention_mask, logits_to_keep, self._spans)
        parts = batch.micro_batches(batch_size or len(batch))
        gradient = self._entropy_bonus_enabled
        how = {
            "temperature": self.temperature,
            "entropies": compute_entropy,
            "entropy_gradient": gradient,
        }
        outputs = [log_probs_of_rows(policy, batch, rows, **how) for rows in parts]
        log_probs = torch.cat([part for part, _ in outputs])
        if not is_reference:
            self._log_probs = log_probs.detach()
        entropies = (
            torch.cat([part for _, part in outputs if part is not None])
            if compute_entropy
            else None
        )
        return log_probs, entropies, None

    def _roll_out(self, prompts: list[Any]) -> dict[str, Any]:
        output = self.rollouts(prompts, self)
        turns = self.rollouts.turns
        if turns is not None and self._in_sessions:
            self._spans = [conversation.turns for conversation in turns.held]
        return output

    def _tool_call_loop(self, *batch: Any) -> tuple[Any, ...]:
        """Return what TRL's loop returns, of the conversations that `rollout_func` has held. It calls no tool."""
        turns = self.rollouts.turns
        assert turns is not None and turns.tools is not None
        _, _, completion_ids, _, log_probs, *_ = batch
        counts = (turns.tools.calls, turns.tools.failures)
        images: list[list[Any]] = [[] for _ in completion_ids]
        return turns.masks, turns.completions, completion_ids, log_probs, *counts, images

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> torch.Tensor:
        if self.rollouts.turns is not None:
            completions[:] = self.rollouts.turns.completions
        rewards: torch.Tensor = super()._calculate_rewards(
            inputs, prompts, completions, completion_ids_list
        )
        check_scored(rewards, self.reward_func_names, prompts, self.state.global_step)
        self._rewards = rewards
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        self.rows = inputs
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        self._sampled_at = self.state.global_step
        group = self.num_generations if self.training else self.num_generations_eval
        equal = equal_responses(
            self._rewards, self.reward_weights, group, self.multi_objective_aggregation
        )
        own = equal.view(self.accelerator.num_processes, -1)[self.accelerator.process_index]
        output["advantages"] = output["advantages"].masked_fill(own, 0.0)
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.training:
            report = self.rollouts.report
            self.rollouts.report = None
            for name, value in self._step_metrics.take(report).items():
                self._metrics["train"][name] = [value]
        super().log(logs, start_time)

    def save_quantized(self, folder: str) -> None:
        """Write the model in compressed-tensors format, which vLLM can load. An adapter is beside it, in the folder
        `adapter`. Call this in only one process."""
        self.policy.save(Path(folder), self.processing_class)
