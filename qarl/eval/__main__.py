"""Score a run or a model folder in vLLM: mean reward with a 95% interval, beside BF16 if you like.

usage: qarl eval RUN_OR_FOLDER [KEY=VALUE ...]

RUN_OR_FOLDER is the folder of a run, or a model folder: one of `qarl export`, or any that vLLM loads.
Of a run its export is scored, and what a key leaves out comes from the run's config.

keys:
  against=bf16        also score the run's BF16 weights; then both are those of its latest checkpoint
  against=FOLDER      also score another model folder, with the same prompts and seeds
  step=N              the checkpoint of this step, not the export
  step=best           that of the best evaluation, which trainer.save_best keeps
  files=A,B           JSONL or parquet files like data.val_files; default: the run's data.val_files
  reward=NAME         default: the run's reward, the sum of all its functions; without a run math_verify
  environment=NAME    rollout.environment of the run, if its file was moved
  plugins=A,B         the run's plugins, if their files were moved
  keep_special_tokens=true  give the reward a response's special tokens; default: the run's, else false
  apply_chat_template_kwargs='{NAME: VALUE}'  variables of the chat template; default: the run's, else none
  stop='["TEXT"]', stop_token_ids=[ID], min_tokens=N  where responses end; default: the run's, else at the model's end
  n=N                 responses per prompt; default: the column __rollout_n__ of the file, else the run's
                      rollout.val_n, else 1
  temperature=T       default: the run's rollout.val_temperature, else 0, which needs n=1
  max_prompt_length=N, max_response_length=N    in tokens; default: the run's, else 1024 and 2048,
                      or less in this proportion if the model has fewer positions
  limit=N             only the first N prompts of the files
  seed=N              default: 0
  output=FILE.json    also write the scores to a file
  trust_remote_code=true  run the code that comes with the model; default: false

keys for tasks of lm-evaluation-harness (pip install "qarl[lm-eval]"), instead of files, reward, n and temperature:
  tasks=A,B           such as arc_challenge,gpqa_diamond_zeroshot,mmlu_pro; `lm_eval ls tasks` lists all
  num_fewshot=N       default: the task's own
  include_path=DIR    also find the tasks that the YAML files of this folder define
  apply_chat_template=true  for instruct models; default: false
  max_prompt_length=N, max_response_length=N    default: 4096 and 2048 together, within the model's positions;
                      max_response_length also replaces the harness's 256 of tasks that name no limit

mean@k is the mean over prompts of the mean of a prompt's k scores. Tables of their own have, with N responses
per prompt, best@K, the mean of the best of K of them, and maj@N, the score of the answer that most of them
give. rewards/NAME/mean, a line for each of the run's reward.functions, is the mean of that function's scores.
The interval is for new prompts of the same kind: Wilson's with the variance between prompts if scores are
from 0 to 1, otherwise a normal one. The difference of two models is taken prompt by prompt.
`python -m qarl.eval` is the same command.

exit codes:
  0    the scores were printed
  2    the arguments, the model or the data cannot be used; one message says why
  130  ended by Ctrl-C or SIGTERM
"""

from __future__ import annotations

import sys

from qarl.console import entry
from qarl.process import limit_threads


def _main(argv: list[str]) -> int:
    from qarl.config.command_arguments import read_request
    from qarl.eval.arguments import EvalRequest, check_files, settings_of

    example = "qarl eval runs/NAME against=bf16"
    request = read_request(EvalRequest, argv, example=example, positional="model")
    settings = settings_of(request)
    check_files(request, settings)
    limit_threads(settings.config.trainer.num_threads if settings.config else None)
    from qarl.eval.evaluate import evaluate

    print(evaluate(request, settings))
    return 0


main, describe = entry(_main, __doc__)


if __name__ == "__main__":
    sys.exit(main())
