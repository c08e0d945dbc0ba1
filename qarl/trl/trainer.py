"""`QaRLTrainer`: TRL's `GRPOTrainer` on quantized rollouts, with QaRL's forward, publish, loss and checks.

    rollouts      `rollout_func` calls QaRL's vLLM in this process (`qarl.trl.rollouts`).
    log-probs     QaRL's quantized and aligned forward (`qarl.trl.log_probs`) replaces TRL's fused lm_head.
    rewards       TRL computes them, and a response without a reward is an error (`qarl.trl.rollouts`).
    advantages    TRL's, but exactly 0 where rewards are equal (`qarl.trl.advantages`).
    loss          `compute_loss` calls TBPO, or one of TRL's losses.
    optimizer     `create_optimizer` returns AdamW with FP32 copies of the weights. TRL decides which parameters have
                  weight decay.
    adapters      `peft_config` gives the model QaRL's adapters (`qarl.trl.adapters`), and checkpoints have them alone.

Log-probs, rewards, advantages and checkpoints of adapters override private methods of TRL and transformers, so TRL's
version is pinned (`qarl.trl.checks`). TRL provides data, logs, checkpoints and `accelerate launch`. To the standard
deviation by which it divides rewards TRL adds 1e-4, and QaRL's local backend 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.trainer import TRAINING_ARGS_NAME
from trl import GRPOTrainer

from qarl.checkpoint.storage import write_json
from qarl.checks.bands import narrow_bands
from qarl.checks.model import level_notes
from qarl.checks.registry import make_checks
from qarl.config import Config
from qarl.console import note
from qarl.errors import UserError
from qarl.lora.adapter import write_adapter
from qarl.lora.layers import Adapters
from qarl.objectives.metrics import loss_statistics
from qarl.optim.muon_adamw import MuonAdamW
from qarl.process import keep_freed_memory
from qarl.progress import live
from qarl.quant.experts import stacked_experts
from qarl.rollout.engine import RolloutEngine
from qarl.schemes import get_scheme
from qarl.tbpo import TBPOConfig, tbpo_loss
from qarl.tbpo.reading import read
from qarl.trainer.master_optimizer import write_back
from qarl.trainer.policy import Policy, adapters_of
from qarl.trainer.prepare import engine_config
from qarl.trl.adapters import ignore_frozen, load_adapter, lora_section
from qarl.trl.advantages import equal_responses
from qarl.trl.arguments import check_rewards, columns_of
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
from qarl.trl.log_probs import as_batch, log_probs_of_rows
from qarl.trl.metrics import StepMetrics
from qarl.trl.rollouts import Rollouts, check_scored, checked_functions, longest_prompt


class QaRLTrainer(GRPOTrainer):
    """`policy`: the quantized model. `engine`: the rollout engine. `run`: QaRL's config of this run."""

    args: Any
    optimizer: Any
    rollouts: Rollouts

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: Any = None,
        args: QaRLConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        **arguments: Any,
    ) -> None:
        """Take the arguments of `GRPOTrainer`. `model`: a folder or name, or a causal LM loaded from one.

        Raises:
            UserError: a setting, the model or this machine is not supported. This is raised before an engine starts.
        """
        check_args(args, arguments)
        assert args is not None
        if not args.disable_tqdm:
            live.lines_only()  # TRL has a bar of its own on the terminal
        check_rewards(reward_funcs, columns_of(train_dataset))
        lora = lora_section(arguments.pop("peft_config", None), model)
        if lora:
            check_adapter_args(args)
        folder = model_folder(model)
        self.run = run_config(args, folder, max_prompt_length=1, lora=lora)
        tokenizer = (
            processing_class or in_trls_words(lambda: make_checks(self.run, data=False)).tokenizer
        )
        if isinstance(tokenizer, str):
            fix = "pass AutoTokenizer.from_pretrained(FOLDER), or leave it out"
            what = "processing_class is text, not a tokenizer"
            raise UserError(what, where="processing_class", fix=fix)
        length = longest_prompt(args, tokenizer, train_dataset, eval_dataset)
        self.run = run_config(args, folder, max_prompt_length=length, lora=lora)
        inputs = in_trls_words(lambda: make_checks(self.run, data=False))
        check_room(args, self.run, inputs)
        functions = checked_functions(reward_funcs, args)
        self.policy = load_policy(model, self.run)
        if self.policy.adapters is not None:
            ignore_frozen(self.policy.model)
        read = inputs_of(inputs.hf_config, tokenizer, folder, reward_funcs)
        self._settings = settings_of(args, self.policy, lora, read)
        self.reference: Policy | None = None
        self.tbpo = TBPOConfig.of(args)
        super().__init__(
            self.policy.model,
            functions,
            args,
            train_dataset,
            eval_dataset,
            tokenizer,
            rollout_func=lambda prompts, trainer: self.rollouts(prompts, trainer),
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
        self.engine = RolloutEngine(engine_config(self.run, self.policy))
        self.rollouts = Rollouts(self.policy, self.engine)

    @property
    def _is_first(self) -> bool:
        """Whether no update has been made since the responses were sampled."""
        return bool(self.state.global_step == self._sampled_at)

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
        if self.training and self.state.global_step == 0:
            self._step_metrics.check_noise_once(model, inputs)
        if self.loss_type == "tbpo":
            loss = self._tbpo_loss(model, inputs)
        else:
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self.training:
            old = inputs.get("old_per_token_logps")
            mask = inputs["completion_mask"]
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
        mask = inputs["completion_mask"]
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
        batch = as_batch(input_ids, attention_mask, logits_to_keep)
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

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> torch.Tensor:
        rewards: torch.Tensor = super()._calculate_rewards(
            inputs, prompts, completions, completion_ids_list
        )
        check_scored(rewards, self.reward_func_names, prompts, self.state.global_step)
        self._rewards = rewards
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
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


def model_folder(model: str | PreTrainedModel) -> str:
    """Return the folder or name from which the engine reads config and tokenizer."""
    if isinstance(model, str):
        return model
    if not (folder := getattr(model.config, "_name_or_path", "")):
        why = "vLLM reads the model's config and tokenizer from a folder"
        fix = "save model and tokenizer to a folder, and pass that folder"
        raise UserError(
            "the model was not loaded from a checkpoint", where="model", why=why, fix=fix
        )
    return str(folder)


def load_policy(model: str | PreTrainedModel, config: Config) -> Policy:
    """Return the quantized policy. A model that is already loaded is quantized in place.

    Raises:
        UserError: a loaded model is quantized already, or not BF16.
    """
    if isinstance(model, str):
        return Policy.load(config)
    if getattr(model, "is_quantized", False):
        raise UserError(
            "the model is quantized already",
            where="model",
            why="training updates BF16 weights and quantizes them itself",
            fix="load the original BF16 checkpoint; quant_scheme says how training quantizes it",
        )
    if model.dtype != torch.bfloat16:
        why = "vLLM computes in BF16, and the trainer must round in the same way"
        fix = "load it with dtype=torch.bfloat16, or pass its folder; the optimizer keeps FP32 copies of the weights"
        raise UserError(
            f"the model is {model.dtype}, but QaRL trains BF16 models",
            where="model",
            why=why,
            fix=fix,
        )
    return quantized(model, config, adapters_of(config))


def quantized(
    model: Any, config: Config, adapters: Callable[[torch.nn.Module], Adapters] | None = None
) -> Policy:
    """Quantize and align a loaded model in place, as `Policy.load` does. `adapters`: those of `Policy`."""
    model.set_attn_implementation("sdpa")
    model.config.attention_dropout = 0.0
    quant = config.quant
    return Policy(
        model,
        get_scheme(quant.scheme, group_size=quant.group_size),
        tuple(quant.ignore),
        align=quant.align,
        router_replay="off" if stacked_experts(model) else "auto",
        kernels=quant.kernels,
        eager=config.rollout.enforce_eager is True,
        adapters=adapters,
        device=torch.device(
            "cuda" if torch.cuda.is_available() else "cpu"
        ),  # before accelerate moves it
    )


class MasterAdamW(MuonAdamW):
    """AdamW on FP32 copies of BF16 parameters. After a step, each parameter is its FP32 copy, rounded to nearest.

    The copies are part of `state_dict`, so TRL's own checkpoints contain them and a run resumes bit for bit. With
    `master_dtype=bf16` there are no copies, and updates are rounded stochastically (`qarl.optim`).

    In a single process, autograd sums the gradients of all micro-batches in FP32 (`Tensor.grad_dtype`). With several
    processes they are summed in BF16, as TRL does for any BF16 model, because DistributedDataParallel reduces gradients
    in the dtype of the weights.

    `decayed`: names of the parameters that have weight decay, as in transformers."""

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        decayed: Iterable[str],
        keep_masters: bool = True,
        sum_in_fp32: bool = True,
        **settings: Any,
    ) -> None:
        """`settings`: lr, betas, eps, weight_decay and seed of `MuonAdamW`."""
        named = [(name, p) for name, p in named_parameters if p.requires_grad]
        super().__init__(named, **settings)
        self._keep_masters = keep_masters
        names = set(decayed)
        (group,) = self.param_groups
        plain = [p for name, p in named if name not in names]
        group["params"] = [p for name, p in named if name in names]
        self.add_param_group(group | {"params": plain, "weight_decay": 0.0})
        if sum_in_fp32:
            for _, parameter in named:
                parameter.grad_dtype = torch.float32

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closures
        """Update every parameter. If a gradient is not finite, change nothing: neither weights nor state."""
        gradients = [
            p.grad for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        if all(bool(gradient.isfinite().all()) for gradient in gradients):
            super().step()

    def _apply(
        self, parameter: torch.nn.Parameter, update: torch.Tensor, group: dict[str, Any]
    ) -> None:
        if not self._keep_masters:
            super()._apply(parameter, update, group)
            return
        state = self.state[parameter]
        state["step"] = state.get("step", 0) + 1
        if "master" not in state:
            state["master"] = parameter.detach().float()
        master: torch.Tensor = state["master"]
        decay = 1 - group["lr"] * group["weight_decay"]
        master.mul_(decay).add_(update, alpha=-group["lr"])
        write_back(parameter, master)
